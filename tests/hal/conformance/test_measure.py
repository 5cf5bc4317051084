"""What the doctor measures, on a robot whose time and motion the test knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from hal.conformance import ConformanceReport, Figure, check_robot
from hal.conformance.measure import measure
from hal.conformance.rules import Rules
from hal.drivers.fake import FakeConfig, FakeRobot
from hal.interfaces.robot import Feedback
from wire.clock import ManualClock
from wire.types import CommandType, Dimension, Observation

HZ = 50.0
CONFIG = FakeConfig(control_hz=HZ, camera_every_ticks=5)


class Timed(FakeRobot):
    """Takes `read_s` of the clock for a read; its arm is a servo that goes on for `coast` ticks after a hold."""

    def __init__(self, clock: ManualClock, read_s: float = 0.001, coast: int = 0, camera_every: int = 5) -> None:
        super().__init__(replace(CONFIG, camera_every_ticks=camera_every), clock)
        # What the spec promises of the camera stays.
        self.spec = FakeRobot(CONFIG).spec
        self.time, self.read_s, self.coast = clock, read_s, coast
        self.wrote: list[np.ndarray] = []
        self._left = 0

    def read(self) -> Observation:
        self.time.advance(round(self.read_s * 1e9))
        return super().read()

    def write(self, action: np.ndarray) -> Feedback:
        self.wrote.append(np.array(action))
        moving = bool(np.abs(action[:3]).max() > 0)
        self._left = self.coast if moving else max(0, self._left - 1)
        # The gripper of the fake takes its time; here only x coasts, to and fro when it never ends.
        to_and_fro = 0.5 if self._left % 2 or self.coast < 100 else -0.5
        driven = np.array([to_and_fro, 0, 0, 0] if self._left and not moving else [*action[:3], 0], np.float32)
        done = super().write(driven)
        return Feedback(np.array(action, np.float32), done.reward, done.success)


def figures(make: Callable[[ManualClock], FakeRobot], gentle: bool = False) -> tuple[dict[str, Figure], FakeRobot]:
    clock = ManualClock(1)
    robot = make(clock)
    rules = Rules(lambda: robot, "go-left", 24, False, clock, gentle=gentle)
    found = measure(rules, 4.0)
    return {figure.name: figure for figure in found}, robot


def test_a_quick_robot_keeps_its_rate() -> None:
    found, _ = figures(Timed)
    assert abs(found["read p50"].value - 1.0) < 0.01
    assert found["read + write p99"].holds and found["missed periods"].value == 0
    assert abs(found["camera front"].value - 10.0) < 0.2 and found["camera front"].holds
    assert found["stands still after"].holds


def test_a_driver_slower_than_its_rate_is_found() -> None:
    found, _ = figures(lambda clock: Timed(clock, read_s=0.03))
    assert not found["read + write p99"].holds and found["read + write p99"].limit == 20.0
    assert found["missed periods"].value > 20 and "50 Hz is not kept" in str(found["missed periods"])


def test_a_camera_slower_than_its_spec_is_found() -> None:
    found, _ = figures(lambda clock: Timed(clock, camera_every=20))
    assert abs(found["camera front"].value - 2.5) < 0.2
    assert "the spec says 10 Hz" in str(found["camera front"])


def test_the_way_to_a_standstill_is_measured() -> None:
    found, _ = figures(lambda clock: Timed(clock, coast=10))
    # Half a centimetre a tick of 0.6 m; ten ticks of 20 ms.
    assert abs(found["stands still after"].value - 200) <= 41
    assert 5 < found["way to standstill (x)"].value < 10


def test_a_robot_that_never_stops_is_named_with_the_dimension() -> None:
    found, _ = figures(lambda clock: Timed(clock, coast=10_000))
    assert not found["stands still after"].holds
    assert "x goes on" in str(found["stands still after"])


def test_gentle_begins_where_the_robot_stands_and_commands_no_limit() -> None:
    clock = ManualClock(1)
    robot = Timed(clock)
    absolute = tuple(Dimension(d.name, "m", d.low, d.high, CommandType.absolute) for d in robot.spec.state)
    robot.spec = msgspec.structs.replace(robot.spec, action=absolute)
    rules = Rules(lambda: robot, "go-left", 24, False, clock, gentle=True)
    measure(rules, 2.0)
    start = robot.wrote[0]
    swing = np.array(robot.wrote)
    span = np.array([d.high - d.low for d in absolute])
    assert (np.abs(swing - start) <= 0.05 * span / 2 + 1e-6).all()
    assert (np.abs(np.diff(swing, axis=0)) <= 0.02 * span).all()
    report = check_robot(lambda: FakeRobot(CONFIG), "go-left", seeded=False, gentle=True, clock=ManualClock())
    assert "write_limits" not in [check.name for check in report.checks]
    assert "deterministic" not in [check.name for check in report.checks]


def test_no_move_only_connects() -> None:
    wrote: list[FakeRobot] = []

    def make() -> FakeRobot:
        wrote.append(Timed(ManualClock(1)))
        return wrote[-1]

    report = check_robot(make, "go-left", move=False, measure_s=5.0)
    assert report.passed and [check.name for check in report.checks] == ["spec", "connect"]
    assert all(not robot.wrote and not robot.task for robot in wrote)  # type: ignore[attr-defined]


def test_a_report_tells_what_failed_and_fits_in_json() -> None:
    report = ConformanceReport(
        (), (Figure("read p99", 30.0, "ms", 20.0, advice="be quicker"), Figure("reset", 1.0, "s"))
    )
    assert not report.passed and report.failed == ("read p99",)
    assert "FAIL read p99 30 ms (at most 20): be quicker" in str(report) and "0 of 1 checks passed" in str(report)
    assert report.as_json()["figures"][1]["holds"] is True
