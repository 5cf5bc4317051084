"""How many robots `up` runs, what they are called, and of which member each is."""

from __future__ import annotations

import pytest

from fleet.config.recipes import get_recipe
from fleet.launch.robot_names import member_of_robot, members_here, robot_names
from wire.errors import ConfigError

ONE, SEVERAL = get_recipe("fake"), get_recipe("shapes")


def test_robots_of_one_shape_are_counted():
    assert robot_names(ONE, "") == ("robot-0", "robot-1", "robot-2")
    assert robot_names(ONE, "1") == ("robot-0",)
    assert member_of_robot(ONE, "whatever") == ""
    assert members_here(ONE, ("robot-0",)) == {"": ONE}


def test_robots_of_several_shapes_are_counted_by_member():
    assert robot_names(SEVERAL, "metaworld:2,fetch:1") == ("metaworld-0", "metaworld-1", "fetch-0")
    assert robot_names(SEVERAL, "") == ("metaworld-0", "fetch-0", "reach-0")
    assert robot_names(SEVERAL, "2")[::2] == ("metaworld-0", "fetch-0", "reach-0")
    assert {name: member_of_robot(SEVERAL, name) for name in ("fetch-0", "metaworld-west")} == {
        "fetch-0": "fetch",
        "metaworld-west": "metaworld",
    }
    assert list(members_here(SEVERAL, ("fetch-0", "fetch-1"))) == ["fetch"]
    assert list(members_here(SEVERAL, ())) == ["metaworld", "fetch", "reach"]


@pytest.mark.parametrize(
    ("recipe", "wanted", "why"),
    [
        (ONE, "metaworld:1", "--robots metaworld:1: recipe 'fake' is for robots of one shape; say how many"),
        (ONE, "0", "'0' is no number of robots from 1"),
        (ONE, "65", "65 robots; 64 at most"),
        (SEVERAL, "22", "66 robots; 64 at most"),
        (SEVERAL, "fetch:1,fetsch:2", "no member 'fetsch'. Did you mean 'fetch'.* such as metaworld:1,fetch:1,reach:1"),
        (SEVERAL, "fetch:1,fetch:2", "'fetch' is there twice"),
        (SEVERAL, "fetch:none", "'none' is no number of robots"),
        (SEVERAL, "fetch", "'' is no number of robots"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_what_to_say(recipe, wanted, why):
    with pytest.raises(ConfigError, match=why):
        robot_names(recipe, wanted)


def test_a_name_that_says_no_member_is_refused():
    for name in ("arm-0", "fetch", "robot-fetch"):
        with pytest.raises(ConfigError, match="Call it metaworld-N or fetch-N or reach-N"):
            member_of_robot(SEVERAL, name)
