from __future__ import annotations

import pytest

from hal.resource.capabilities import capabilities_of, missing_requirements, satisfies
from tests.hal.scheduler.fleets import capabilities
from wire.messages.fleet import Requirement
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

SPEC = RobotSpec(
    "arm",
    (Dimension("x", "m", -1.0, 1.0),),
    (Dimension("dx", "m", -0.1, 0.1, CommandType.delta), Dimension("grip", "1", 0.0, 1.0, CommandType.absolute)),
    (CameraSpec("wrist", 48, 64, 30.0),),
    20.0,
)


def test_they_say_what_the_spec_says() -> None:
    found = capabilities_of(SPEC, ("reach",), "north")
    assert (found.embodiment, found.spec_hash) == ("arm", SPEC.hash)
    assert (found.state_dim, found.action_dim, found.control_hz) == (1, 2, 20.0)
    assert found.meanings == ("absolute", "delta")
    assert (found.cameras, found.site, found.tasks) == (("wrist",), "north", ("reach",))


def test_asking_for_nothing_fits_everyone() -> None:
    assert missing_requirements(Requirement(), "robot-0", capabilities()) == ""
    assert missing_requirements(Requirement(), "robot-0", capabilities_of(SPEC)) == ""


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        (Requirement(robots=("robot-1",)), "robots: 'robot-0' is not one of 'robot-1'"),
        (Requirement(embodiment="humanoid"), "embodiment: 'robot-0' is of 'arm', not of 'humanoid'"),
        (Requirement(spec_hash="f" * 16), f"spec_hash: 'robot-0' has robot spec {'0' * 16}"),
        (Requirement(meanings=("velocity",)), "meanings: 'robot-0' has actions that are 'absolute'"),
        (Requirement(cameras=("wrist", "front")), "cameras: 'robot-0' has no 'wrist' (it has 'front')"),
        (Requirement(site="south"), "site: 'robot-0' stands at 'north', not at 'south'"),
        (Requirement(tasks=("fold",)), "tasks: 'robot-0' can do 'reach', none of 'fold'"),
    ],
)
def test_what_is_missing_is_named_with_its_field(requirement: Requirement, said: str) -> None:
    found = capabilities(cameras=("front",), site="north", tasks=("reach",))
    assert said in missing_requirements(requirement, "robot-0", found)


def test_one_of_the_tasks_is_enough_and_no_tasks_means_all() -> None:
    assert missing_requirements(Requirement(tasks=("fold", "reach")), "robot-0", capabilities(tasks=("reach",))) == ""
    assert missing_requirements(Requirement(tasks=("fold",)), "robot-0", capabilities()) == ""
    assert satisfies(("fold", "reach"), capabilities(tasks=("reach", "push"))) == ("reach",)
    assert satisfies(("fold", "reach"), capabilities()) == ("fold", "reach")


def test_only_these_meanings_means_no_other() -> None:
    both = capabilities(meanings=("absolute", "delta"))
    assert missing_requirements(Requirement(meanings=("absolute", "delta", "velocity")), "r", both) == ""
    assert "'delta'" in missing_requirements(Requirement(meanings=("absolute",)), "r", both)
