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

An absolute target is approached so too, with the speed at which it moves by itself on top (`approached`): one that
stands is not passed, and one that moves within the limits is followed without lag.

A robot that is measured outside its bounds is there: it holds there, and comes back in like any other motion. Where
limits contradict each other (the robot was pushed, or measures late) bounds and walls win over acceleration, and
acceleration over velocity. Standing still is always among what is allowed, as soon as the robot has braked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hal.safety.limits import Axis, CompiledLimits, SafetyLimits, WorkspaceLimit, compile_limits, slowed
from wire.errors import InvalidDataError
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


class SafetyLimiter:
    """The limits of one robot, with the memory of its speed, for a loop:

    `action = safety.limit(wanted, executed, state); done = robot.write(action).executed; safety.note(done, executed)`.
    """

    def __init__(
        self, spec: RobotSpec, limits: SafetyLimits, reach: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """`reach` and what is raised: as `compile_limits`."""
        self.compiled = self._allowed = compile_limits(spec, limits, reach)
        harder = {**limits.acceleration, **limits.stop_deceleration}
        self._stopping = compile_limits(spec, replace(limits, acceleration=harder), reach)
        self._share, self._soft = 1.0, bool(limits.jerk)
        self.reset()

    def slow(self, share: float) -> None:
        """From now on it moves at most at `share`, above 0 up to 1, of its velocity limits; one that is faster brakes
        as hard as acceleration allows. Raises `ConfigError` as `slowed`.
        """
        if share != self._share:
            self._allowed, self._share = slowed(self.compiled, share), share

    def reset(self) -> None:
        """The robot stands still."""
        self._speeds = [0.0] * self.compiled.spec.action_dim
        self._changes = self._speeds
        """of the speeds, in the last period"""
        self._aims: Aims | None = None

    def limit(self, action: np.ndarray, executed: np.ndarray, state: np.ndarray | None = None) -> np.ndarray:
        """float32[da]: what comes nearest to `action` within all limits, as a new array.

        `executed`: float32[da], what the robot did last; `state`: float32[ds], where it is, for the walls of delta and
        velocity dimensions. Where it is not known (no state, NaN) such a dimension brakes. Raises `InvalidDataError`
        for an action that is no number or has another shape.
        """
        wanted = limit_numbers(self.compiled.spec, action)
        shaped, self._aims = approached(self._allowed, wanted, executed.tolist(), self._aims)
        return self._limited(shaped, executed, state, self._allowed)

    def brake(self, executed: np.ndarray, state: np.ndarray | None = None, stop: bool = False) -> np.ndarray:
        """float32[da]: one period of coming to hold, as hard as acceleration allows; at once where it is not limited.

        `stop`: as hard as an emergency stop may.

        Raises `InvalidDataError` when `executed`, float32[da], what the robot did last, is no action of it.
        """
        held, self._aims = hold_numbers(self.compiled.spec, executed), None
        # One that is outside its bounds stays there.
        pairs = zip(self.compiled.axes, executed.tolist(), held, strict=True)
        wanted = [at if axis.absolute else rest for axis, at, rest in pairs]
        if self._soft:
            wanted = softened(self._stopping if stop else self._allowed, wanted, self._speeds, self._changes)
        return self._limited(wanted, executed, state, self._stopping if stop else self._allowed)

    def note(self, action: np.ndarray, executed: np.ndarray) -> None:
        """`action` is what the robot just did, whoever asked for it, `executed` what it did before; float32[da]."""
        before, self._speeds = self._speeds, speeds_of(self.compiled, action.tolist(), executed.tolist())
        if self._soft:
            self._changes = [now - last for now, last in zip(self._speeds, before, strict=True)]

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


class Aims(NamedTuple):
    """What was wanted of each dimension last, and how fast that moved in that period and in the one before."""

    wanted: Sequence[float]
    rates: Sequence[float]
    before: Sequence[float]


def approached(
    compiled: CompiledLimits, wanted: list[float], executed: Sequence[float], aims: Aims | None
) -> tuple[list[float], Aims]:
    """Instead of `wanted`, of `limit_numbers`: what leads absolute dimensions there without going past it, and the
    `Aims` for the next period; None for the first, which comes after standing or holding.

    The speed that can still be braked on the way that is left is a speed towards the target, so what the target moves
    by itself comes on top. A single jump of it is no motion, and neither is a single period in which it stands: what
    counts is the slower of its speed now and the faster of the two before.
    """
    nothing = [0.0] * len(wanted)
    last = aims or Aims(executed, nothing, nothing)
    shaped, rates = list(wanted), [0.0] * len(wanted)
    for i, axis in enumerate(compiled.axes):
        if not axis.absolute:
            continue
        rates[i] = rate = (wanted[i] - last.wanted[i]) / axis.scale
        asked = (wanted[i] - executed[i]) / axis.scale
        # What one period can brake gets there and stops.
        if abs(asked) > axis.braking:
            way = math.copysign(1.0, asked)
            own = min(way * rate, max(way * last.rates[i], way * last.before[i]), axis.fastest, abs(asked))
            own = max(own, 0.0)
            closing = abs(asked) - own
            if closing > axis.change:
                speed = own + stoppable(closing * axis.scale, axis.braking, compiled.period_s)
                shaped[i] = float(np.float32(executed[i] + way * speed * axis.scale))
    return shaped, Aims(wanted, rates, last.rates)


def softened(
    compiled: CompiledLimits, held: list[float], speeds: Sequence[float], changes: Sequence[float]
) -> list[float]:
    """Instead of `held`, of `hold_numbers`: what brakes absolute dimensions within their limits of jerk.

    Braking by b in this period and fading by j a period takes b (n + 1) - j n (n + 1) / 2 off the speed, where n is
    floor(b / j). So from speed v the hardest braking that still fades out is that of the module's formula, one
    derivative up: b <= v / n + j (n - 1) / 2. Whatever sped the robot up before ends at once; one that braked already
    harder than can fade in what is left of its speed fades as much as it can.
    """
    wanted = list(held)
    for i, (axis, speed, change) in enumerate(zip(compiled.axes, speeds, changes, strict=True)):
        if speed and math.isfinite(axis.jerk):
            way = math.copysign(1.0, speed)
            so_far = max(0.0, -way * change)
            braking = min(so_far + axis.jerk, axis.braking, stoppable(abs(speed), axis.jerk, 1.0))
            braking = max(braking, so_far - axis.jerk)
            wanted[i] += way * max(0.0, abs(speed) - braking) * axis.scale
    return wanted


def limited_numbers(
    compiled: CompiledLimits,
    wanted: list[float],
    executed: Sequence[float],
    speeds: Sequence[float],
    measured: Sequence[float] | None,
) -> list[float]:
    """The limits of velocity, acceleration and workspace as plain numbers that float32 has; `wanted`: of `approached`,
    `limit_numbers` or `hold_numbers`.
    """
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
    if chosen == wanted:
        return chosen
    bounded = within_bounds(compiled.spec, chosen)
    for i, axis in enumerate(compiled.axes):
        if axis.absolute and bounded[i] != chosen[i]:
            # On its way back in from `executed`, and no farther out than that.
            low, high = sorted((bounded[i], executed[i]))
            bounded[i] = min(max(chosen[i], low), high)
    return bounded


def _nearest_allowed(
    axis: Axis, wanted: float, origin: float, speed: float, down: float, up: float, period_s: float
) -> float:
    """What comes nearest to `wanted` in one dimension, as a number that float32 has.

    `origin`: where speed 0 leads; `down` and `up`: the way left, in action units, inf without a bound.
    """
    least, most = speed - axis.change, speed + axis.change
    back, forth = -stoppable(down, axis.braking, period_s), stoppable(up, axis.braking, period_s)
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


def stoppable(distance: float, braking: float, period_s: float) -> float:
    """The highest speed from which the robot can stop within `distance`; the module says how. inf where either is."""
    if not math.isfinite(distance):
        return math.inf
    if not math.isfinite(braking):
        return distance / period_s
    steps = max(math.ceil((math.sqrt(1 + 8 * distance / (period_s * braking)) - 1) / 2), 1)
    return distance / (period_s * steps) + braking * (steps - 1) / 2
