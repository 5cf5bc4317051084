"""A robot that is slowed: by a share of its own limits, at once, without a jerk, and for as long as anybody says so."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.drivers.fake import FAKE_LIMITS, FakeRobot
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from hal.safety.stop_latch import MORE as OTHERS
from hal.safety.stop_latch import MOST_STOPS, StopLatch
from tests.hal.safety.guarded import LIMITS, SPEC, STATE, P
from wire.errors import ConfigError, InvalidDataError
from wire.stop_state import StopState
from wire.types import Observation

TOP = np.array([30.0, 1.0, 4.0])
CHANGE = np.array([200.0, 6.0, 40.0]) * P
FREE = SafetyLimits(velocity=LIMITS.velocity, acceleration=LIMITS.acceleration)
MORE = 1 + 1e-5


class Bench:
    """A robot of all three meanings that executes what it is given."""

    def __init__(self, latch: StopLatch | None = None, limits: SafetyLimits = FREE) -> None:
        self.spec, self.state, self.speed = SPEC, STATE.copy(), np.zeros(3)
        self.robot = LimitedRobot(self, limits, latch)
        self.robot.connect()
        self.robot.reset("stay", 0)

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None: ...

    def read(self) -> Observation:
        return Observation(1, self.state.copy(), {}, "stay")

    def write(self, action: np.ndarray) -> Feedback:
        return Feedback(action)

    def close(self) -> None: ...

    def step(self, wanted: np.ndarray | None) -> np.ndarray:
        """Its speed after one period of `wanted`, or of hold; None of its limits is broken on the way."""
        before = self.robot.executed
        done = self.robot.hold() if wanted is None else self.robot.write(wanted.astype(np.float32))
        last = STATE[2] if before is None else before[2]
        speed = np.array([done.executed[0] / P, done.executed[1], (done.executed[2] - last) / P])
        assert np.all(np.abs(speed) <= TOP * MORE)
        assert np.all(np.abs(speed - self.speed) <= CHANGE * (1 + 1e-3))
        assert done.executed is self.robot.executed, "what is reported is what was executed"
        self.speed = speed
        return speed


def push(bench: Bench, way: float = 1.0) -> np.ndarray:
    """As fast as it goes, to where there is room."""
    target = 3.0 if way > 0 else 0.2
    return np.array([way, 2 * way, target])


def test_it_counts_from_the_next_command_and_brakes_no_harder_than_it_may() -> None:
    bench = Bench()
    while not np.allclose(bench.speed[:2], TOP[:2], rtol=1e-3):
        bench.step(push(bench))
    before = bench.speed.copy()
    bench.robot.limit_speed("cli", 0.25)
    first = bench.step(push(bench))
    assert np.allclose(before[:2] - first[:2], CHANGE[:2], rtol=1e-3), "as hard as acceleration allows, at once"
    ticks = math.ceil((0.75 * TOP / CHANGE).max()) + 1
    for _ in range(ticks):
        bench.step(push(bench))
    assert np.allclose(bench.speed[:2], 0.25 * TOP[:2], rtol=1e-3), "and no slower than it must be"
    bench.robot.limit_speed("cli", 1.0)
    bench.step(push(bench))
    assert bench.speed[1] > 0.25 * TOP[1] * MORE


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 0.7, 0.25, 0.05, None]),
            st.integers(1, 30),
            st.tuples(*[st.floats(-2, 2)] * 2, st.floats(0.2, 3)),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_whatever_is_asked_it_is_within_its_share_as_soon_as_it_can_have_braked(
    stretches: list[tuple[float | None, int, tuple[float, float, float], bool]],
) -> None:
    bench, share, allowed = Bench(), 1.0, TOP.copy()
    for new, ticks, wanted, hold in stretches:
        if new is not None:
            share = new
            bench.robot.limit_speed("cli", share)
        for _ in range(ticks):
            # What braking as hard as it may makes of the speed that was allowed before.
            allowed = np.maximum(share * TOP, allowed - CHANGE * (1 - 2e-3))
            speed = bench.step(None if hold else np.array(wanted))
            assert np.all(np.abs(speed) <= allowed * MORE + 1e-4)


def test_a_stop_brakes_as_hard_as_ever_while_it_is_slowed() -> None:
    limits = SafetyLimits(
        velocity=LIMITS.velocity, acceleration=LIMITS.acceleration, stop_deceleration={"spin": 6.0, "move": 400.0}
    )
    speeds = []
    for share in (1.0, 0.5):
        bench = Bench(limits=limits)
        bench.robot.limit_speed("cli", share)
        for _ in range(60):
            bench.robot.write(push(bench).astype(np.float32))
        bench.robot.stop("a", "pedal")
        before = bench.robot.executed[0] / P
        speeds.append(before - bench.robot.hold().executed[0] / P)
    assert speeds[0] == pytest.approx(400.0 * P, rel=1e-3) == speeds[1]


def test_the_smallest_limit_counts_and_each_takes_back_its_own() -> None:
    robot = Bench().robot
    assert robot.limit_speed("cli", 0.5).speed_limit == 0.5
    assert robot.limit_speed("ros", 0.8).speed_limit == 0.5
    assert robot.limit_speed("cli", 1.0) == StopState(speed_limits={"ros": 0.8})
    assert str(robot.stop_state()) == "not stopped; slowed to 0.8 of its speed by ros"
    assert robot.limit_speed("ros", 1.0) == StopState()


def test_stops_and_speed_limits_leave_each_other_alone() -> None:
    robot = Bench().robot
    robot.limit_speed("cli", 0.5)
    robot.stop("a", "pedal")
    assert robot.limit_speed("ros", 0.4).stops == {"a": "pedal"}
    robot.release("a")
    assert robot.stop_state() == StopState(ready=True, speed_limits={"cli": 0.5, "ros": 0.4}, last="a")
    assert robot.start().free
    assert robot.stop_state().speed_limit == 0.4
    done = robot.write(STATE)
    assert done.stop == robot.stop_state(), "whoever commands it learns that it is slowed"


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_what_is_no_share_is_refused(share: float) -> None:
    robot = Bench().robot
    with pytest.raises(InvalidDataError, match=r"above 0 up to 1, such as 0\.25"):
        robot.limit_speed("cli", share)
    assert robot.stop_state() == StopState()


def test_stops_beyond_those_that_are_remembered_by_name_keep_it_stopped_until_the_last_is_released() -> None:
    latch = StopLatch()
    for press in range(MOST_STOPS + 5):
        latch.stop(str(press), "anna")
    assert latch.state.stops[OTHERS] == "others" and latch.state.last == str(MOST_STOPS + 4)
    latch.release(OTHERS)
    for press in range(MOST_STOPS):
        assert len(latch.state.stops) == MOST_STOPS + 1 - press
        latch.release(str(press))
    assert list(latch.state.stops) == [OTHERS] and not latch.state.ready
    latch.release(OTHERS)
    assert latch.state.ready


def test_not_more_people_than_can_be_remembered_slow_it() -> None:
    latch = StopLatch()
    for who in range(MOST_STOPS):
        latch.limit_speed(str(who), 0.5)
    with pytest.raises(InvalidDataError, match="slow the robot already"):
        latch.limit_speed("another", 0.1)
    latch.limit_speed("0", 0.1)
    assert latch.state.speed_limit == 0.1


def test_a_robot_without_velocity_limits_says_what_is_missing() -> None:
    robot = LimitedRobot(FakeRobot(), FAKE_LIMITS)
    with pytest.raises(ConfigError, match=r"no velocity limit of gripper_effort\. Add"):
        robot.limit_speed("cli", 0.5)
    assert robot.stop_state() == StopState()
    assert robot.limit_speed("cli", 1.0) == StopState(), "at full speed there is nothing to scale"


def test_bounds_of_a_delta_or_velocity_are_scaled_where_nothing_else_limits_it() -> None:
    limiter = SafetyLimiter(SPEC, SafetyLimits(velocity={"joint": 4.0}))
    limiter.slow(0.5)
    assert limiter.limit(np.array([1, -2, 3], np.float32), STATE).tolist() == [0.5, -1.0, pytest.approx(1.025)]


class TestRestart:
    def test_a_slowed_robot_is_slow_after_its_host_died(self, tmp_path: Path) -> None:
        latch = StopLatch(tmp_path / "estop")
        Bench(latch).robot.limit_speed("cli", 0.25)
        latch.save()
        bench = Bench(StopLatch(tmp_path / "estop"))
        for _ in range(100):
            assert np.all(np.abs(bench.step(push(bench))) <= 0.25 * TOP * MORE)
        assert bench.speed[1] == pytest.approx(0.25)

    def test_one_that_is_at_full_speed_leaves_no_file(self, tmp_path: Path) -> None:
        latch = StopLatch(tmp_path / "estop")
        latch.limit_speed("cli", 0.25)
        latch.save()
        latch.limit_speed("cli", 1.0)
        latch.save()
        assert not (tmp_path / "estop").exists()

    def test_one_that_could_not_be_slowed_any_more_is_not_driven(self, tmp_path: Path) -> None:
        latch = StopLatch(tmp_path / "estop")
        latch.limit_speed("cli", 0.25)
        with pytest.raises(ConfigError, match="cannot be slowed"):
            LimitedRobot(FakeRobot(), FAKE_LIMITS, latch)

    def test_a_file_with_a_limit_that_is_none_stands_for_a_stop(self, tmp_path: Path) -> None:
        (tmp_path / "estop").write_text('{"stops": {}, "ready": false, "speed_limits": {"cli": 40}}')
        assert StopLatch(tmp_path / "estop").state.stops
