"""Action limits, outside every policy: the last thing between a number and a motor. Pure functions.

The loop's rule: `limit_action` either returns an action that may be written or raises `InvalidData`, whose text is the
reason to hold; then `hold_action` gives what to write instead. A number that is not one is never guessed at.
"""

from __future__ import annotations

import numpy as np

from wire.errors import InvalidData
from wire.types import Meaning, RobotSpec


def limit_action(spec: RobotSpec, action: np.ndarray) -> np.ndarray:
    """float32[da]: `action` clipped to the limits of each dimension, as a new array.

    Raises `InvalidData` naming the dimensions if it has another shape or holds NaN or infinity.
    """
    action = np.asarray(action)
    if action.shape != (spec.action_dim,) or action.dtype.kind not in "fiu":
        raise InvalidData(
            f"action {action.dtype}{list(action.shape)}; robot '{spec.embodiment}' takes float32[{spec.action_dim}]: "
            f"{', '.join(d.name for d in spec.action)}."
        )
    finite = np.isfinite(action)
    if not finite.all():
        names = [d.name for d, ok in zip(spec.action, finite, strict=True) if not ok]
        raise InvalidData(
            f"action is not finite in {', '.join(names)} of robot '{spec.embodiment}'; it is not executed."
        )
    return np.clip(action, spec.action_low(), spec.action_high()).astype(np.float32)


def hold_action(spec: RobotSpec, last_executed: np.ndarray) -> np.ndarray:
    """float32[da]: the action that keeps the robot where it is.

    Delta and velocity dimensions are 0 (never the last delta again), absolute ones stay at `last_executed`,
    float32[da], what the robot really did last. Within limits. Raises `InvalidData` if `last_executed` is not a valid
    action.
    """
    held = limit_action(spec, last_executed)
    stays = np.array([d.meaning is Meaning.absolute for d in spec.action], bool)
    return limit_action(spec, np.where(stays, held, np.float32(0)))


def rest_action(spec: RobotSpec, state: np.ndarray) -> np.ndarray:
    """float32[da]: what keeps a robot where it is measured, before it has executed anything.

    An absolute dimension that is also measured (a state dimension of the same name) stays at `state`, float32[ds]; all
    others are 0. Within limits. Raises `InvalidData` if one of those measurements is no number.
    """
    measured = {d.name: value for d, value in zip(spec.state, state, strict=True)}
    still = [measured.get(d.name, 0.0) if d.meaning is Meaning.absolute else 0.0 for d in spec.action]
    return limit_action(spec, np.array(still, np.float32))
