"""How fast and how far a robot may move, outside every policy. Pure functions: what was goes in, what may be comes out.

`limit_action` (hal.limits) keeps each number within its bounds; this module keeps *changes* within bounds: velocity and
acceleration of every action dimension, by what the dimension means, and the workspace of what the robot measures. An
action that breaks a limit is brought to it, never refused; only what is no number is refused, by `limit_action`.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hal.limits import hold_action, limit_action
from hal.motion import Coupling
from wire.errors import ConfigError, InvalidData, nearest
from wire.types import Meaning, RobotSpec


@dataclass(frozen=True, slots=True)
class SafetyLimits:
    """Limits by dimension name; what is not named is not limited. They are no part of the robot's spec."""

    velocity: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second, above 0"""
    acceleration: Mapping[str, float] = field(default_factory=dict)
    """by action dimension: units per second squared, above 0"""
    workspace: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """by state dimension: where the robot may be, in the state's unit"""
    moves: tuple[Coupling, ...] = ()
    """which action dimension moves which state dimension of the workspace; those of one name belong together"""


class Moving(NamedTuple):
    """What the robot was doing last."""

    executed: np.ndarray
    """float32[da]"""
    speed: np.ndarray
    """float64[da]: units per second, as the table above defines them"""


class Wall(NamedTuple):
    """A limited state dimension and the action dimension that moves it."""

    action: int
    state: int
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Guard:
    """`SafetyLimits` as arrays of one spec: made once by `make_guard`, read at every tick."""

    spec: RobotSpec
    period_s: float
    absolute: np.ndarray
    """bool[da]"""
    scale: np.ndarray
    """float64[da]: action units per unit of speed: the period, 1 for a velocity"""
    slowest: np.ndarray
    """float64[da]: lowest speed, -inf where nothing limits it"""
    fastest: np.ndarray
    """float64[da]"""
    change: np.ndarray
    """float64[da]: how much the speed may change in one period, inf where nothing limits it"""
    braking: np.ndarray
    """float64[da]: the change counted on for braking: a little less than `change`, because actions and measurements are
    float32 and must not need a harder braking by being rounded"""
    low: np.ndarray
    """float64[da]: bounds of absolute dimensions, with those of the workspace; -inf for the others"""
    high: np.ndarray
    """float64[da]"""
    walls: tuple[Wall, ...]
    """the workspace of what delta and velocity dimensions move"""


def make_guard(spec: RobotSpec, limits: SafetyLimits) -> Guard:
    """Raises `ConfigError` for a name the spec has not, a limit that is not positive, or a wall nothing moves to."""
    what = f"safety of '{spec.embodiment}'"
    actions, states = [d.name for d in spec.action], [d.name for d in spec.state]
    for kind, table in (("velocity", limits.velocity), ("acceleration", limits.acceleration)):
        for name, value in table.items():
            _known(f"{what}: {kind}", name, actions)
            if not value > 0:
                raise ConfigError(f"{what}: {kind} of '{name}' is {value}; give one above 0.")
    period_s = spec.period_ns / 1e9
    absolute = np.array([d.meaning is Meaning.absolute for d in spec.action], bool)
    scale = np.array([1.0 if d.meaning is Meaning.velocity else period_s for d in spec.action])
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
    return Guard(
        spec=spec,
        period_s=period_s,
        absolute=absolute,
        scale=scale,
        slowest=np.where(absolute, -velocity, np.maximum(-velocity, np.minimum(0, bound_low / scale))),
        fastest=np.where(absolute, velocity, np.minimum(velocity, np.maximum(0, bound_high / scale))),
        change=change,
        braking=np.maximum(change - 2 * grain, change / 2),
        low=low,
        high=high,
        walls=tuple(walls),
    )


def standing(executed: np.ndarray) -> Moving:
    """A robot that stands still where `executed`, float32[da], brought it."""
    executed = np.asarray(executed, np.float32)
    return Moving(executed, np.zeros(len(executed)))


def speed_of(guard: Guard, action: np.ndarray, executed: np.ndarray) -> np.ndarray:
    """float64[da]: how fast each dimension moves with `action` after `executed`, both float32[da]."""
    action = np.asarray(action, np.float64)
    return np.where(guard.absolute, action - np.asarray(executed, np.float64), action) / guard.scale


def moved(guard: Guard, moving: Moving, executed: np.ndarray) -> Moving:
    """What the robot is doing after it executed `executed`, float32[da]."""
    return Moving(np.asarray(executed, np.float32), speed_of(guard, executed, moving.executed))


