"""What keeps a robot where it is, before it has executed anything."""

from __future__ import annotations

import numpy as np

from hal.safety.limiter import limit_action
from hal.safety.limits import SafetyLimits
from wire.types import CommandType, RobotSpec

EFFORTS = ("N", "Nm", "N m", "N*m", "N·m", "A")
"""units of what is no place: commanding it first moves the robot nowhere that could be measured"""


def rest_action(spec: RobotSpec, state: np.ndarray, limits: SafetyLimits | None = None) -> np.ndarray:
    """float32[da]: `standing_action` within the bounds of the spec. Raises as that."""
    return limit_action(spec, standing_action(spec, state, limits))


def standing_action(spec: RobotSpec, state: np.ndarray, limits: SafetyLimits | None = None) -> np.ndarray:
    """float32[da]: what says that a robot is where it is measured, also outside the bounds of its actions.

    An absolute dimension is at what `limits.rest` says, or else where it is measured, at `state`, float32[ds]: by
    what `limits.moves` says of it or in the state dimension of its name. All others are 0. Raises `InvalidDataError`
    if one of those measurements is no number.
    """
    known = {d.name: float(value) for d, value in zip(spec.state, state, strict=True)}
    if limits is not None:
        known |= {mapping.action: known[mapping.state] / mapping.gain for mapping in limits.moves} | dict(limits.rest)
    still = [known.get(d.name, 0.0) if d.meaning is CommandType.absolute else 0.0 for d in spec.action]
    limit_action(spec, np.array(still, np.float32))
    return np.array(still, np.float32)


def unmeasured(spec: RobotSpec, limits: SafetyLimits) -> tuple[str, ...]:
    """The absolute action dimensions of which `rest_action` does not know what keeps them where they are."""
    known = {d.name for d in spec.state} | {mapping.action for mapping in limits.moves} | set(limits.rest)
    return tuple(d.name for d in spec.action if d.meaning is CommandType.absolute and d.name not in known)
