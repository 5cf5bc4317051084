"""The way of a robot to the pose in which its episodes begin: a command a tick, like any other."""

from __future__ import annotations

import numpy as np

from hal.interfaces.robot import RestPose
from hal.safety.limiter import stoppable
from hal.safety.limits import SafetyLimits, compile_limits
from hal.safety.rest import rest_action
from wire.errors import InvalidDataError, RobotError
from wire.types import CommandType, RobotSpec

_SETTLE_S = 2.0
"""a robot may lag so long behind its rest pose"""


class RestMotion:
    """Straight from where the robot is measured to its rest pose."""

    def __init__(self, spec: RobotSpec, pose: RestPose, state: np.ndarray, limits: SafetyLimits | None = None) -> None:
        """`state`: float32[ds], where the robot is; `limits` say what measures a dimension of another name, and how
        early it brakes.

        Raises `InvalidDataError` for a pose that is none of its own.
        """
        low, high = spec.action_low(), spec.action_high()
        if pose.action.shape != low.shape or not np.isfinite(pose.action).all() or not pose.speed > 0:
            raise InvalidDataError(f"robot '{spec.embodiment}': its reset gave {pose} as rest pose.")
        absolute = np.array([d.meaning is CommandType.absolute for d in spec.action], bool)
        states = {d.name: at for at, d in enumerate(spec.state)}
        measured = {name: (at, 1.0) for name, at in states.items()}
        measured |= {m.action: (states[m.state], m.gain) for m in (limits.moves if limits is not None else ())}
        self._measured = {i: measured[d.name] for i, d in enumerate(spec.action) if absolute[i] and d.name in measured}
        """by action dimension: its state dimension, and the state units per action unit"""
        self._spec, self._pose, self._absolute = spec, pose, absolute
        self._at = rest_action(spec, state, limits).astype(float)
        self._goal = np.where(absolute, np.clip(pose.action, low, high), 0.0)
        self._span = (high - low).astype(float)
        self._step = np.where(absolute, self._span * pose.speed * spec.period_ns / 1e9, 0.0)
        way = np.abs(self._goal - self._at)[absolute] / self._span[absolute]
        self._braking = [axis.braking for axis in compile_limits(spec, limits or SafetyLimits()).axes]
        self._travel_s = 2 * float(way.max(initial=0.0)) / pose.speed
        """how long it may still be on its way, at full speed"""
        self._settle_s = _SETTLE_S

    def next_action(self, state: np.ndarray) -> np.ndarray | None:
        """float32[da]: the next command, None when the robot has arrived; `state`: float32[ds], where it is now.

        Raises `RobotError` naming the dimension when it took much longer than it should.
        """
        seen = {i: float(state[at]) / gain for i, (at, gain) in self._measured.items()}
        off = {i: abs(value - self._goal[i]) / self._span[i] for i, value in seen.items()}
        here = np.abs(self._at - self._goal)[self._absolute] <= 1e-6 * self._span[self._absolute]
        if here.all() and max(off.values(), default=0.0) <= self._pose.tolerance:
            return None
        if self._settle_s < 0:
            worst = max(off, key=lambda i: off[i], default=0)
            where = f"{seen[worst]:.1f}" if worst in seen else "an unknown place"
            raise RobotError(
                f"robot '{self._spec.embodiment}' does not reach its rest pose: '{self._spec.action[worst].name}' is "
                f"at {where} instead of {self._goal[worst]:.1f}. Is it blocked, limited, or without power?"
            )
        way, period_s = self._goal - self._at, self._spec.period_ns / 1e9
        # It stops at its goal: a command that only ended there would have the robot brake behind it.
        slowest = [stoppable(abs(d), b, period_s) * period_s for d, b in zip(way.tolist(), self._braking, strict=True)]
        most = np.minimum(self._step, slowest)
        step = np.clip(way, -most, most)
        return np.where(self._absolute, self._at + step, 0.0).astype(np.float32)

    def on_executed(self, action: np.ndarray, share: float = 1.0) -> None:
        """float32[da]: what the robot did; the next command goes on from there.

        `share` of its limits at which it was commanded; 0: it was held, which is no fault of its own and takes no time.
        """
        self._at = action.astype(float)
        period_s = self._spec.period_ns / 1e9
        if self._travel_s > 0:
            self._travel_s -= share * period_s
        elif share:
            self._settle_s -= period_s
