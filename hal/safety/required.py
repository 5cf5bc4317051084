"""The limits that a real robot does not run without, whether they can be meant, and a first proposal for those that
nobody has set.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import NamedTuple

from hal.interfaces.robot import Robot, is_real
from hal.safety.limits import SafetyLimits
from hal.safety.rest import EFFORTS, unmeasured
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, RobotSpec

log = logging.getLogger(__name__)

_ACROSS_S = 4.0
"""from one end of an absolute dimension to the other"""
_SPEED_UP_S = 0.5
"""from rest to the velocity limit, and back"""
_JERK_S = 0.1
"""until a deceleration is as hard as it gets"""
_DIGITS = 3
_CROSSING_S = 0.1, 200.0
"""from one end of an absolute dimension to the other at its velocity limit: outside of this no limit is meant so.
Degrees for radians are a factor of 57, millimetres for metres one of 1000"""
_SPIN_RAD_S, _FAST_RAD_S, _FAST_CROSSING_S = 25.0, 7.0, 0.3
"""no joint turns faster; and none of a robot that fast goes through its range in less: so slow degrees are seen too"""
_STOPPING_S = 0.02, 20.0
"""from a velocity limit to rest"""
_SPEED_UP_TICKS, _USUAL_TICKS = 0.5, 1.0
"""control periods from rest to the velocity limit: with less nothing limits the acceleration, and nobody asks"""
_HARDEST_STOP = 20.0
"""times the acceleration limit"""
_BUILD_UP_TICKS, _BUILD_UP_S = 0.05, 2.0
"""until a deceleration that jerk limits is as hard as it gets: with less nothing is limited, with more it rolls on"""
_LESS = 1 - 1e-9
"""what rounding may make of one"""
_WIDE = 5.0
"""times its dimension: a workspace that keeps nothing out and was not meant so"""


class UnitFault(NamedTuple):
    """A limit that looks as if it was given in another unit than its dimension's."""

    kind: str
    """the field of `SafetyLimits`"""
    name: str
    text: str


def require_limits(robot: Robot, limits: SafetyLimits) -> None:
    """Raise `ConfigError` for a real robot of which `limits` leaves a dimension without velocity or acceleration, or
    of which nobody knows where an absolute dimension is, and for a limit that cannot be meant as it stands; it names
    each and proposes a value. Simulators may have none.
    """
    spec = robot.spec
    if not is_real(robot):
        return
    if faults := _missing(spec, limits):
        raise ConfigError(
            f"robot '{spec.embodiment}' is real and may not run a policy: {'; '.join(faults)}. Give the recipe's "
            "LoopConfig, or `safety` in --robot-config, limits that its motors and the people around it can bear, in "
            f"the units of its dimensions, for example {' '.join(limits_block(spec, limits).split())}"
        )
    for doubt in unit_faults(spec, limits, _USUAL_TICKS):
        log.warning("robot '%s': is the unit right? %s.", spec.embodiment, doubt.text)


def is_incomplete(robot: Robot, limits: SafetyLimits) -> bool:
    """Whether a real robot would not run by `limits`."""
    return bool(_missing(robot.spec, limits))


def _missing(spec: RobotSpec, limits: SafetyLimits) -> list[str]:
    faults = [
        f"no {kind} limit of {', '.join(names)}"
        for kind, table in (("velocity", limits.velocity), ("acceleration", limits.acceleration))
        if (names := [d.name for d in spec.action if d.name not in table])
    ]
    unknown = [d for d in spec.action if d.name in unmeasured(spec, limits)]
    if positions := [d.name for d in unknown if d.unit not in EFFORTS]:
        faults.append(
            f"nobody measures {', '.join(positions)}: say in `moves` which state dimension does; where none can, say "
            "in `rest` where the first command is to begin, which may be a jump"
        )
    if efforts := [d.name for d in unknown if d.unit in EFFORTS]:
        faults.append(f"nobody measures {', '.join(efforts)}: say in `rest` where its first command is to begin")
    return faults + [fault.text for fault in unit_faults(spec, limits)]


def unit_faults(spec: RobotSpec, limits: SafetyLimits, speed_up_ticks: float = _SPEED_UP_TICKS) -> list[UnitFault]:
    """Limits that look as if they were given in another unit than their dimension's: an absolute dimension that crosses
    its range, or a joint that turns, faster or slower than any, another that may be so much faster or slower than its
    bounds, one that takes longer or shorter than any robot, or less than `speed_up_ticks` control periods, to stop, a
    stop or a jerk that does not go with the acceleration, and a workspace that is far wider than its dimension.
    """
    found = []
    for dimension in spec.action:
        name, fastest = dimension.name, limits.velocity.get(dimension.name)
        if fastest is None:
            continue
        if how := _odd_speed(spec, dimension, fastest):
            said = f"velocity limit {fastest:g} of {name}, which is in {dimension.unit} a second, {how}"
            found.append(UnitFault("velocity", name, f"{said}: write about {_rounded(_speed(spec, dimension)):g}"))
            # What goes with it can only be judged by a speed that is meant.
            continue
        acceleration = limits.acceleration.get(name)
        if acceleration is None:
            continue
        stopping_s, period_s = fastest / acceleration, spec.period_ns / 1e9
        if not max(_STOPPING_S[0], speed_up_ticks * period_s * _LESS) <= stopping_s <= _STOPPING_S[1]:
            text = (
                f"acceleration limit {acceleration:g} of {name}, which is in {dimension.unit} a second squared, takes "
                f"{stopping_s:.3g} s to stop from its velocity limit {fastest:g}, with {period_s:.3g} s between two "
                f"commands: write about {_rounded(fastest / _SPEED_UP_S):g}"
            )
            found.append(UnitFault("acceleration", name, text))
        found += _odd_stops(limits, dimension, acceleration, period_s)
    return found + _wide_workspaces(spec, limits)


