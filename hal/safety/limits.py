"""The limits of a robot: by name, as recipes say them, and compiled for a spec, as `hal.safety.limiter` reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping, require_dimension
from wire.errors import ConfigError
from wire.types import CommandType, RobotSpec


@dataclass(frozen=True, slots=True)
class SafetyLimits:
    """Limits by dimension name; what is not named is not limited. They are no part of the robot's spec."""

    velocity: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second, above 0"""
    acceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second squared, above 0"""
    stop_deceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: how hard an emergency stop brakes what the driver has no way of its own to stop
    (`StoppableRobot`), no less than `acceleration`, which it is where not named
    """
    jerk: Mapping[str, float] = field(default_factory=dict)
    """by absolute action dimension whose acceleration is limited: units per second cubed, by which the deceleration of
    a hold, or of a stop that is not the driver's own, builds up and fades; braking from v with a takes up to
    v a / (2 jerk) more way, and a near bound wins
    """
    workspace: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """by state dimension: where the robot may be, in the state's unit"""
    moves: tuple[ActionStateMapping, ...] = ()
    """which action dimension moves which state dimension; those of one name belong together"""
    rest: Mapping[str, float] = field(default_factory=dict)
    """by absolute action dimension that nobody measures, such as an effort: where its first command begins"""


@dataclass(frozen=True, slots=True)
class WorkspaceLimit:
    """A limited state dimension and the action dimension that moves it."""

    action: int
    state: int
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Axis:
    """The limits of one action dimension, as plain numbers: a handful of them costs less so than as arrays."""

    absolute: bool
    scale: float
    """action units per unit of speed: the period, 1 for a velocity"""
    slowest: float
    """lowest speed, -inf where nothing limits it"""
    fastest: float
    change: float
    """how much the speed may change in one period, inf where nothing limits it"""
    braking: float
    """the change counted on for braking: a little less than `change`, because actions and measurements are float32 and
    must not need a harder braking by being rounded"""
    low: float
    """bounds of an absolute dimension, with those of the workspace; -inf for the others"""
    high: float
    walls: tuple[WorkspaceLimit, ...]
    """the workspace of what a delta or velocity dimension moves"""
    jerk: float = math.inf
    """how much the change may change in one period while it brakes"""


@dataclass(frozen=True, slots=True)
class CompiledLimits:
    """`SafetyLimits` of one spec: made once by `compile_limits`, read at every tick."""

    spec: RobotSpec
    period_s: float
    axes: tuple[Axis, ...]
    """of each action dimension"""


def slowed(compiled: CompiledLimits, share: float) -> CompiledLimits:
    """`compiled` with `share` of each speed it allows; how fast a speed may change stays as it is.

    Raises `ConfigError` that names the dimensions whose speed nothing limits: no share of that would slow them.
    """
    if share == 1:
        return compiled
    dimensions = list(zip(compiled.spec.action, compiled.axes, strict=True))
    if free := [d.name for d, axis in dimensions if math.isinf(axis.fastest - axis.slowest)]:
        raise ConfigError(
            f"robot '{compiled.spec.embodiment}' cannot be slowed: it has no velocity limit of {', '.join(free)}. Add "
            "them to SafetyLimits(velocity={...}) in its recipe; `vla-fleet doctor` proposes values."
        )
    axes = (replace(axis, slowest=share * axis.slowest, fastest=share * axis.fastest) for axis in compiled.axes)
    return replace(compiled, axes=tuple(axes))


