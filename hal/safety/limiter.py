"""How fast and how far a robot may move, outside every policy: the last thing between a number and a motor.

`limit_action` keeps each number within its bounds, `SafetyLimiter` *changes*: velocity and acceleration of every action
dimension, by what the dimension means, and the workspace of what the robot measures. An action that breaks a limit is
brought to it, never refused. Only what is no number is refused, never guessed at: the error is the reason to hold, and
`hold_action` or `SafetyLimiter.brake` gives what to write instead.

With period p (s) and last executed action u, the speed of an action a is

| meaning | speed |
|---|---|
| absolute | (a - u) / p |
| delta | a / p |
| velocity | a |

in units of the dimension per second (for velocity: its own unit); its acceleration is the change of that speed over one
period, divided by the period. Towards a bound at distance D no speed is allowed from which the robot could not stop
before it: with c the change of speed a period may bring, braking from v takes n = ceil(v / c) periods and the distance
p (n v - c n (n - 1) / 2), so that

    v <= D / (p n) + c (n - 1) / 2,    n = ceil((sqrt(1 + 8 D / (p c)) - 1) / 2).

Where limits contradict each other (the robot was pushed, or measures late) bounds and walls win over acceleration, and
acceleration over velocity. Standing still is always among what is allowed, as soon as the robot has braked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping, require_dimension
from wire.errors import ConfigError, InvalidDataError
from wire.types import CommandType, RobotSpec

_FLOAT32 = np.dtype(np.float32)
_MORE = 1 + 1e-9

# --- bounds -----------------------------------------------------------------------------------------------------------


class _Bounds(NamedTuple):
    """What a spec says of its actions."""

    sides: tuple[tuple[float, float], ...]
    """low and high of each dimension, as float32 has them"""
    rest: tuple[float | None, ...]
    """what stops a delta or velocity, None for an absolute dimension"""


@lru_cache(64)
def _bounds_of(spec: RobotSpec) -> _Bounds:
    """Made once: every tick asks for it."""
    sides = tuple(zip(spec.action_low().tolist(), spec.action_high().tolist(), strict=True))
    dimensions = zip(spec.action, sides, strict=True)
    rest = tuple(
        None if d.meaning is CommandType.absolute else min(max(0.0, low), high) for d, (low, high) in dimensions
    )
    return _Bounds(sides, rest)


def within_bounds(spec: RobotSpec, numbers: Sequence[float]) -> list[float]:
    """`limit_numbers` of what has the right shape and is float32's already."""
    if not all(map(math.isfinite, numbers)):
        names = [d.name for d, number in zip(spec.action, numbers, strict=True) if not math.isfinite(number)]
        raise InvalidDataError(
            f"action is not finite in {', '.join(names)} of robot '{spec.embodiment}'; it is not executed."
        )
    return [
        low if number < low else high if number > high else number
        for number, (low, high) in zip(numbers, _bounds_of(spec).sides, strict=True)
    ]


def limit_numbers(spec: RobotSpec, action: np.ndarray) -> list[float]:
    """`limit_action` as plain numbers that float32 has: a handful of them is reckoned with faster than an array."""
    action = np.asarray(action)
    if action.shape != (len(spec.action),) or action.dtype.kind not in "fiu":
        raise InvalidDataError(
            f"action {action.dtype}{list(action.shape)}; robot '{spec.embodiment}' takes float32[{spec.action_dim}]: "
            f"{', '.join(d.name for d in spec.action)}."
        )
    numbers = within_bounds(spec, action.tolist())
    return numbers if action.dtype == _FLOAT32 else np.array(numbers, np.float32).tolist()


def limit_action(spec: RobotSpec, action: np.ndarray) -> np.ndarray:
    """float32[da]: `action` clipped to the limits of each dimension, as a new array.

    Raises `InvalidDataError` naming the dimensions if it has another shape or holds NaN or infinity.
    """
    return np.array(limit_numbers(spec, action), np.float32)


def hold_numbers(spec: RobotSpec, last_executed: np.ndarray) -> list[float]:
    """`hold_action` as plain numbers that float32 has."""
    pairs = zip(_bounds_of(spec).rest, limit_numbers(spec, last_executed), strict=True)
    return [number if rest is None else rest for rest, number in pairs]


