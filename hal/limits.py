"""Action limits, outside every policy: the last thing between a number and a motor. Pure functions.

The loop's rule: `limit_action` either returns an action that may be written or raises `InvalidData`, whose text is the
reason to hold; then `hold_action` gives what to write instead. A number that is not one is never guessed at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wire.errors import InvalidData
from wire.types import Meaning, RobotSpec

_REMEMBERED = 64


class _Bounds(NamedTuple):
    """What a spec says of its actions: made once, for every tick asks for it."""

    spec: RobotSpec
    shape: tuple[int]
    low: np.ndarray
    """float32[da]"""
    high: np.ndarray
    moves: np.ndarray
    """bool[da]: deltas and velocities, for which 0 is rest"""


_bounds: dict[int, _Bounds] = {}
"""by the id of the spec that it holds; hashing a spec takes longer than limiting an action"""


def _bounds_of(spec: RobotSpec) -> _Bounds:
    known = _bounds.get(id(spec))
    if known is None:
        moves = np.array([d.meaning is not Meaning.absolute for d in spec.action], bool)
        known = _Bounds(spec, (spec.action_dim,), spec.action_low(), spec.action_high(), moves)
        if len(_bounds) >= _REMEMBERED:
            _bounds.clear()
        _bounds[id(spec)] = known
    return known


def limit_action(spec: RobotSpec, action: np.ndarray) -> np.ndarray:
    """float32[da]: `action` clipped to the limits of each dimension, as a new array.

    Raises `InvalidData` naming the dimensions if it has another shape or holds NaN or infinity.
    """
    bounds = _bounds_of(spec)
    action = np.asarray(action)
    if action.shape != bounds.shape or action.dtype.kind not in "fiu":
        raise InvalidData(
            f"action {action.dtype}{list(action.shape)}; robot '{spec.embodiment}' takes float32[{spec.action_dim}]: "
            f"{', '.join(d.name for d in spec.action)}."
        )
    # One number tells of all, except where it overflows.
    if not math.isfinite(action.dot(action)) and not (finite := np.isfinite(action)).all():
        names = [d.name for d, ok in zip(spec.action, finite, strict=True) if not ok]
        raise InvalidData(
            f"action is not finite in {', '.join(names)} of robot '{spec.embodiment}'; it is not executed."
        )
    return np.minimum(np.maximum(action, bounds.low), bounds.high).astype(np.float32, copy=False)


def hold_action(spec: RobotSpec, last_executed: np.ndarray) -> np.ndarray:
    """float32[da]: the action that keeps the robot where it is.

    Delta and velocity dimensions are 0 (never the last delta again), absolute ones stay at `last_executed`,
    float32[da], what the robot really did last. Within limits. Raises `InvalidData` if `last_executed` is not a valid
    action.
    """
    held = limit_action(spec, last_executed)
    held[_bounds_of(spec).moves] = 0
    return limit_action(spec, held)


def rest_action(spec: RobotSpec, state: np.ndarray) -> np.ndarray:
    """float32[da]: what keeps a robot where it is measured, before it has executed anything.

    An absolute dimension that is also measured (a state dimension of the same name) stays at `state`, float32[ds]; all
    others are 0. Within limits. Raises `InvalidData` if one of those measurements is no number.
    """
    measured = {d.name: value for d, value in zip(spec.state, state, strict=True)}
    still = [measured.get(d.name, 0.0) if d.meaning is Meaning.absolute else 0.0 for d in spec.action]
    return limit_action(spec, np.array(still, np.float32))
