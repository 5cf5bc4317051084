"""The way of a robot to the pose in which its episodes begin: a command a tick, like any other."""

from __future__ import annotations

import numpy as np

from hal.interfaces.robot import RestPose
from hal.safety.rest import rest_action
from wire.clock import Clock
from wire.errors import InvalidDataError, RobotError
from wire.types import CommandType, RobotSpec

_SETTLE_S = 2.0
"""a robot may lag so long behind its rest pose"""


class RestMotion:
    """Straight from where the robot is measured to its rest pose."""

    def __init__(
        self, spec: RobotSpec, pose: RestPose, state: np.ndarray, clock: Clock, speed_limit: float = 1.0
    ) -> None:
        """`state`: float32[ds], where the robot is; `speed_limit`: share of its limits to which it is slowed, so it
        may take longer. Raises `InvalidDataError` for a pose that is none of its own.
        """
        low, high = spec.action_low(), spec.action_high()
        if pose.action.shape != low.shape or not np.isfinite(pose.action).all() or not pose.speed > 0:
            raise InvalidDataError(f"robot '{spec.embodiment}': its reset gave {pose} as rest pose.")
        absolute = np.array([d.meaning is CommandType.absolute for d in spec.action], bool)
        states = {d.name: at for at, d in enumerate(spec.state)}
        self._measured = {i: states[d.name] for i, d in enumerate(spec.action) if absolute[i] and d.name in states}
        self._spec, self._pose, self._clock, self._absolute = spec, pose, clock, absolute
        self._at = rest_action(spec, state).astype(float)
        self._goal = np.where(absolute, np.clip(pose.action, low, high), 0.0)
        self._span = (high - low).astype(float)
        self._step = np.where(absolute, self._span * pose.speed * spec.period_ns / 1e9, 0.0)
        way = np.abs(self._goal - self._at)[absolute] / self._span[absolute]
        travel_s = float(way.max(initial=0.0)) / (pose.speed * speed_limit)
        self._due_ns = clock.now_ns() + int((2 * travel_s + _SETTLE_S) * 1e9)

    def next_action(self, state: np.ndarray) -> np.ndarray | None:
        """float32[da]: the next command, None when the robot has arrived; `state`: float32[ds], where it is now.

        Raises `RobotError` naming the dimension when it takes much longer than it should.
        """
        off = {i: abs(float(state[at]) - self._goal[i]) / self._span[i] for i, at in self._measured.items()}
        here = np.abs(self._at - self._goal)[self._absolute] <= 1e-6 * self._span[self._absolute]
        if here.all() and max(off.values(), default=0.0) <= self._pose.tolerance:
            return None
        if self._clock.now_ns() > self._due_ns:
            worst = max(off, key=lambda i: off[i], default=0)
            name, at = self._spec.action[worst].name, self._measured.get(worst)
            where = f"{float(state[at]):.1f}" if at is not None else "an unknown place"
            raise RobotError(
                f"robot '{self._spec.embodiment}' does not reach its rest pose: '{name}' is at {where} instead of "
                f"{self._goal[worst]:.1f}. Is it blocked, limited, or without power?"
            )
        step = np.clip(self._goal - self._at, -self._step, self._step)
        return np.where(self._absolute, self._at + step, 0.0).astype(np.float32)

    def on_executed(self, action: np.ndarray) -> None:
        """float32[da]: what the robot did; the next command goes on from there."""
        self._at = action.astype(float)