def _odd_speed(spec: RobotSpec, dimension: Dimension, fastest: float) -> str:
    """What a velocity limit would mean that cannot be meant, '' for one that can."""
    # So a delta or velocity that is limited to its own bounds is as usual as a range that is crossed in 4 s.
    across_s = _ACROSS_S * _speed(spec, dimension) / fastest
    absolute = dimension.meaning is CommandType.absolute
    spins = fastest > _SPIN_RAD_S or (fastest > _FAST_RAD_S and across_s < _FAST_CROSSING_S)
    if _CROSSING_S[0] <= across_s <= _CROSSING_S[1] and not (absolute and dimension.unit == "rad" and spins):
        return ""
    if absolute:
        return f"crosses {dimension.low:g} to {dimension.high:g} in {across_s:.3g} s"
    return f"is {_ACROSS_S / across_s:.3g} times what its bounds allow, {_speed(spec, dimension):g}"


def _odd_stops(limits: SafetyLimits, dimension: Dimension, acceleration: float, period_s: float) -> list[UnitFault]:
    """A stop deceleration and a jerk that do not go with `acceleration`."""
    name, found = dimension.name, []
    hardest, jerk = limits.stop_deceleration.get(name, acceleration), limits.jerk.get(name)
    if hardest > _HARDEST_STOP * acceleration:
        text = (
            f"stop_deceleration {hardest:g} of {name}, which is in {dimension.unit} a second squared, is "
            f"{hardest / acceleration:.3g} times its acceleration limit {acceleration:g}: write about "
            f"{_rounded(2 * acceleration):g}"
        )
        found.append(UnitFault("stop_deceleration", name, text))
    if jerk is not None and not _BUILD_UP_TICKS * period_s <= acceleration / jerk <= _BUILD_UP_S:
        text = (
            f"jerk {jerk:g} of {name}, which is in {dimension.unit} a second cubed, takes {acceleration / jerk:.3g} s "
            f"until it brakes by its acceleration limit {acceleration:g}: write about "
            f"{_rounded(acceleration / _JERK_S):g}"
        )
        found.append(UnitFault("jerk", name, text))
    return found


def _wide_workspaces(spec: RobotSpec, limits: SafetyLimits) -> list[UnitFault]:
    said = "workspace {:g} to {:g} of {}, which is {:g} to {:g} {}, keeps nothing out: write a part of that"
    return [
        UnitFault("workspace", d.name, said.format(low, high, d.name, d.low, d.high, d.unit))
        for d in spec.state
        for low, high in [limits.workspace.get(d.name, (d.low, d.high))]
        if low <= d.low and d.high <= high and high - low > _WIDE * (d.high - d.low)
    ]


def proposed_limits(spec: RobotSpec, limits: SafetyLimits | None = None) -> SafetyLimits:
    """`limits` with a value for what they leave out or cannot mean: across the range in four seconds, or as fast as the
    spec allows for a delta or velocity, reached within half a second; an effort that nobody measures begins at nothing.
    Where a position begins that nobody measures, nobody can propose.
    """
    given = limits or SafetyLimits()
    velocity = {d.name: _rounded(_speed(spec, d)) for d in spec.action} | _meant(spec, given, "velocity")
    given = replace(given, velocity=velocity)
    usual = {name: _rounded(v / _SPEED_UP_S) for name, v in velocity.items()}
    given = replace(given, acceleration=usual | _meant(spec, given, "acceleration"))
    stop, jerk = _meant(spec, given, "stop_deceleration"), _meant(spec, given, "jerk")
    given = replace(given, stop_deceleration=stop, jerk=jerk)
    efforts = [d for d in spec.action if d.name in unmeasured(spec, given) and d.unit in EFFORTS]
    nothing = {d.name: min(max(0.0, d.low), d.high) for d in efforts}
    return replace(given, rest=nothing | dict(given.rest))


def _meant(spec: RobotSpec, limits: SafetyLimits, kind: str) -> dict[str, float]:
    """What is given of one kind, without what cannot be meant."""
    wrong = {fault.name for fault in unit_faults(spec, limits) if fault.kind == kind}
    return {name: value for name, value in getattr(limits, kind).items() if name not in wrong}


def limits_block(spec: RobotSpec, limits: SafetyLimits | None = None) -> str:
    """`proposed_limits` as lines for a recipe; what a person should think about once more is theirs to change."""
    proposed = proposed_limits(spec, limits)
    kinds = "velocity", "acceleration", "stop_deceleration", "jerk", "rest"
    lines = [f"    {kind}={json.dumps(dict(table))}," for kind in kinds if (table := getattr(proposed, kind))]
    return "\n".join(["safety=SafetyLimits(", *lines, ")"])


def _speed(spec: RobotSpec, dimension: Dimension) -> float:
    """In units of the dimension per second."""
    if dimension.meaning is CommandType.absolute:
        return (dimension.high - dimension.low) / _ACROSS_S
    fastest = max(abs(dimension.low), abs(dimension.high))
    return fastest if dimension.meaning is CommandType.velocity else fastest * spec.control_hz


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