def compile_limits(
    spec: RobotSpec, limits: SafetyLimits, reach: tuple[np.ndarray, np.ndarray] | None = None
) -> CompiledLimits:
    """`reach`: (low, high), float32[da], of what this very robot can be told, as `hal.interfaces.robot.reach`.

    Raises `ConfigError` for a name the spec has not, a limit that is not positive, or a wall nothing moves to.
    """
    what = f"safety of '{spec.embodiment}'"
    actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
    tables = ("velocity", limits.velocity), ("acceleration", limits.acceleration)
    for kind, table in (*tables, ("stop_deceleration", limits.stop_deceleration), ("jerk", limits.jerk)):
        for name, value in table.items():
            require_dimension(f"{what}: {kind}", name, actions)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{what}: {kind} of '{name}' is {value}; give a number above 0, or leave it out.")
    for name, value in limits.stop_deceleration.items():
        if not value >= limits.acceleration.get(name, math.inf):
            raise ConfigError(
                f"{what}: stop_deceleration of '{name}' is {value}; give no less than its acceleration, which must be "
                "limited too: an emergency stop is not softer than any other."
            )
    for name in limits.jerk:
        if spec.action[actions.index(name)].meaning is not CommandType.absolute or name not in limits.acceleration:
            raise ConfigError(
                f"{what}: jerk of '{name}' is limited; that needs an absolute dimension whose acceleration is limited."
            )
    for name, value in limits.rest.items():
        require_dimension(f"{what}: rest", name, actions)
        dimension = spec.action[actions.index(name)]
        if dimension.meaning is not CommandType.absolute or not dimension.low <= value <= dimension.high:
            raise ConfigError(
                f"{what}: rest of '{name}' is {value}; give one within its limits, {dimension.low} to "
                f"{dimension.high}, of an absolute dimension."
            )
    period_s = spec.period_ns / 1e9
    absolute = np.array([d.meaning is CommandType.absolute for d in spec.action], bool)
    scale = np.array([1.0 if d.meaning is CommandType.velocity else period_s for d in spec.action])
    velocity = np.array([limits.velocity.get(name, np.inf) for name in actions], float)
    bound_low, bound_high = (each.astype(float) for each in reach or (spec.action_low(), spec.action_high()))
    low, high = np.where(absolute, bound_low, -np.inf), np.where(absolute, bound_high, np.inf)
    grain = _grain(np.maximum(np.abs(bound_low), np.abs(bound_high))) / scale
    walls = []
    for wall in _walls(what, limits, actions, states):
        if absolute[wall.action]:
            ends = sorted((wall.low / wall.gain, wall.high / wall.gain))
            low[wall.action], high[wall.action] = max(low[wall.action], ends[0]), min(high[wall.action], ends[1])
            if not low[wall.action] < high[wall.action]:
                raise ConfigError(
                    f"{what}: no value of '{actions[wall.action]}' within its limits leads into the workspace of "
                    f"'{states[wall.state]}', {wall.low} to {wall.high}."
                )
        else:
            walls.append(wall)
            grain[wall.action] += _grain(max(abs(wall.low), abs(wall.high))) / abs(wall.gain) / period_s
    change = np.array([limits.acceleration.get(name, np.inf) for name in actions], float) * period_s
    slowest = np.where(absolute, -velocity, np.maximum(-velocity, np.minimum(0, bound_low / scale)))
    fastest = np.where(absolute, velocity, np.minimum(velocity, np.maximum(0, bound_high / scale)))
    braking = np.maximum(change - 2 * grain, change / 2)
    columns = (each.tolist() for each in (absolute, scale, slowest, fastest, change, braking, low, high))
    own = (tuple(wall for wall in walls if wall.action == i) for i in range(len(actions)))
    jerk = (limits.jerk.get(name, math.inf) * period_s**2 for name in actions)
    return CompiledLimits(spec, period_s, tuple(Axis(*each) for each in zip(*columns, own, jerk, strict=True)))


def _grain(size: np.ndarray | float) -> np.ndarray:
    """float64: how far apart float32 numbers of this size lie."""
    return np.spacing(np.asarray(size, np.float32)).astype(np.float64)


def _walls(what: str, limits: SafetyLimits, actions: list[str], states: list[str]) -> list[WorkspaceLimit]:
    for mapping in limits.moves:
        require_dimension(f"{what}: moves", mapping.action, actions)
        require_dimension(f"{what}: moves", mapping.state, states)
        if not (np.isfinite(mapping.gain) and mapping.gain):
            raise ConfigError(f"{what}: '{mapping.action}' moves '{mapping.state}' by {mapping.gain}; give a gain.")
    walls = []
    for name, (low, high) in limits.workspace.items():
        require_dimension(f"{what}: workspace", name, states)
        if not low < high:
            raise ConfigError(f"{what}: workspace of '{name}' from {low} to {high} is empty.")
        moving = [mapping for mapping in limits.moves if mapping.state == name]
        if not moving and name in actions:
            moving = [ActionStateMapping(name, name)]
        if not moving:
            raise ConfigError(
                f"{what}: nothing says which action moves '{name}', so its workspace cannot be kept. "
                f"Name it in `moves`: {', '.join(actions)}."
            )
        if len(moving) > 1:
            raise ConfigError(f"{what}: '{name}' is moved by {', '.join(c.action for c in moving)}; only one can be.")
        walls.append(WorkspaceLimit(actions.index(moving[0].action), states.index(name), moving[0].gain, low, high))
    return walls
