"""The robot's driver as the loop uses it: whatever it raises or answers becomes a named fault, never the loop's end.

    read and write  ──fail for a while──►  given up: closed, and after a pause ──► connect ──► reset ──► read ...
                                            (1 s, twice as long each time, 30 s at most)

A fault is over when the robot has been read again. People hear of it once, however often the driver is tried.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hal.interfaces.robot import Feedback, Robot, request_previews
from hal.safety.bounds import limit_numbers
from policies.interface.policy import check_observation
from robot_edge.control.config import RobotTimeouts
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason
from wire.clock import Clock
from wire.errors import ConfigError, FleetError, InvalidDataError, RobotDisconnectedError, RobotError
from wire.types import Frame, Observation, RobotSpec

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class GuardedRobot:
    """One robot. `fault` says why it cannot be used now, or what was wrong when it was used last."""

    def __init__(
        self, name: str, robot: Robot, config: RobotTimeouts, clock: Clock, notify: Callable[[str, str], None]
    ) -> None:
        """A `robot` that is connected already; `start_disconnected` otherwise. `notify(kind, detail)`: for people."""
        self.connected = True
        self.fault = NO_HOLD
        self.refused_commands = 0
        """in a row"""
        self._name = name
        self._robot = robot
        self._expect_read: Callable[[int], None] | None = getattr(robot, "expect_read", None)
        self._config = config
        self._clock = clock
        self._notify = notify
        self._notified = False
        """people know of the fault"""
        self._must_take_command = False
        """the fault is over only when a command is taken"""
        self._logged = ""
        """the error whose traceback is in the log"""
        self._previews = False
        self._failures = 0
        self._due_ns = 0
        self._bad_since_ns = -1

    def start_disconnected(self) -> None:
        """Nobody has connected it yet: the next `ensure_connected` does."""
        self.connected, self.fault = False, Hold(HoldReason.no_robot)

    def ensure_connected(self) -> bool:
        """Whether it can be used; connects it when that is due, which may take its time."""
        if self._due_ns and self._clock.now_ns() < self._due_ns:
            return False
        self._due_ns = 0
        if self.connected:
            return True
        try:
            self._call("connect", self._robot.connect)
        except FleetError as error:
            self.disconnect(HoldReason.no_robot, f"it cannot be connected: {error}")
            return False
        self.connected = True
        return True

    def reset(self, task: str, seed: int) -> bool:
        """Whether the robot stands at the start of `task`."""
        try:
            self._call("reset", lambda: self._robot.reset(task, seed))
        except FleetError as error:
            self.disconnect(
                HoldReason.no_reset, f"it cannot be reset to '{task}': {error}", keep=isinstance(error, ConfigError)
            )
            return False
        self._bad_since_ns, self.refused_commands = -1, 0
        return True

    def read(self) -> Observation:
        """The newest observation, of sound types. Raises `RobotError` or `InvalidDataError` for whatever went wrong."""
        return self._call("read", lambda: validate_observation(self._robot.spec, self._robot.read()))

    def request_previews(self, wanted: bool) -> None:
        """Pass it on if the robot has larger pictures; one that fails at it goes on without."""
        if wanted == self._previews:
            return
        self._previews = wanted
        try:
            self._call("request_previews", lambda: request_previews(self._robot, wanted))
        except FleetError as error:
            log.warning("robot '%s': no larger pictures: %s", self._name, error)

    def write(self, action: np.ndarray, next_read_ns: int = 0) -> Feedback | None:
        """What came of `action`, float32[da]; None when it was not taken. After too many of those it is given up.

        `next_read_ns`: when it will be read next, for a robot that gets ready for it (by a method `expect_read`, as
        `hal.driver_host.proxy` has); 0 when nobody knows.
        """

        def write() -> Feedback:
            if self._expect_read is not None and next_read_ns:
                self._expect_read(next_read_ns)
            return validate_feedback(self._robot.spec, self._robot.write(action))

        try:
            feedback = self._call("write", write)
        except FleetError as error:
            self.refused_commands += 1
            # That it can be read again will not prove that it can be commanded.
            self._must_take_command = True
            self._set_fault(HoldReason.safety, f"the robot does not take a command: {error}")
            if isinstance(error, RobotDisconnectedError):
                self.disconnect(HoldReason.no_robot, str(error))
            elif self.refused_commands > self._config.refusals:
                self.disconnect(HoldReason.no_robot, f"it took none of {self.refused_commands} commands: {error}")
            return None
        if self._must_take_command:
            self.refused_commands, self._must_take_command, self._failures = 0, False, 0
            self._clear_fault("the robot takes commands again.")
        return feedback

    def report_read_failure(self, error: str, gone: bool = False) -> None:
        """No valid observation came, and why. After a while of that, and at once when it is `gone`, it is given up."""
        now_ns = self._clock.now_ns()
        if self._bad_since_ns < 0:
            self._bad_since_ns = now_ns
        if gone or now_ns - self._bad_since_ns > self._config.give_up_s * 1e9:
            self.disconnect(HoldReason.no_robot, error)

    def report_valid_read(self) -> None:
        """A valid observation came."""
        self._bad_since_ns = -1
        if not self._must_take_command:
            self._failures = 0
            self._clear_fault("the robot answers again.")

    def check_at_rest(self, *, scene: bool) -> Hold:
        """At rest, now and then: what is wrong with the robot.

        Without a `scene`, which a reset makes, a robot need not answer: being connected is all that it can prove.
        """
        self._must_take_command = False
        if not scene:
            self._clear_fault("the robot is connected again.")
            return NO_HOLD
        try:
            check_observation(self._robot.spec, self.read())
        except (InvalidDataError, RobotError) as error:
            self.report_read_failure(str(error), gone=isinstance(error, RobotDisconnectedError))
            return Hold(HoldReason.bad_observation, str(error))
        self.report_valid_read()
        return NO_HOLD

    def disconnect(self, reason: HoldReason, error: str, *, keep: bool = False) -> None:
        """Give it up and try again after a pause; `keep`: the connection stays."""
        config = self._config
        pause_s = min(config.longest_pause_s, config.first_pause_s * 2 ** min(self._failures, 30))
        self._failures += 1
        self._due_ns = self._clock.now_ns() + int(pause_s * 1e9)
        self._set_fault(reason, error)
        self._bad_since_ns, self.refused_commands = -1, 0
        log.warning("robot '%s' is tried again in %.0f s: %s", self._name, pause_s, error)
        if self.connected and not keep:
            self.connected = False
            # What it raises when it is put away says nothing new.
            with contextlib.suppress(FleetError):
                self._call("close", self._robot.close)

    def close(self) -> None:
        """Stop the robot and give it back; an error is logged."""
        try:
            self._call("close", self._robot.close)
        except FleetError as error:
            log.error("robot '%s' could not be closed: %s", self._name, error)

    def _set_fault(self, reason: HoldReason, text: str) -> None:
        self.fault = Hold(reason, text)
        if not self._notified:
            self._notified = True
            self._notify("hold", text)

    def _clear_fault(self, text: str) -> None:
        self.fault = NO_HOLD
        if self._notified:
            self._notified = False
            self._notify("recovered", text)

    def _call(self, call: str, function: Callable[[], _T]) -> _T:
        """Raises `FleetError` only, whatever a driver raises."""
        try:
            return function()
        except FleetError:
            raise
        except Exception as error:
            text = f"robot '{self._name}': its driver failed in {call}(): {type(error).__name__}: {error}"
            if text != self._logged:
                # Once: it is called many times a second.
                log.exception("%s", text)
            self._logged = text
            raise RobotError(text) from error


def validate_observation(spec: RobotSpec, observation: Observation) -> Observation:
    """`observation` if its parts are of the kinds they should be, with the state as float32.

    Raises `InvalidDataError` naming the part. Shapes and numbers are for `robot_edge.control.observation_monitor` to
    check.
    """
    what = f"robot '{spec.embodiment}': read() gave"
    if not isinstance(observation, Observation):
        raise InvalidDataError(f"{what} {type(observation).__name__}, not an Observation.")
    if not isinstance(observation.time_ns, int | np.integer) or not isinstance(observation.task, str):
        raise InvalidDataError(
            f"{what} time_ns {observation.time_ns!r} and task {observation.task!r}; a whole number of ns and a text "
            "are expected."
        )
    state = observation.state
    if not isinstance(state, np.ndarray) or state.dtype.kind != "f":
        kind = state.dtype if isinstance(state, np.ndarray) else type(state).__name__
        raise InvalidDataError(f"{what} a state of {kind}; float32[{spec.state_dim}] is expected.")
    for camera, frame in observation.images.items():
        if not isinstance(frame, Frame) or not isinstance(frame.image, np.ndarray):
            raise InvalidDataError(f"{what} no Frame with an array as image for camera '{camera}'.")
    if state.dtype == np.float32 and isinstance(observation.time_ns, int):
        return observation
    return Observation(int(observation.time_ns), np.asarray(state, np.float32), observation.images, observation.task)


def validate_feedback(spec: RobotSpec, feedback: Feedback) -> Feedback:
    """`feedback` if it can be recorded, with its action as float32. Raises `InvalidDataError` naming what cannot."""
    if not isinstance(feedback, Feedback):
        raise InvalidDataError(f"robot '{spec.embodiment}': write() gave {type(feedback).__name__}, not a Feedback.")
    limit_numbers(spec, feedback.executed)
    reward = float(feedback.reward)
    if not math.isfinite(reward):
        raise InvalidDataError(f"robot '{spec.embodiment}': write() gave the reward {reward}.")
    return Feedback(np.asarray(feedback.executed, np.float32), reward, bool(feedback.success))
