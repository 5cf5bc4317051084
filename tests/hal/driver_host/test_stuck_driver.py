"""A base that keeps its last velocity, and a driver that does not come back: how long it goes on."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from hal.driver_host.proxy import RobotProxy
from hal.driver_host.stuck_driver import StuckDriverWatch
from hal.driver_host.watchdog import CallDeadline
from hal.driver_host.watched_robot import WatchedRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from tests.hal.driver_host.hosting import BLOCK, LOG, PERIOD_S, WHEELS, BrakedWheels
from tests.hal.driver_host.test_server import Processes, place, processes  # noqa: F401
from wire.errors import RobotError

pytestmark = pytest.mark.slow
BUSY_S = 0.15
"""for this machine, which may let a process wait"""


def drive(
    processes: Processes,  # noqa: F811
    kind: str,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    velocity: float = 0.5,
) -> tuple[RobotProxy, int]:
    """A host whose base drives and whose driver then blocks in `call`; and since when it does."""
    block = processes.path.with_name(f"block_in_{call}")
    monkeypatch.setenv(BLOCK, str(block))
    processes.start("tests.hal.driver_host.hosting", kind, str(processes.path))
    robot = RobotProxy(WHEELS, processes.path, call_s=5.0)
    robot.connect()
    robot.reset("drive", 0)
    for _ in range(5):
        robot.read()
        robot.write(np.array([velocity], np.float32))
    block.touch()
    return robot, time.monotonic_ns()


def stopped_after_s(processes: Processes, blocked_ns: int) -> float:  # noqa: F811
    """Waits until the base was told to stand."""
    processes.until(lambda lines: lines[-1][2] == [0.0], "it stands")
    return (next(ns for ns, _, told in processes.lines() if told == [0.0] and ns > blocked_ns) - blocked_ns) / 1e9


@pytest.mark.parametrize("call", ["read", "write"])
def test_while_the_driver_blocks_its_own_brake_is_pulled(
    processes: Processes,  # noqa: F811
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    robot, blocked_ns = drive(processes, "braked-wheels", call, monkeypatch)
    with pytest.raises(RobotError, match="ended during"):
        robot.read() if call == "read" else robot.write(np.array([0.5], np.float32))
    ended_s = (time.monotonic_ns() - blocked_ns) / 1e9
    # Two periods without a command, 50 ms for a busy machine, and as long again until somebody looks.
    assert stopped_after_s(processes, blocked_ns) < 2 * PERIOD_S + 0.075 + BUSY_S
    assert 0.3 < ended_s < 0.3 + 0.3 / 4 + BUSY_S, "the driver is cut off, that a new one can have the robot"
    assert "its driver blocks" in processes.said() and "by its own way" in processes.said()


def test_without_a_brake_the_driver_is_cut_off_soon_and_the_next_one_stops_it(
    processes: Processes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    robot, blocked_ns = drive(processes, "wheels", "read", monkeypatch)
    with pytest.raises(RobotError, match="ended during"):
        robot.read()
    assert (time.monotonic_ns() - blocked_ns) / 1e9 < 0.3 + 0.3 / 4 + BUSY_S
    assert processes.lines()[-1][2] == [0.5], "nobody could tell it to stand"
    processes.path.with_name("block_in_read").unlink()
    processes.wait()
    processes.start("tests.hal.driver_host.hosting", "wheels", str(processes.path))
    robot.connect()
    assert processes.lines()[-1][2] == [0.0], "whoever has it next does not wait for a scene"
    robot.close()


@pytest.mark.parametrize(("kind", "velocity"), [("wheels", 0.5), ("braked-wheels", 0.5), ("braked-wheels", 0.0)])
def test_a_driver_that_holds_the_interpreter_is_cut_off_and_the_next_one_stops_the_robot(
    processes: Processes,  # noqa: F811
    kind: str,
    velocity: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    robot, blocked_ns = drive(processes, kind, "read_in_C", monkeypatch, velocity)
    with pytest.raises(RobotError, match="ended during"):
        robot.read()
    # No thread of it can run: neither can its brake be pulled nor a driver that stands be asked about.
    assert (time.monotonic_ns() - blocked_ns) / 1e9 < 0.3 + 0.3 / 4 + BUSY_S
    assert "in read" in processes.said(), "where it was is in the log"
    processes.path.with_name("block_in_read_in_C").unlink()
    processes.wait()
    processes.start("tests.hal.driver_host.hosting", "braked-wheels", str(processes.path))
    robot.connect()
    assert processes.lines()[-1][2] == [0.0]
    robot.close()


def test_connecting_may_hold_the_interpreter_for_longer(
    processes: Processes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    robot, _ = drive(processes, "braked-wheels", "reset_in_C", monkeypatch, 0.0)
    robot.reset("drive", 1)
    robot.read()
    robot.close()


def test_after_its_brake_it_is_not_told_to_slow_down_from_its_old_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "notes"))
    monkeypatch.setenv(BLOCK, "")
    robot = LimitedRobot(BrakedWheels(), SafetyLimits(acceleration={"forward": 1.0}))
    robot.connect()
    robot.reset("drive", 0)
    for _ in range(10):
        robot.write(np.array([1.0], np.float32))
    assert robot.executed is not None and robot.executed[0] > 0.1 and robot.coasting
    assert robot.stop_motion()
    assert robot.hold().executed[0] == 0 and not robot.coasting


def test_a_driver_that_answers_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG, str(tmp_path / "notes"))
    monkeypatch.setenv(BLOCK, "")
    robot = LimitedRobot(BrakedWheels())
    robot.connect()
    robot.reset("drive", 0)
    watched = WatchedRobot(robot)
    watch = StuckDriverWatch(watched, CallDeadline())
    watch.start()
    for _ in range(20):
        watched.execute(np.array([0.5], np.float32), time.monotonic_ns())
        time.sleep(PERIOD_S / 2)
    watch.close()
    told = [float(line.split()[2]) for line in (tmp_path / "notes").read_text().splitlines()]
    assert told == [0.0] + [0.5] * 20, "stopped when it was connected, and driven from then on"