def hold_action(spec: RobotSpec, last_executed: np.ndarray) -> np.ndarray:
    """float32[da]: the action that keeps the robot where it is.

    Delta and velocity dimensions are 0 (never the last delta again), absolute ones stay at `last_executed`,
    float32[da], what the robot really did last. Within limits. Raises `InvalidDataError` if `last_executed` is not a
    valid action.
    """
    return np.array(hold_numbers(spec, last_executed), np.float32)


# --- changes and the workspace ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SafetyLimits:
    """Limits by dimension name; what is not named is not limited. They are no part of the robot's spec."""

    velocity: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second, above 0"""
    acceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second squared, above 0"""
    stop_deceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: how hard an emergency stop brakes, no less than `acceleration`, which it is where not named
    """
    workspace: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """by state dimension: where the robot may be, in the state's unit"""
    moves: tuple[ActionStateMapping, ...] = ()
    """which action dimension moves which state dimension; those of one name belong together"""
    rest: Mapping[str, float] = field(default_factory=dict)
    """by absolute action dimension that nobody measures, such as an effort: what to command before anything was"""


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


@dataclass(frozen=True, slots=True)
class CompiledLimits:
    """`SafetyLimits` of one spec: made once by `compile_limits`, read at every tick."""

    spec: RobotSpec
    period_s: float
    axes: tuple[Axis, ...]
    """of each action dimension"""


