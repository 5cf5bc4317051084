"""A robot that is not reset is watched as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hal.driver_host.watched_robot import WatchedRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from tests.hal.driver_host.hosting import BLOCK, LOG, WHEELS, Wheels
from wire.clock import ManualClock
from wire.errors import RobotMovingError, RobotStoppedError


@pytest.mark.parametrize("stopped", [False, True])
def test_a_robot_that_moves_is_held_though_it_was_to_be_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "notes"))
    monkeypatch.setenv(BLOCK, "")
    clock = ManualClock(10**9)
    robot = LimitedRobot(Wheels(), SafetyLimits(acceleration={"forward": 10.0}))
    watched = WatchedRobot(robot, clock)
    robot.connect()
    watched.reset("drive", 0)
    for _ in range(5):
        watched.execute(np.array([1.0], np.float32), clock.now_ns())
        clock.advance(WHEELS.period_ns)
    if stopped:
        robot.stop("1", "page")
    with pytest.raises(RobotStoppedError if stopped else RobotMovingError):
        watched.reset("drive", 1)
    for _ in range(20):
        clock.advance(WHEELS.period_ns)
        watched.poll("nobody commands it")
    assert robot.executed is not None and robot.executed.tolist() == [0.0]
