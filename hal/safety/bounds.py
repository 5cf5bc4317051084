"""Action limits, outside every policy: the last thing between a number and a motor. Pure functions.

The loop's rule: `limit_action` either returns an action that may be written or raises `InvalidDataError`, whose text is
the reason to hold; then `hold_action` gives what to write instead. A number that is not one is never guessed at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wire.errors import InvalidDataError
from wire.types import CommandType, RobotSpec

_REMEMBERED = 64
_FLOAT32 = np.dtype(np.float32)


class _Bounds(NamedTuple):
    """What a spec says of its actions: made once, for every tick asks for it."""

    spec: RobotSpec
    shape: tuple[int]
    sides: tuple[tuple[float, float], ...]
    """low and high of each dimension, as float32 has them"""
    moves: tuple[bool, ...]
    """deltas and velocities, for which 0 is rest"""


_bounds: dict[int, _Bounds] = {}
"""by the id of the spec that it holds; hashing a spec takes longer than limiting an action"""


def _bounds_of(spec: RobotSpec) -> _Bounds:
    known = _bounds.get(id(spec))
    if known is None:
        sides = tuple(zip(spec.action_low().tolist(), spec.action_high().tolist(), strict=True))
        moves = tuple(d.meaning is not CommandType.absolute for d in spec.action)
        known = _Bounds(spec, (spec.action_dim,), sides, moves)
        if len(_bounds) >= _REMEMBERED:
            _bounds.clear()
        _bounds[id(spec)] = known
    return known


def limit_numbers(spec: RobotSpec, action: np.ndarray) -> list[float]:
    """`limit_action` as plain numbers that float32 has: a handful of them is reckoned with faster than an array."""
    bounds = _bounds_of(spec)
    action = np.asarray(action)
    if action.shape != bounds.shape or action.dtype.kind not in "fiu":
        raise InvalidDataError(
            f"action {action.dtype}{list(action.shape)}; robot '{spec.embodiment}' takes float32[{spec.action_dim}]: "
            f"{', '.join(d.name for d in spec.action)}."
        )
    numbers = _within(bounds, action.tolist())
    return numbers if action.dtype == _FLOAT32 else np.array(numbers, np.float32).tolist()


def within_bounds(spec: RobotSpec, numbers: Sequence[float]) -> list[float]:
    """`limit_numbers` of what has the right shape and is float32's already."""
    return _within(_bounds_of(spec), numbers)


def _within(bounds: _Bounds, numbers: Sequence[float]) -> list[float]:
    if not all(map(math.isfinite, numbers)):
        spec = bounds.spec
        names = [d.name for d, number in zip(spec.action, numbers, strict=True) if not math.isfinite(number)]
        raise InvalidDataError(
            f"action is not finite in {', '.join(names)} of robot '{spec.embodiment}'; it is not executed."
        )
    return [
        low if number < low else high if number > high else number
        for number, (low, high) in zip(numbers, bounds.sides, strict=True)
    ]


def limit_action(spec: RobotSpec, action: np.ndarray) -> np.ndarray:
    """float32[da]: `action` clipped to the limits of each dimension, as a new array.

    Raises `InvalidDataError` naming the dimensions if it has another shape or holds NaN or infinity.
    """
    return np.array(limit_numbers(spec, action), np.float32)


def hold_action(spec: RobotSpec, last_executed: np.ndarray) -> np.ndarray:
    """float32[da]: the action that keeps the robot where it is.

    Delta and velocity dimensions are 0 (never the last delta again), absolute ones stay at `last_executed`,
    float32[da], what the robot really did last. Within limits. Raises `InvalidDataError` if `last_executed` is not a
    valid action.
    """
    return np.array(hold_numbers(spec, last_executed), np.float32)


def hold_numbers(spec: RobotSpec, last_executed: np.ndarray) -> list[float]:
    """`hold_action` as plain numbers that float32 has."""
    pairs = zip(_bounds_of(spec).moves, limit_numbers(spec, last_executed), strict=True)
    return within_bounds(spec, [0.0 if moves else number for moves, number in pairs])


def rest_action(spec: RobotSpec, state: np.ndarray) -> np.ndarray:
    """float32[da]: what keeps a robot where it is measured, before it has executed anything.

    An absolute dimension that is also measured (a state dimension of the same name) stays at `state`, float32[ds]; all
    others are 0. Within limits. Raises `InvalidDataError` if one of those measurements is no number.
    """
    measured = {d.name: value for d, value in zip(spec.state, state, strict=True)}
    still = [measured.get(d.name, 0.0) if d.meaning is CommandType.absolute else 0.0 for d in spec.action]
    return limit_action(spec, np.array(still, np.float32))
