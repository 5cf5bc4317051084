"""A robot of a third party's lerobot package, with cameras whose reading blocks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.lerobot.spec import DimensionConfig, LeRobotConfig
from tests.extras import needs
from wire.errors import ConfigError, InvalidDataError, RobotError
from wire.types import CommandType

pytestmark = [needs("lerobot"), pytest.mark.slow]  # importing lerobot alone takes ten seconds

DIMENSIONS = {
    "lift.height": DimensionConfig("m", 0.0, 1.0),
    "left.vel": DimensionConfig("rad/s", -5, 5, CommandType.velocity),
    "right.vel": DimensionConfig("rad/s", -5, 5, CommandType.velocity),
    "battery": DimensionConfig("1", 0, 1),
}
FRONT = {"front": {"type": "standin", "width": 32, "height": 24, "fps": 7}}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package as pip would install it: lerobot finds it by the name of its distribution."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent / "standin" / "lerobot_robot_standin", site / "lerobot_robot_standin")
    (site / "lerobot_robot_standin-1.0.dist-info").mkdir()
    (site / "lerobot_robot_standin-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lerobot_robot_standin\nVersion: 1.0\n"
    )
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))


def config(tmp_path: Path, fields: dict[str, Any] | None = None, **options: Any) -> LeRobotConfig:
    fields = {"calibration_dir": str(tmp_path), **(fields or {})}
    return LeRobotConfig("standin", fields, {"carry": "carry the box"}, **({"dimensions": DIMENSIONS} | options))


def at_work(config: LeRobotConfig) -> LeRobotRobot:
    robot = LeRobotRobot(config)
    robot.connect()
    robot.reset("carry", 0)
    return robot


def test_it_is_found_and_keeps_the_contract(tmp_path: Path) -> None:
    fields = {"cameras": FRONT}
    report = check_robot(
        lambda: LeRobotRobot(config(tmp_path, fields, control_hz=50.0)), "carry", ticks=6, seeded=False
    )
    assert report.passed, str(report)


def test_its_spec_is_what_features_and_configuration_say(tmp_path: Path) -> None:
    spec = LeRobotRobot(config(tmp_path, {"cameras": FRONT}, leave_out=("battery",))).spec
    assert [d.name for d in spec.state] == ["lift.height", "left.vel", "right.vel"]
    assert [d.meaning for d in spec.action] == [CommandType.absolute, CommandType.velocity, CommandType.velocity]
    assert (spec.cameras[0].name, spec.cameras[0].height, spec.cameras[0].width, spec.cameras[0].rate_hz) == (
        "front",
        24,
        32,
        7.0,
    )


def test_a_dimension_nobody_described_is_named(tmp_path: Path) -> None:
    some = {name: DIMENSIONS[name] for name in ("lift.height", "left.vel", "battery")}
    with pytest.raises(ConfigError, match=r"no unit, low, high of right.vel\. Give them: dimensions="):
        LeRobotRobot(config(tmp_path, dimensions=some))


def test_a_camera_that_waits_does_not_make_a_tick_wait(tmp_path: Path) -> None:
    robot = at_work(config(tmp_path, {"cameras": FRONT}))
    times, reads = set(), 0
    while len(times) < 4:
        seen = robot.read()
        reads += 1
        assert seen.images["front"].time_ns <= seen.time_ns
        times.add(seen.images["front"].time_ns)
        time.sleep(0.005)
    robot.close()
    assert reads > 2 * len(times), "each picture has the time it came, and nobody waited for one"


@pytest.mark.parametrize(("mode", "channel"), [("rgb", 0), ("bgr", 2)])
def test_pictures_are_rgb_and_of_the_wanted_size(tmp_path: Path, mode: str, channel: int) -> None:
    fields = {"cameras": {"front": FRONT["front"] | {"color_mode": mode, "slow_s": 0.01}}}
    robot = at_work(config(tmp_path, fields, images={"front": (12, 16)}))
    frame = robot.read().images["front"]
    robot.close()
    assert frame.image.shape == (12, 16, 3)
    assert frame.preview is not None
    assert frame.preview.shape == (24, 32, 3)
    assert frame.image[..., channel].min() > 0
    assert frame.image.sum() == frame.image[..., channel].sum(dtype=int)


def test_a_robots_own_picture_counts_once_while_it_is_the_same(tmp_path: Path) -> None:
    robot = at_work(config(tmp_path, {"own_picture": True}))
    first, again = robot.read(), robot.read()
    assert first.images["own"].time_ns == again.images["own"].time_ns
    robot.write(np.float32([1.0, 0, 0]))
    assert robot.read().images["own"].time_ns > again.images["own"].time_ns
    robot.close()


def test_executed_is_what_the_robot_says(tmp_path: Path) -> None:
    robot = at_work(config(tmp_path))
    assert robot.write(np.float32([1.0, 2, -2])).executed == pytest.approx([0.3, 2, -2])
    with pytest.raises(InvalidDataError, match=r"left\.vel"):
        robot.write(np.float32([1.0, np.nan, 0]))
    robot.close()


def test_wheels_stop_when_it_is_closed(tmp_path: Path) -> None:
    robot = at_work(config(tmp_path))
    robot.write(np.float32([0.3, 5, 5]))
    lerobots = robot._robot
    robot.close()
    assert lerobots.commands[-1] == {"lift.height": pytest.approx(0.3), "left.vel": 0.0, "right.vel": 0.0}
    assert not lerobots.is_connected


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("connect", "cannot be connected: OSError: no such bus"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("shape", "did not measure left.vel, right.vel, battery"),
    ],
)
def test_what_it_does_wrong_is_named(tmp_path: Path, fail: str, message: str) -> None:
    robot = LeRobotRobot(config(tmp_path, {"fail": fail}))
    with pytest.raises(RobotError, match=message):
        robot.connect()
        robot.reset("carry", 0)
        robot.read()
    robot.close()


def test_a_module_of_another_name_is_given_as_plugin(tmp_path: Path) -> None:
    with pytest.raises(RobotError, match="its plugin 'no_such_module' cannot be imported"):
        LeRobotRobot(config(tmp_path, plugins=("no_such_module",)))
