"""A robot behind its limits and its stop, and the one who knows what it executed last: whoever touches the driver
holds one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback, RestPose, Robot, StoppableRobot, request_previews, validate_executed
from hal.safety.limiter import SafetyLimiter, SafetyLimits
from hal.safety.rest import rest_action, unmeasured
from hal.safety.stop_latch import StopLatch
from wire.errors import RobotMovingError, RobotStoppedError
from wire.stop_state import StopState
from wire.types import Observation

log = logging.getLogger(__name__)


class LimitedRobot:
    """Keeps the `HoldingRobot` protocol. Not for several threads at once, except `stop`, `release` and `start`."""

    def __init__(self, robot: Robot, limits: SafetyLimits | None = None, latch: StopLatch | None = None) -> None:
        """`latch`: stops that outlive this process. Raises `ConfigError` for limits that do not fit the robot."""
        self.robot, self.spec = robot, robot.spec
        self.executed: np.ndarray | None = None
        """float32[da]: at the last command of this scene, None before the first"""
        self._latch, self._connected = latch or StopLatch(), False
        self.on_stop: Callable[[], None] = lambda: None
        """called by whoever stops the robot, so that nobody waits for the next command"""
        self._limits = limits or SafetyLimits()
        self._limiter = SafetyLimiter(robot.spec, self._limits)
        self._unmeasured = unmeasured(robot.spec, self._limits)
        self._state: np.ndarray | None = None

    @property
    def still(self) -> bool:
        """Whether the robot was not moving when it was last commanded."""
        return self._limiter.still

    def connect(self) -> None:
        """As `Robot.connect`. Raises `RobotStoppedError` for one that is stopped: connecting may put torque on."""
        if not self._connected:
            self._require_free("is not connected")
        self.robot.connect()
        self._connected = True

    def reset(self, task: str, seed: int) -> RestPose | None:
        """As `Robot.reset`. What was executed before says nothing about where the robot is then: it stands still.

        Raises `RobotStoppedError` for one that is stopped, or was while it reset, and `RobotMovingError` for one that
        has not come to hold.
        """
        self._require_free("is not reset")
        if not self.still:
            raise RobotMovingError(f"robot '{self.spec.embodiment}' is not reset while it moves; hold it first.")
        self._forget()
        pose = self.robot.reset(task, seed)
        self._require_free("was stopped while it reset")
        return pose

    def read(self) -> Observation:
        seen = self.robot.read()
        self._state = getattr(seen, "state", None)
        return seen

    def write(self, action: np.ndarray) -> Feedback:
        """Execute what comes nearest to `action`, float32[da], within all limits; hold while somebody stops the robot.

        Raises `InvalidDataError` for what is no action, and what the driver raises.
        """
        before = self._before()
        limited = self._limiter.limit(action, before, self._state)
        return self.hold() if not self._latch.state.free else self._write(limited, before)

    def hold(self) -> Feedback:
        """One period of coming to hold, as hard as acceleration allows, or a stop. Raises what the driver raises.

        A robot that was commanded nothing in this scene is left alone if nobody measures where its targets are: no
        number would hold it.
        """
        before, state = self._before(), self._latch.state
        if self.executed is None and self._unmeasured:
            return Feedback(before, stop=None if state.free else state)
        return self._write(self._limiter.brake(before, self._state, bool(state.stops)), before)

    def stop_state(self) -> StopState:
        return self._latch.state

    def stop(self, stop: str, who: str) -> StopState:
        """As `StopLatch.stop`. What the driver does by itself is stopped here; `hold` brakes the rest."""
        new = not self._latch.state.stops
        self._latch.stop(stop, who)
        self.on_stop()
        if new and isinstance(self.robot, StoppableRobot):
            try:
                self.robot.stop_motion()
            except Exception as error:  # noqa: BLE001 - whatever a driver raises, the stop holds
                log.error("robot '%s' could not stop what it does by itself: %s", self.spec.embodiment, error)
        return self._latch.state

    def release(self, stop: str) -> StopState:
        self._latch.release(stop)
        return self._latch.state

    def start(self) -> StopState:
        self._latch.start()
        return self._latch.state

    def request_previews(self, wanted: bool) -> None:
        request_previews(self.robot, wanted)

    def close(self) -> None:
        self._connected = False
        self._forget()
        self.robot.close()

    def _forget(self) -> None:
        self.executed = self._state = None
        self._limiter.reset()

    def _require_free(self, what: str) -> None:
        state = self._latch.state
        if state.free:
            return
        who = f"by {', '.join(sorted(set(state.stops.values())))}" if state.stops else "before, and nobody started it"
        raise RobotStoppedError(f"robot '{self.spec.embodiment}' {what}: it was stopped {who}.")

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
        state = self._latch.state
        stop = None if state.free else state
        return msgspec.structs.replace(done, executed=self.executed, still=self._limiter.still, stop=stop)
