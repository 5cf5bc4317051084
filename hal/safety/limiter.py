"""How fast and how far a robot may move, outside every policy. Pure functions: what was goes in, what may be comes out.

`limit_action` (hal.safety.bounds) keeps each number within its bounds; this module keeps *changes* within bounds:
velocity and acceleration of every action dimension, by what the dimension means, and the workspace of what the robot
measures. An action that breaks a limit is brought to it, never refused; only what is no number is refused, by
`limit_action`.

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
from dataclasses import dataclass, field

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping
from hal.safety.bounds import hold_numbers, limit_numbers, within_bounds
from wire.errors import ConfigError, InvalidDataError, suggest
from wire.types import CommandType, RobotSpec


@dataclass(frozen=True, slots=True)
class SafetyLimits:
    """Limits by dimension name; what is not named is not limited. They are no part of the robot's spec."""

    velocity: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second, above 0"""
    acceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second squared, above 0"""
    workspace: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """by state dimension: where the robot may be, in the state's unit"""
    moves: tuple[ActionStateMapping, ...] = ()
    """which action dimension moves which state dimension of the workspace; those of one name belong together"""


_MORE = 1 + 1e-9


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

    @property
    def has_walls(self) -> bool:
        """Whether it matters where the robot is."""
        return any(axis.walls for axis in self.axes)


def compile_limits(spec: RobotSpec, limits: SafetyLimits) -> CompiledLimits:
    """Raises `ConfigError` for a name the spec has not, a limit that is not positive, or a wall nothing moves to."""
    what = f"safety of '{spec.embodiment}'"
    actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
    for kind, table in (("velocity", limits.velocity), ("acceleration", limits.acceleration)):
        for name, value in table.items():
            _known(f"{what}: {kind}", name, actions)
            if not value > 0:
                raise ConfigError(f"{what}: {kind} of '{name}' is {value}; give one above 0.")
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
    """One robot's guard with the memory of its speed, for a loop:

    `action = safety.limit(wanted, executed, state); done = robot.write(action).executed; safety.note(done, executed)`.
    """

    def __init__(self, spec: RobotSpec, limits: SafetyLimits) -> None:
        """Raises `ConfigError` as `compile_limits`."""
        self.guard = compile_limits(spec, limits)
        self.reset()

    def reset(self) -> None:
        """The robot stands still."""
        self._speeds = [0.0] * self.guard.spec.action_dim

    def limit(self, action: np.ndarray, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: what comes nearest to `action` within all limits, as a new array.

        `executed`: float32[da], what the robot did last; `state`: float32[ds], where it is, for the walls of delta and
        velocity dimensions. Where it is not known (no state, NaN) such a dimension brakes. Raises `InvalidDataError`
        for an action that is no number or has another shape.
        """
        return _limited(self.guard, limit_numbers(self.guard.spec, action), executed, self._speeds, state)

    def brake(self, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: one period of coming to hold, as hard as acceleration allows; at once where it is not limited.

        Raises `InvalidDataError` when `executed`, float32[da], what the robot did last, is no action of it.
        """
        return _limited(self.guard, hold_numbers(self.guard.spec, executed), executed, self._speeds, state)

    def note(self, action: np.ndarray, executed: np.ndarray) -> None:
        """`action` is what the robot just did, whoever asked for it, `executed` what it did before; float32[da]."""
        self._speeds = speeds_of(self.guard, action.tolist(), executed.tolist())

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return not any(self._speeds)


def speeds_of(guard: CompiledLimits, action: Sequence[float], executed: Sequence[float]) -> list[float]:
    """How fast each dimension moves with `action` after `executed`."""
    pairs = zip(guard.axes, action, executed, strict=True)
    return [(now - before if axis.absolute else now) / axis.scale for axis, now, before in pairs]


def limited_numbers(
    guard: CompiledLimits,
    wanted: list[float],
    executed: Sequence[float],
    speeds: Sequence[float],
    measured: Sequence[float] | None,
) -> list[float]:
    """`SafetyLimiter.limit` as plain numbers that float32 has; `wanted`: of `limit_numbers` or `hold_numbers`."""
    chosen, period_s = [], guard.period_s
    for i, axis in enumerate(guard.axes):
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
    return chosen if chosen == wanted else within_bounds(guard.spec, chosen)


def _limited(
    guard: CompiledLimits, wanted: list[float], executed: np.ndarray, speeds: list[float], state: np.ndarray | None
) -> np.ndarray:
    measured = state.tolist() if state is not None else None
    return np.array(limited_numbers(guard, wanted, executed.tolist(), speeds, measured), np.float32)


def check_age(what: str, time_ns: int, now_ns: int, limit_s: float, ahead_s: float = 0.0) -> None:
    """Raise `InvalidDataError` if `what`, of `time_ns`, is older than `limit_s` or more than `ahead_s` ahead of
    `now_ns`.
    """
    age_s = (now_ns - time_ns) / 1e9
    if age_s > limit_s:
        raise InvalidDataError(f"{what} is {age_s * 1e3:.0f} ms old; at most {limit_s * 1e3:.0f} ms are safe.")
    if age_s < -ahead_s:
        raise InvalidDataError(
            f"{what} is from the future: {-age_s * 1e3:.0f} ms ahead; at most {ahead_s * 1e3:.0f} ms are."
        )


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
    for coupling in limits.moves:
        _known(f"{what}: moves", coupling.action, actions)
        _known(f"{what}: moves", coupling.state, states)
        if not (np.isfinite(coupling.gain) and coupling.gain):
            raise ConfigError(f"{what}: '{coupling.action}' moves '{coupling.state}' by {coupling.gain}; give a gain.")
    walls = []
    for name, (low, high) in limits.workspace.items():
        _known(f"{what}: workspace", name, states)
        if not low < high:
            raise ConfigError(f"{what}: workspace of '{name}' from {low} to {high} is empty.")
        moving = [coupling for coupling in limits.moves if coupling.state == name]
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


def _known(what: str, name: str, names: list[str]) -> None:
    if name not in names:
        raise ConfigError(f"{what} names '{name}'.{suggest(name, names)} It has {', '.join(names)}.")
