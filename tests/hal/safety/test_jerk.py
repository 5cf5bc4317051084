"""Holds and stops of a joint whose jerk is limited, from whatever it did before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits, compile_limits
from tests.hal.safety.guarded import SPEC, P
from wire.errors import ConfigError

TOP, ACCELERATION, STOP, JERK = 2.0, 10.0, 20.0, 150.0
LIMITS = SafetyLimits(
    velocity={"joint": TOP},
    acceleration={"joint": ACCELERATION},
    stop_deceleration={"joint": STOP},
    jerk={"joint": JERK},
)
HARD = SafetyLimits(velocity=LIMITS.velocity, acceleration=LIMITS.acceleration, stop_deceleration={"joint": STOP})
NOISE = 0.5
"""rad/s³ that float32 makes of a joint's position"""


class Joint:
    """Its position, speed and acceleration after each command."""

    def __init__(self, limits: SafetyLimits = LIMITS) -> None:
        self.limiter = SafetyLimiter(SPEC, limits)
        self.at = np.array([0, 0, 1.6], np.float32)
        self.speed = self.acceleration = 0.0

    def move(self, target: float) -> None:
        self.do(self.limiter.limit(np.array([0, 0, target], np.float32), self.at), ACCELERATION)

    def brake(self, stop: bool) -> None:
        before = self.speed, self.acceleration
        self.do(self.limiter.brake(self.at, stop=stop), STOP if stop else max(ACCELERATION, abs(before[1])))
        assert abs(self.speed) <= abs(before[0]) and self.speed * before[0] >= 0, "it never gains, nor turns"

    def do(self, action: np.ndarray, most: float) -> None:
        speed = float(action[2] - np.float64(self.at[2])) / P
        assert abs(speed) <= TOP * 1.0001
        assert abs(speed - self.speed) / P <= most * 1.001 + 1e-2
        assert 0.2 <= action[2] <= 3.0
        self.acceleration, self.speed = (speed - self.speed) / P, speed
        self.limiter.note(action, self.at)
        self.at = action


def stopped(joint: Joint, stop: bool) -> tuple[float, int, list[float]]:
    """(the way, the periods, the decelerations) of coming to hold."""
    begun, decelerations = float(joint.at[2]), []
    for ticks in range(400):
        if joint.limiter.still:
            return abs(float(joint.at[2]) - begun), ticks, decelerations
        way = np.sign(joint.speed)
        joint.brake(stop)
        decelerations.append(-way * joint.acceleration)
    raise AssertionError("it does not come to hold")


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.floats(0.2, 3.0), st.integers(1, 30)), min_size=1, max_size=6), stop=st.booleans())
def test_deceleration_builds_up_and_fades_within_jerk_and_the_way_is_what_was_said(
    moves: list[tuple[float, int]], stop: bool
) -> None:
    joint = Joint()
    for target, ticks in moves:
        for _ in range(ticks):
            joint.move(target)
    speed, before = abs(joint.speed), max(0.0, -np.sign(joint.speed) * joint.acceleration)
    room = min(float(joint.at[2]) - 0.2, 3.0 - float(joint.at[2]))
    way, _, decelerations = stopped(joint, stop)
    hardest = STOP if stop else ACCELERATION
    # what braking takes, what its building up and fading add, and a period for each of the three
    longest = speed**2 / (2 * hardest) + speed * hardest / (2 * JERK) + 3 * speed * P
    assert way <= longest + 1e-5
    fading = before * P - np.arange(100) * JERK * P**2
    if room > longest and fading[fading > 0][1:].sum() <= speed:
        steps = np.diff([before, *decelerations, 0.0]) / P
        assert np.all(np.abs(steps) <= JERK * 1.001 + NOISE)


@pytest.mark.parametrize("stop", [False, True])
def test_it_is_no_slower_than_it_must_be_and_without_jerk_it_is_as_before(stop: bool) -> None:
    joints = Joint(), Joint(HARD)
    for joint in joints:
        for _ in range(40):
            joint.move(joint.at[2] + 1.0)
        assert joint.speed == pytest.approx(TOP, rel=1e-3)
    (soft, soft_ticks, found), (hard, hard_ticks, _) = (stopped(joint, stop) for joint in joints)
    hardest = STOP if stop else ACCELERATION
    assert max(found) == pytest.approx(min(hardest, (TOP * JERK) ** 0.5), rel=0.05), "all that it may brake"
    assert hard < soft <= hard + TOP * hardest / (2 * JERK) + 3 * TOP * P
    assert soft_ticks <= hard_ticks + 2 + hardest / JERK / P


def test_a_bound_wins_over_jerk() -> None:
    joint = Joint()
    joint.at = np.array([0, 0, 2.6], np.float32)
    for _ in range(60):
        joint.move(3.0)
        if joint.at[2] > 2.9:
            break
    stopped(joint, stop=True)
    assert joint.at[2] <= 3.0


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (SafetyLimits(jerk={"joint": 1.0}), "whose acceleration is limited"),
        (SafetyLimits(jerk={"spin": 1.0}, acceleration={"spin": 1.0}), "an absolute dimension"),
        (SafetyLimits(jerk={"joint": -1.0}, acceleration={"joint": 1.0}), "jerk of 'joint' is -1.0"),
        (SafetyLimits(jerk={"joint": float("nan")}, acceleration={"joint": 1.0}), "jerk of 'joint' is nan"),
        (SafetyLimits(jerk={"jiont": 1.0}), "jiont"),
    ],
)
def test_a_jerk_that_cannot_be_is_named(limits: SafetyLimits, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compile_limits(SPEC, limits)
