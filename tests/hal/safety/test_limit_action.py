"""The last thing between a number and a motor, densely at each bound."""

from __future__ import annotations

import numpy as np
import pytest

from hal.safety.limiter import hold_action, limit_action
from wire.errors import InvalidDataError
from wire.types import CommandType, Dimension, RobotSpec

SPEC = RobotSpec(
    embodiment="bench",
    state=(Dimension("x", "m", -1.0, 1.0),),
    action=(
        Dimension("move", "cm/step", -1.0, 1.0, CommandType.delta),
        Dimension("spin", "rad/s", -0.5, 2.0, CommandType.velocity),
        Dimension("joint", "rad", 0.2, 3.0, CommandType.absolute),
    ),
    cameras=(),
    control_hz=80.0,
)
MIDDLE = np.array([0.0, 0.0, 1.0], np.float32)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("side", ["low", "high"])
def test_every_bound_densely(index: int, side: str) -> None:
    bound = np.float32(getattr(SPEC.action[index], side))
    out = np.float32(np.inf if side == "high" else -np.inf)
    for offset in (*np.linspace(-0.01, 0.01, 41), -1e6, 1e6, -3e38, 3e38):
        action = MIDDLE.copy()
        action[index] = np.float32(bound + np.float32(offset))
        limited = limit_action(SPEC, action)
        assert limited.dtype == np.float32
        assert (limited >= SPEC.action_low()).all() and (limited <= SPEC.action_high()).all()
        inside = SPEC.action_low()[index] <= action[index] <= SPEC.action_high()[index]
        if inside:
            assert limited[index] == action[index]
        others = [i for i in range(3) if i != index]
        assert (limited[others] == MIDDLE[others]).all()
    for beside in (np.nextafter(bound, out), np.nextafter(bound, -out), bound):
        action = MIDDLE.copy()
        action[index] = beside
        wanted = bound if beside == np.nextafter(bound, out) else beside
        assert limit_action(SPEC, action)[index] == wanted


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", range(3))
def test_a_number_that_is_none_is_refused_by_name(index: int, bad: float) -> None:
    action = MIDDLE.copy()
    action[index] = bad
    with pytest.raises(InvalidDataError, match=f"not finite in {SPEC.action[index].name} of"):
        limit_action(SPEC, action)


@pytest.mark.parametrize("action", [np.zeros(2), np.zeros(4), np.zeros((1, 3)), np.float32(0), np.array(["a"] * 3)])
def test_another_shape_is_refused(action: np.ndarray) -> None:
    with pytest.raises(InvalidDataError, match="move, spin, joint"):
        limit_action(SPEC, action)


def test_the_argument_is_left_alone_and_float64_is_taken() -> None:
    action = np.array([5.0, 5.0, 5.0])
    limited = limit_action(SPEC, action)
    assert limited.tolist() == [1.0, 2.0, 3.0]
    assert limited.dtype == np.float32
    assert action.tolist() == [5.0, 5.0, 5.0]
    inside = MIDDLE.copy()
    assert limit_action(SPEC, inside) is not inside


def test_hold_stops_deltas_and_velocities_and_keeps_absolute_values() -> None:
    for value in np.linspace(0.2, 3.0, 30, dtype=np.float32):
        held = hold_action(SPEC, np.array([0.7, -0.4, value], np.float32))
        assert held.tolist() == [0.0, 0.0, np.float32(value)]
        assert held.dtype == np.float32


def test_hold_is_within_limits_whatever_was_executed() -> None:
    assert hold_action(SPEC, np.array([9, 9, 9], np.float32)).tolist() == [0.0, 0.0, 3.0]
    with pytest.raises(InvalidDataError):
        hold_action(SPEC, np.array([0, 0, np.nan], np.float32))
