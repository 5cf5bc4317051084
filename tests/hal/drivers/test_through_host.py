"""These drivers as a fleet runs them: in their host, which commands hold by itself and carries the pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.driver_host.proxy import RobotProxy
from hal.drivers.fake import FakeConfig, FakeRobot
from hal.drivers.gym.presets import fetch, pusht
from hal.drivers.gym.robot import GymRobot
from hal.drivers.replay import ReplayConfig, ReplayRobot
from hal.drivers.with_cameras import CameraChoice, CameraRobot, CameraRobotConfig
from hal.interfaces.robot import Robot
from tests.hal.driver_host.test_proxy import hosted, place  # noqa: F401 - a fixture
from tests.hal.drivers.recorded import record
from wire.clock import ManualClock, MonotonicClock
from wire.episode_file import EpisodeHeader, write_episode


def push_t(tmp_path: Path) -> tuple[Robot, str]:
    pytest.importorskip("gym_pusht")
    return GymRobot(pusht(image_px=48)), "push-t"


def reach(tmp_path: Path) -> tuple[Robot, str]:
    pytest.importorskip("gymnasium_robotics")
    return GymRobot(fetch()), "reach"


def with_cameras(tmp_path: Path) -> tuple[Robot, str]:
    pattern = CameraChoice("pattern", {"name": "wrist", "height": 32, "width": 64, "rate_hz": 100.0})
    return CameraRobot(CameraRobotConfig("fake", (pattern,), {"control_hz": 20.0})), "go-up"


def replay(tmp_path: Path) -> tuple[Robot, str]:
    segments = record(40).segments
    header = EpisodeHeader(FakeRobot(FakeConfig(image_px=32)).spec, segments[0].episode, "go", "success", 40)
    write_episode(tmp_path / "one.episode", header, segments)
    return ReplayRobot(ReplayConfig(str(tmp_path / "one.episode"), "given")), "go-right"


@pytest.mark.parametrize("make", [push_t, reach, with_cameras, replay])
@pytest.mark.slow
def test_it_keeps_the_contract_there(
    make: Callable[[Path], tuple[Robot, str]],
    place: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    robot, task = make(tmp_path)
    clock = MonotonicClock() if isinstance(robot, CameraRobot) else ManualClock()
    with hosted(robot, place):
        report = check_robot(lambda: RobotProxy(robot.spec, place), task, ticks=6, clock=clock)
    # the first reset draws the first picture: nothing else may be slow or wrong
    assert report.passed, str(report)


def test_the_pictures_are_those_of_the_driver(place: Path) -> None:  # noqa: F811
    pytest.importorskip("gym_pusht")
    driver, twin = GymRobot(pusht(image_px=48)), GymRobot(pusht(image_px=48))
    with hosted(driver, place) as control:
        for robot in (control, twin):
            robot.connect()
            robot.reset("push-t", 7)
        for goal in (100.0, 400.0, 200.0):
            action = np.full(2, goal, np.float32)
            seen, same = control.read(), twin.read()
            assert np.array_equal(seen.images["top"].image, same.images["top"].image)
            assert np.array_equal(seen.state, same.state)
            assert np.array_equal(control.write(action).executed, twin.write(action).executed)
    twin.close()
