"""The limits that a real robot does not run without, and a first proposal for those that nobody has set."""

from __future__ import annotations

import json
from dataclasses import replace

from hal.interfaces.robot import Robot, is_real
from hal.safety.limiter import SafetyLimits
from hal.safety.rest import unmeasured
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, RobotSpec

_ACROSS_S = 4.0
"""from one end of an absolute dimension to the other"""
_SPEED_UP_S = 0.5
"""from rest to the velocity limit, and back"""
_DIGITS = 3


def require_limits(robot: Robot, limits: SafetyLimits) -> None:
    """Raise `ConfigError` for a real robot of which `limits` leaves a dimension without velocity or acceleration, or
    of which nobody knows where an absolute dimension is; it names each and proposes a value. Simulators may have none.
    """
    if not is_real(robot):
        return
    spec = robot.spec
    faults = [
        f"no {kind} limit of {', '.join(names)}"
        for kind, table in (("velocity", limits.velocity), ("acceleration", limits.acceleration))
        if (names := [d.name for d in spec.action if d.name not in table])
    ]
    if unknown := unmeasured(spec, limits):
        faults.append(
            f"nobody measures {', '.join(unknown)}: say in `moves` which state dimension does, or in `rest` what to "
            "command first"
        )
    if faults:
        raise ConfigError(
            f"robot '{spec.embodiment}' is real and may not run a policy: {'; '.join(faults)}. Give the recipe's "
            "LoopConfig limits that its motors and the people around it can bear, for example "
            f"{' '.join(limits_block(spec, limits).split())}"
        )


def proposed_limits(spec: RobotSpec, limits: SafetyLimits | None = None) -> SafetyLimits:
    """`limits` with a value for what they leave out: across the range in four seconds, or as fast as the spec allows
    for a delta or velocity, reached within half a second; an absolute dimension that nobody measures begins in the
    middle of its range.
    """
    given = limits or SafetyLimits()
    velocity = {d.name: _rounded(_speed(spec, d)) for d in spec.action} | dict(given.velocity)
    acceleration = {name: _rounded(v / _SPEED_UP_S) for name, v in velocity.items()} | dict(given.acceleration)
    middle = {d.name: _rounded((d.low + d.high) / 2) for d in spec.action if d.name in unmeasured(spec, given)}
    return replace(given, velocity=velocity, acceleration=acceleration, rest=middle | dict(given.rest))


def limits_block(spec: RobotSpec, limits: SafetyLimits | None = None) -> str:
    """`proposed_limits` as lines for a recipe; what a person should think about once more is theirs to change."""
    proposed = proposed_limits(spec, limits)
    tables = {"velocity": proposed.velocity, "acceleration": proposed.acceleration, "rest": proposed.rest}
    lines = [f"    {name}={json.dumps(dict(table))}," for name, table in tables.items() if table]
    return "\n".join(["safety=SafetyLimits(", *lines, ")"])


def _speed(spec: RobotSpec, dimension: Dimension) -> float:
    """In units of the dimension per second."""
    if dimension.meaning is CommandType.absolute:
        return (dimension.high - dimension.low) / _ACROSS_S
    fastest = max(abs(dimension.low), abs(dimension.high))
    return fastest if dimension.meaning is CommandType.velocity else fastest * spec.control_hz


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
