"""The limits that a real robot does not run without, whether they can be meant, and a first proposal for those that
nobody has set.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from hal.interfaces.robot import Robot, is_real
from hal.safety.limits import SafetyLimits
from hal.safety.rest import unmeasured
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, RobotSpec

log = logging.getLogger(__name__)

_ACROSS_S = 4.0
"""from one end of an absolute dimension to the other"""
_SPEED_UP_S = 0.5
"""from rest to the velocity limit, and back"""
_DIGITS = 3
_CROSSING_S = 0.05, 1000.0
"""from one end of an absolute dimension to the other at its velocity limit: outside of this no limit is meant so"""
_USUAL_S = 0.1, 200.0
"""within this nobody asks; degrees for radians are a factor of 57, from the middle of it out of it"""
_STOPPING_S = 20.0
"""from a velocity limit to rest: no robot takes longer"""
_SPEED_UP_TICKS, _USUAL_TICKS = 0.5, 1.0
"""control periods from rest to the velocity limit: with less nothing limits the acceleration, and nobody asks"""
_LESS = 1 - 1e-9
"""what rounding may make of one"""
_WIDE = 5.0
"""times its dimension: a workspace that keeps nothing out and was not meant so"""


def require_limits(robot: Robot, limits: SafetyLimits) -> None:
    """Raise `ConfigError` for a real robot of which `limits` leaves a dimension without velocity or acceleration, or
    of which nobody knows where an absolute dimension is, and for a limit that cannot be meant as it stands; it names
    each and proposes a value. Simulators may have none.
    """
    spec = robot.spec
    if not is_real(robot):
        return
    for doubt in unit_faults(spec, limits):
        log.warning("robot '%s': is the unit right? %s.", spec.embodiment, doubt)
    if faults := _missing(spec, limits):
        raise ConfigError(
            f"robot '{spec.embodiment}' is real and may not run a policy: {'; '.join(faults)}. Give the recipe's "
            "LoopConfig, or `safety` in --robot-config, limits that its motors and the people around it can bear, for "
            f"example {' '.join(limits_block(spec, limits).split())}"
        )


def is_incomplete(robot: Robot, limits: SafetyLimits) -> bool:
    """Whether a real robot would not run by `limits`."""
    return bool(_missing(robot.spec, limits))


def _missing(spec: RobotSpec, limits: SafetyLimits) -> list[str]:
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
    return faults + unit_faults(spec, limits, _CROSSING_S, _SPEED_UP_TICKS)


def unit_faults(
    spec: RobotSpec,
    limits: SafetyLimits,
    crossing_s: tuple[float, float] = _USUAL_S,
    speed_up_ticks: float = _USUAL_TICKS,
) -> list[str]:
    """Limits that look as if they were given in another unit than their dimension's: an absolute dimension that crosses
    its range in less or more time than `crossing_s`, another that may be so much faster or slower than its bounds, one
    that takes longer than any robot to stop or less than `speed_up_ticks` control periods, and a workspace that is far
    wider than its dimension.
    """
    found = []
    for dimension in spec.action:
        name, fastest = dimension.name, limits.velocity.get(dimension.name)
        if fastest is None:
            continue
        said = f"velocity limit {fastest:g} of {name}, which is in {dimension.unit}"
        # So a delta or velocity that is limited to its own bounds is as usual as a range that is crossed in 4 s.
        across_s = _ACROSS_S * _speed(spec, dimension) / fastest
        if not crossing_s[0] <= across_s <= crossing_s[1]:
            how = (
                f"crosses {dimension.low:g} to {dimension.high:g} in {across_s:.3g} s"
                if dimension.meaning is CommandType.absolute
                else f"is {_ACROSS_S / across_s:.3g} times what its bounds allow, {_speed(spec, dimension):g}"
            )
            found.append(f"{said} a second, {how}")
        acceleration = limits.acceleration.get(name)
        if acceleration is None:
            continue
        stopping_s = fastest / acceleration
        if stopping_s > _STOPPING_S or stopping_s * 1e9 < speed_up_ticks * spec.period_ns * _LESS:
            found.append(
                f"acceleration limit {acceleration:g} of {name} takes {stopping_s:.3g} s to stop from its velocity "
                f"limit {fastest:g}, with {spec.period_ns / 1e9:.3g} s between two commands"
            )
    return found + _wide_workspaces(spec, limits)


def _wide_workspaces(spec: RobotSpec, limits: SafetyLimits) -> list[str]:
    return [
        f"workspace {low:g} to {high:g} of {d.name}, which is {d.low:g} to {d.high:g} {d.unit}, keeps nothing out"
        for d in spec.state
        for low, high in [limits.workspace.get(d.name, (d.low, d.high))]
        if low <= d.low and d.high <= high and high - low > _WIDE * (d.high - d.low)
    ]


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