def limited(guard: Guard, moving: Moving, action: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
    """float32[da]: what comes nearest to `action` within all limits, as a new array.

    `state`: float32[ds], where the robot is, for the walls of delta and velocity dimensions. Where it is not known (no
    state, NaN) such a dimension brakes. Raises `InvalidData` for an action that is no number or has another shape.
    """
    wanted = limit_action(guard.spec, action).astype(np.float64)
    inward, outward, unknown = _distances(guard, moving.executed, state)
    wanted[unknown] = 0.0
    least, most = moving.speed - guard.change, moving.speed + guard.change
    brakes = _stoppable(inward, guard), _stoppable(outward, guard)
    slowest = np.clip(np.clip(guard.slowest, least, most), -brakes[0], brakes[1])
    fastest = np.clip(np.clip(guard.fastest, least, most), -brakes[0], brakes[1])
    origin = np.where(guard.absolute, moving.executed.astype(np.float64), 0.0)
    low, high = origin + slowest * guard.scale, origin + fastest * guard.scale
    chosen = np.clip(wanted, low, high)
    rounded = chosen.astype(np.float32)
    # Rounding to float32 must not lead back over the limit.
    rounded = np.where(rounded > high, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    rounded = np.where(rounded < low, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return limit_action(guard.spec, rounded)


def braked(guard: Guard, moving: Moving, state: np.ndarray | None = None) -> np.ndarray:
    """float32[da]: one period of coming to hold, as hard as acceleration allows; at once where it is not limited.

    Raises `InvalidData` when what was executed last is no action of this robot.
    """
    return limited(guard, moving, hold_action(guard.spec, moving.executed), state)


def brake(spec: RobotSpec, limits: SafetyLimits, last: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """`braked` without a guard at hand: `last` float32[da] was executed last, at `speed` float64[da] (`speed_of`)."""
    return braked(make_guard(spec, limits), Moving(np.asarray(last, np.float32), np.asarray(speed, np.float64)))


class Safety:
    """One robot's guard with the memory of its speed, for a loop:

    `action = safety.limit(wanted, executed, state); done = robot.write(action).executed; safety.note(done, executed)`.
    """

    def __init__(self, spec: RobotSpec, limits: SafetyLimits) -> None:
        """Raises `ConfigError` as `make_guard`."""
        self.guard = make_guard(spec, limits)
        self.reset()

    def reset(self) -> None:
        """The robot stands still."""
        self._speed = np.zeros(self.guard.spec.action_dim)

    def limit(self, action: np.ndarray, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """See `limited`. `executed`: float32[da], what the robot did last."""
        return limited(self.guard, Moving(np.asarray(executed, np.float32), self._speed), action, state)

    def brake(self, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """See `braked`. `executed`: float32[da], what the robot did last."""
        return braked(self.guard, Moving(np.asarray(executed, np.float32), self._speed), state)

    def note(self, action: np.ndarray, executed: np.ndarray) -> None:
        """`action` is what the robot just did, whoever asked for it, `executed` what it did before; float32[da]."""
        self._speed = speed_of(self.guard, action, executed)

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return not self._speed.any()


def check_age(what: str, time_ns: int, now_ns: int, limit_s: float, ahead_s: float = 0.0) -> None:
    """Raise `InvalidData` if `what`, of `time_ns`, is older than `limit_s` or more than `ahead_s` ahead of `now_ns`."""
    age_s = (now_ns - time_ns) / 1e9
    if age_s > limit_s:
        raise InvalidData(f"{what} is {age_s * 1e3:.0f} ms old; at most {limit_s * 1e3:.0f} ms are safe.")
    if age_s < -ahead_s:
        raise InvalidData(
            f"{what} is from the future: {-age_s * 1e3:.0f} ms ahead; at most {ahead_s * 1e3:.0f} ms are."
        )


def _distances(guard: Guard, executed: np.ndarray, state: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """float64[da] way left down and up, in action units (inf without a bound), and bool[da] where nobody knows."""
    down = np.where(guard.absolute, np.maximum(executed - guard.low, 0.0), np.inf)
    up = np.where(guard.absolute, np.maximum(guard.high - executed, 0.0), np.inf)
    unknown = np.zeros(len(down), bool)
    for wall in guard.walls:
        at = float(state[wall.state]) if state is not None else np.nan
        if not np.isfinite(at):
            unknown[wall.action] = True
            continue
        ways = max(0.0, at - wall.low), max(0.0, wall.high - at)
        below, above = ways if wall.gain > 0 else ways[::-1]
        down[wall.action] = min(down[wall.action], below / abs(wall.gain))
        up[wall.action] = min(up[wall.action], above / abs(wall.gain))
    return down, up, unknown


def _stoppable(distance: np.ndarray, guard: Guard) -> np.ndarray:
    """float64[da]: the highest speed from which the robot can stop within `distance`; the module says how."""
    brakes = np.isfinite(guard.braking)
    change = np.where(brakes, guard.braking, 1.0)
    way = np.where(np.isfinite(distance), distance, 0.0)
    steps = np.ceil((np.sqrt(1 + 8 * way / (guard.period_s * change)) - 1) / 2)
    steps = np.where(brakes, np.maximum(steps, 1), 1)
    speed = way / (guard.period_s * steps) + np.where(brakes, change * (steps - 1) / 2, 0.0)
    return np.where(np.isfinite(distance), speed, np.inf)


def _grain(size: np.ndarray | float) -> np.ndarray:
    """float64: how far apart float32 numbers of this size lie."""
    return np.spacing(np.asarray(size, np.float32)).astype(np.float64)


def _walls(what: str, limits: SafetyLimits, actions: list[str], states: list[str]) -> list[Wall]:
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
            moving = [Coupling(name, name)]
        if not moving:
            raise ConfigError(
                f"{what}: nothing says which action moves '{name}', so its workspace cannot be kept. "
                f"Name it in `moves`: {', '.join(actions)}."
            )
        if len(moving) > 1:
            raise ConfigError(f"{what}: '{name}' is moved by {', '.join(c.action for c in moving)}; only one can be.")
        walls.append(Wall(actions.index(moving[0].action), states.index(name), moving[0].gain, low, high))
    return walls


def _known(what: str, name: str, names: list[str]) -> None:
    if name not in names:
        raise ConfigError(f"{what} names '{name}'.{nearest(name, names)} It has {', '.join(names)}.")
