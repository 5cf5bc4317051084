"""A robot that the doctor moves can be stopped, and one that is stopped is not moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.cli.doctor import doctor
from fleet.tools.doctor_stops import NAME, stoppable
from fleet.tools.stop import release_robots, robots_here, start_robots, stop_robots
from hal.drivers.fake import FakeRobot
from hal.interfaces.robot import Feedback, Robot
from hal.safety.stop_latch import StopLatch
from robot_edge.runtime import lifecycle
from wire.errors import ConfigError, RobotStoppedError

MOVE = np.array([0.5, 0, 0, 0], np.float32)


class Arm(FakeRobot):
    """Notes what it executed and how often it was stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[np.ndarray] = []
        self.stops = 0

    def write(self, action: np.ndarray) -> Feedback:
        self.told.append(action.copy())
        return super().write(action)

    def stop_motion(self) -> None:
        self.stops += 1


def test_whoever_stops_the_robots_of_this_computer_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_usual_parent", lambda: tmp_path)
    monkeypatch.setattr("fleet.tools.stop.ANSWER_S", 30.0)
    said: list[str] = []
    made: list[Arm] = []

    def make() -> Robot:
        made.append(Arm())
        return made[-1]

    with stoppable(make) as make_stoppable:
        robot = make_stoppable()
        arm = made[-1]
        assert isinstance(robot, Robot)
        robot.connect()
        robot.reset("go-left", 0)
        robot.write(MOVE)
        here = robots_here(NAME, tmp_path)
        assert stop_robots(here, said.append) == 0 and arm.stops == 1, said
        with pytest.raises(RobotStoppedError, match="stopped by cli"):
            robot.write(MOVE)
        assert arm.told[-1][0] == 0 and len(arm.told) == 2, "it was told to hold"
        for call in (robot.connect, lambda: robot.reset("go-left", 0), make_stoppable().connect):
            with pytest.raises(RobotStoppedError):
                call()
        assert release_robots(here, "all", said.append) == 0
        with pytest.raises(RobotStoppedError, match="waits to be started"):
            robot.write(MOVE)
        assert start_robots(here, said.append) == 0
        robot.write(MOVE)
        robot.close()


def test_beside_a_standing_stop_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "data" / "edges" / "arm"
    home.mkdir(parents=True)
    latch = StopLatch(home / "estop")
    latch.stop("a", "anna")
    latch.save()
    with pytest.raises(ConfigError, match=r"arm is stopped by anna \(a\).*--no-move"):
        doctor(robot="fake", yes=True)
