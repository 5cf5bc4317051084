"""A robot behind its limits, and the one who knows what it executed last: whoever touches the driver holds one."""

from __future__ import annotations

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback, Robot, request_previews, validate_executed
from hal.safety.limiter import SafetyLimiter, SafetyLimits, rest_action, unmeasured
from wire.types import Observation


class LimitedRobot:
    """Keeps the `Robot` protocol, and holds. Not for several threads at once."""

    def __init__(self, robot: Robot, limits: SafetyLimits | None = None) -> None:
        """Raises `ConfigError` for limits that do not fit the robot."""
        self.robot, self.spec = robot, robot.spec
        self.executed: np.ndarray | None = None
        """float32[da]: at the last command of this scene, None before the first"""
        self._limits = limits or SafetyLimits()
        self._limiter = SafetyLimiter(robot.spec, self._limits)
        self._unmeasured = unmeasured(robot.spec, self._limits)
        self._state: np.ndarray | None = None

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return self._limiter.still

    def connect(self) -> None:
        self.robot.connect()

    def reset(self, task: str, seed: int) -> None:
        """As `Robot.reset`. What was executed before says nothing about where the robot is then: it stands still."""
        self._forget()
        self.robot.reset(task, seed)

    def read(self) -> Observation:
        seen = self.robot.read()
        self._state = getattr(seen, "state", None)
        return seen

    def write(self, action: np.ndarray) -> Feedback:
        """Execute what comes nearest to `action`, float32[da], within all limits.

        Raises `InvalidDataError` for what is no action, and what the driver raises.
        """
        before = self._before()
        return self._write(self._limiter.limit(action, before, self._state), before)

    def hold(self) -> Feedback:
        """One period of coming to hold, as hard as acceleration allows. Raises what the driver raises.

        A robot that was commanded nothing in this scene is left alone if nobody measures where its targets are: no
        number would hold it.
        """
        before = self._before()
        if self.executed is None and self._unmeasured:
            return Feedback(before)
        return self._write(self._limiter.brake(before, self._state), before)

    def request_previews(self, wanted: bool) -> None:
        request_previews(self.robot, wanted)

    def close(self) -> None:
        self._forget()
        self.robot.close()

    def _forget(self) -> None:
        self.executed = self._state = None
        self._limiter.reset()

    def _before(self) -> np.ndarray:
        """float32[da]: what the robot executes now."""
        if self.executed is not None:
            return self.executed
        state = self._state if self._state is not None else self.read().state
        return rest_action(self.spec, state, self._limits)

    def _write(self, action: np.ndarray, before: np.ndarray) -> Feedback:
        done = self.robot.write(action)
        # A driver may use its array again. It is noted whatever else is wrong with the answer.
        self.executed = validate_executed(self.spec, done).copy()
        self._limiter.note(self.executed, before)
        return msgspec.structs.replace(done, executed=self.executed, still=self._limiter.still)