def compile_limits(spec: RobotSpec, limits: SafetyLimits) -> CompiledLimits:
    """Raises `ConfigError` for a name the spec has not, a limit that is not positive, or a wall nothing moves to."""
    what = f"safety of '{spec.embodiment}'"
    actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
    tables = ("velocity", limits.velocity), ("acceleration", limits.acceleration)
    for kind, table in (*tables, ("stop_deceleration", limits.stop_deceleration)):
        for name, value in table.items():
            require_dimension(f"{what}: {kind}", name, actions)
            if not value > 0:
                raise ConfigError(f"{what}: {kind} of '{name}' is {value}; give one above 0.")
    for name, value in limits.stop_deceleration.items():
        if not value >= limits.acceleration.get(name, math.inf):
            raise ConfigError(
                f"{what}: stop_deceleration of '{name}' is {value}; give no less than its acceleration, which must be "
                "limited too: an emergency stop is not softer than any other."
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
    bound_low, bound_high = spec.action_low().astype(float), spec.action_high().astype(float)
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
    return CompiledLimits(spec, period_s, tuple(Axis(*each) for each in zip(*columns, own, strict=True)))


class SafetyLimiter:
    """The limits of one robot, with the memory of its speed, for a loop:

    `action = safety.limit(wanted, executed, state); done = robot.write(action).executed; safety.note(done, executed)`.
    """

    def __init__(self, spec: RobotSpec, limits: SafetyLimits) -> None:
        """Raises `ConfigError` as `compile_limits`."""
        self.compiled = compile_limits(spec, limits)
        harder = {**limits.acceleration, **limits.stop_deceleration}
        self._stopping = compile_limits(spec, replace(limits, acceleration=harder))
        self.reset()

    def reset(self) -> None:
        """The robot stands still."""
        self._speeds = [0.0] * self.compiled.spec.action_dim

    def limit(self, action: np.ndarray, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: what comes nearest to `action` within all limits, as a new array.

        `executed`: float32[da], what the robot did last; `state`: float32[ds], where it is, for the walls of delta and
        velocity dimensions. Where it is not known (no state, NaN) such a dimension brakes. Raises `InvalidDataError`
        for an action that is no number or has another shape.
        """
        return self._limited(limit_numbers(self.compiled.spec, action), executed, state, self.compiled)

    def brake(self, executed: np.ndarray, state: np.ndarray | None = None, stop: bool = False) -> np.ndarray:
        """float32[da]: one period of coming to hold, as hard as acceleration allows; at once where it is not limited.

        `stop`: as hard as an emergency stop may.

        Raises `InvalidDataError` when `executed`, float32[da], what the robot did last, is no action of it.
        """
        wanted = hold_numbers(self.compiled.spec, executed)
        return self._limited(wanted, executed, state, self._stopping if stop else self.compiled)

    def note(self, action: np.ndarray, executed: np.ndarray) -> None:
        """`action` is what the robot just did, whoever asked for it, `executed` what it did before; float32[da]."""
        self._speeds = speeds_of(self.compiled, action.tolist(), executed.tolist())

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return not any(self._speeds)

    def _limited(
        self, wanted: list[float], executed: np.ndarray, state: np.ndarray | None, limits: CompiledLimits
    ) -> np.ndarray:
        measured = state.tolist() if state is not None else None
        return np.array(limited_numbers(limits, wanted, executed.tolist(), self._speeds, measured), np.float32)


def speeds_of(compiled: CompiledLimits, action: Sequence[float], executed: Sequence[float]) -> list[float]:
    """How fast each dimension moves with `action` after `executed`."""
    pairs = zip(compiled.axes, action, executed, strict=True)
    return [(now - before if axis.absolute else now) / axis.scale for axis, now, before in pairs]


def limited_numbers(
    compiled: CompiledLimits,
    wanted: list[float],
    executed: Sequence[float],
    speeds: Sequence[float],
    measured: Sequence[float] | None,
) -> list[float]:
    """`SafetyLimiter.limit` as plain numbers that float32 has; `wanted`: of `limit_numbers` or `hold_numbers`."""
    chosen, period_s = [], compiled.period_s
    for i, axis in enumerate(compiled.axes):
        target, speed, origin, down, up = wanted[i], speeds[i], 0.0, math.inf, math.inf
        if axis.absolute:
            origin, down, up = executed[i], max(executed[i] - axis.low, 0.0), max(axis.high - executed[i], 0.0)
        elif axis.walls:
            down, up, known = _ways_left(axis.walls, measured)
            target = target if known else 0.0
        # Most of what is wanted is so far within all limits that no rounding matters, and that is soon seen. From a
        # speed that one period can brake the way it takes is that period's, so no braking needs to be reckoned.
        asked = (target - origin) / axis.scale
        fast = abs(asked) * _MORE
        most, way = (axis.fastest, up) if asked > 0 else (-axis.slowest, down)
        if not (
            fast <= axis.braking
            and fast <= most
            and fast * period_s <= way
            and abs(asked - speed) * _MORE <= axis.change
        ):
            target = _nearest_allowed(axis, target, origin, speed, down, up, period_s)
        chosen.append(target)
    return chosen if chosen == wanted else within_bounds(compiled.spec, chosen)


def _nearest_allowed(
    axis: Axis, wanted: float, origin: float, speed: float, down: float, up: float, period_s: float
) -> float:
    """What comes nearest to `wanted` in one dimension, as a number that float32 has.

    `origin`: where speed 0 leads; `down` and `up`: the way left, in action units, inf without a bound.
    """
    least, most = speed - axis.change, speed + axis.change
    back, forth = -_stoppable(down, axis.braking, period_s), _stoppable(up, axis.braking, period_s)
    slowest = min(max(min(max(axis.slowest, least), most), back), forth)
    fastest = min(max(min(max(axis.fastest, least), most), back), forth)
    low, high = origin + slowest * axis.scale, origin + fastest * axis.scale
    rounded = float(np.float32(min(max(wanted, low), high)))
    # Rounding to float32 must not lead back over the limit.
    if rounded > high:
        rounded = float(np.nextafter(np.float32(rounded), np.float32(-np.inf)))
    if rounded < low:
        rounded = float(np.nextafter(np.float32(rounded), np.float32(np.inf)))
    return rounded


def _ways_left(walls: tuple[WorkspaceLimit, ...], measured: Sequence[float] | None) -> tuple[float, float, bool]:
    """The way left down and up to the walls of one dimension, in action units, and whether all of it is known."""
    down, up, known = math.inf, math.inf, True
    for wall in walls:
        at = measured[wall.state] if measured is not None else math.nan
        if math.isfinite(at):
            below, above = max(0.0, at - wall.low), max(0.0, wall.high - at)
            size = abs(wall.gain)
            if wall.gain < 0:
                below, above = above, below
            down, up = min(down, below / size), min(up, above / size)
        else:
            known = False
    return down, up, known


def _stoppable(distance: float, braking: float, period_s: float) -> float:
    """The highest speed from which the robot can stop within `distance`; the module says how. inf where either is."""
    if not math.isfinite(distance):
        return math.inf
    if not math.isfinite(braking):
        return distance / period_s
    steps = max(math.ceil((math.sqrt(1 + 8 * distance / (period_s * braking)) - 1) / 2), 1)
    return distance / (period_s * steps) + braking * (steps - 1) / 2


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
