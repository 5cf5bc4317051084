"""Absolute targets are approached so that they are not passed, and followed without lag where the limits allow it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from wire.types import Dimension, RobotSpec

RANGE = 100.0


class Joint:
    """One joint under limits, and what it was told so far."""

    def __init__(self, speed: float, acceleration: float, hz: float, at: float) -> None:
        joint = Dimension("joint", "deg", -RANGE, RANGE)
        limits = SafetyLimits({"joint": speed}, {"joint": acceleration})
        self.limiter = SafetyLimiter(RobotSpec("arm", (joint,), (joint,), (), hz), limits)
        self.speed, self.acceleration, self.hz = speed, acceleration, hz
        self.told = [float(np.float32(at))]

    def follow(self, path: np.ndarray) -> np.ndarray:
        """float64[n]: where it is told to go for each target of `path`, float[n]; the limits are checked."""
        for target in path:
            self._do(self.limiter.limit(np.array([target], np.float32), np.array(self.told[-1:], np.float32)))
        told = np.array(self.told)
        # float32 knows places only so well
        grain = float(np.spacing(np.float32(RANGE)))
        speeds = np.diff(told) * self.hz
        assert np.abs(speeds).max(initial=0) <= self.speed + grain * self.hz
        changes = np.diff(np.array([0.0, *speeds])) * self.hz
        assert np.abs(changes).max(initial=0) <= self.acceleration + 4 * grain * self.hz**2
        return told[-len(path) :]

    def hold(self) -> None:
        self._do(self.limiter.brake(np.array(self.told[-1:], np.float32)))

    def _do(self, action: np.ndarray) -> None:
        self.limiter.note(action, np.array(self.told[-1:], np.float32))
        self.told.append(float(action[0]))

    @property
    def moving(self) -> float:
        return (self.told[-1] - self.told[-2]) * self.hz if len(self.told) > 1 else 0.0

    @property
    def stopping(self) -> float:
        """The way it needs to stop, at least."""
        change = self.acceleration / self.hz
        left = abs(self.moving) - change * np.arange(1, 1000)
        return float(left[left > 0].sum()) / self.hz


RATES = st.sampled_from([20.0, 30.0, 50.0, 125.0])
SPEEDS = st.floats(5.0, 200.0)
SPEED_UPS_S = st.floats(0.05, 1.0)
PLACES = st.floats(-RANGE, RANGE)
TINY = 1e-3


@given(SPEEDS, SPEED_UPS_S, RATES, PLACES, PLACES)
@settings(max_examples=80, deadline=None)
def test_a_target_that_stands_is_reached_and_not_passed(
    speed: float, speed_up_s: float, hz: float, at: float, target: float
) -> None:
    joint = Joint(speed, speed / speed_up_s, hz, at)
    direct_s = abs(target - at) / speed + speed_up_s + 2 * np.sqrt(abs(target - at) * speed_up_s / speed)
    told = joint.follow(np.full(int(direct_s * hz) + 20, target))
    assert told[-1] == pytest.approx(target, abs=TINY)
    way = np.sign(target - at)
    assert (way * (told - target)).max() <= TINY
    assert (np.diff(way * told) >= -TINY).all(), "straight there"


@given(SPEEDS, SPEED_UPS_S, RATES, st.lists(PLACES, min_size=2, max_size=6), st.integers(3, 60), st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_nor_is_one_that_comes_while_it_moves_if_it_could_still_stop(
    speed: float, speed_up_s: float, hz: float, targets: list[float], ticks: int, holds: int
) -> None:
    joint = Joint(speed, speed / speed_up_s, hz, 0.0)
    for target in targets:
        for _ in range(holds):
            joint.hold()
        way = np.sign(target - joint.told[-1])
        # a period in which it could have begun to brake
        room = way * (target - joint.told[-1]) - joint.stopping
        told = joint.follow(np.full(ticks, target))
        if way * joint.moving >= 0 and room >= 0:
            assert (way * (told - target)).max() <= TINY


@given(SPEEDS, SPEED_UPS_S, RATES, st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_a_path_within_the_limits_is_followed_exactly(speed: float, speed_up_s: float, hz: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    joint = Joint(speed, speed / speed_up_s, hz, 0.0)
    change = speed / speed_up_s / hz * 0.99
    at, now, path = 0.0, 0.0, []
    for _ in range(200):
        # any change that it may, and back to the middle before the ends
        wish = rng.uniform(-change, change) if abs(at) < RANGE / 2 else -np.sign(at) * change
        now = float(np.clip(now + wish, -0.99 * speed, 0.99 * speed))
        at += now / hz
        path.append(at)
    targets = np.array(path)
    if np.abs(targets).max() < RANGE:
        assert joint.follow(targets) == pytest.approx(targets, abs=TINY)


@pytest.mark.parametrize(("hertz", "straight_for_it"), [(0.3, 0.0), (0.6, 17.9), (1.0, 22.2)])
def test_a_swing_beyond_the_limits_is_followed_as_well_as_by_going_for_it(hertz: float, straight_for_it: float) -> None:
    hz, seconds = 30.0, 20.0
    path = 20 * np.sin(2 * np.pi * hertz * np.arange(0, seconds, 1 / hz))
    off = (Joint(90.0, 360.0, hz, 0.0).follow(path) - path)[30:]
    assert np.sqrt(np.mean(off**2)) <= straight_for_it + TINY


def test_a_path_that_stops_at_once_is_passed_by_no_more_than_it_takes_to_brake() -> None:
    hz, speed, acceleration = 30.0, 80.0, 360.0
    path = np.minimum(60.0, speed / hz * np.arange(200))
    told = Joint(90.0, acceleration, hz, 0.0).follow(path)
    assert told.max() - 60 <= speed**2 / (2 * acceleration)
    assert told[-1] == pytest.approx(60, abs=TINY)
    after = told[told.argmax() :]
    assert (np.diff(after) <= TINY).all(), "and comes back once"
