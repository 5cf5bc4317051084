"""A robot that is not reset is watched as before, and one that is closed stands first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hal.driver_host.watched_robot import WatchedRobot
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from tests.hal.driver_host.hosting import BLOCK, LOG, WHEELS, Wheels
from tests.hal.driver_host.test_proxy import hosted, place  # noqa: F401
from wire.clock import ManualClock
from wire.errors import RobotError, RobotMovingError, RobotStoppedError

LIMITS = SafetyLimits(acceleration={"forward": 10.0}, stop_deceleration={"forward": 20.0})


@pytest.fixture()
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOG, str(tmp_path / "notes"))
    monkeypatch.setenv(BLOCK, "")
    return tmp_path / "notes"


def driving(wheels: Wheels) -> tuple[WatchedRobot, ManualClock]:
    """At full speed."""
    clock = ManualClock(10**9)
    watched = WatchedRobot(LimitedRobot(wheels, LIMITS), clock)
    watched.robot.connect()
    watched.reset("drive", 0)
    for _ in range(5):
        watched.execute(np.array([1.0], np.float32), clock.now_ns())
        clock.advance(WHEELS.period_ns)
    return watched, clock


def told(notes: Path) -> list[float]:
    return [float(line.split()[2]) for line in notes.read_text().splitlines()]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_robot_that_moves_is_held_though_it_was_to_be_reset(notes: Path, stopped: bool) -> None:
    watched, clock = driving(Wheels())
    if stopped:
        watched.robot.stop("1", "page")
    with pytest.raises(RobotStoppedError if stopped else RobotMovingError):
        watched.reset("drive", 1)
    for _ in range(20):
        clock.advance(WHEELS.period_ns)
        watched.poll("nobody commands it")
    assert watched.robot.executed is not None and watched.robot.executed.tolist() == [0.0]


@pytest.mark.parametrize(("stopped", "braking"), [(False, [0.8, 0.6, 0.4, 0.2, 0.0]), (True, [0.8, 0.4, 0.0])])
def test_before_it_is_closed_it_comes_to_hold_by_its_limits_or_a_stop(
    notes: Path, stopped: bool, braking: list[float]
) -> None:
    watched, clock = driving(Wheels())
    begun_ns, count = clock.now_ns(), len(told(notes))
    if stopped:
        watched.robot.on_write = lambda: watched.robot.stop("1", "page") and None
    watched.come_to_hold("it is to be closed")
    assert told(notes)[count:] == pytest.approx(braking, abs=1e-6)
    assert clock.now_ns() - begun_ns == (len(braking) - 1) * WHEELS.period_ns, "one command in a period"
    watched.robot.close()
    watched.come_to_hold("it is closed")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_driver_that_brings_nothing_to_hold_is_closed_nevertheless(notes: Path, refuses: bool) -> None:
    class Runaway(Wheels):
        refuses = False

        def write(self, action: np.ndarray) -> Feedback:
            if self.refuses:
                raise RobotError("the bus is busy")
            return Feedback(np.ones(1, np.float32))

    wheels = Runaway()
    watched, clock = driving(wheels)
    begun_ns, wheels.refuses = clock.now_ns(), refuses
    watched.come_to_hold("it is to be closed")
    assert clock.now_ns() - begun_ns == (0 if refuses else 2_000_000_000)


def test_control_that_closes_it_at_speed_has_it_braked_first(notes: Path, place: Path) -> None:  # noqa: F811
    with hosted(Wheels(), place, safety=LIMITS) as robot:
        robot.connect()
        robot.reset("drive", 0)
        while robot.write(np.array([1.0], np.float32)).executed[0] < 1.0:
            pass
        robot.close()
        assert np.abs(np.diff(told(notes))).max() == pytest.approx(0.2, abs=1e-6) and told(notes)[-2] == 0.0
