"""The robot as the loop uses it: whatever its driver raises or reports becomes a named hold, never the loop's end.

    read and write  ──fail for a while──►  given up: closed, and after a pause ──► connect ──► reset ──► read ...
                                            (1 s, twice as long each time, 30 s at most)

A fault is over when the robot has been read again. People hear of it once, however often the driver is tried.

What was read is acted on only if it is alive, fresh and valid. The first check that finds something wrong gives the
reason to hold; what was wrong must be right for some ticks in a row before the robot moves again.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hal.interfaces.robot import Feedback, HoldingRobot, request_previews, validate_feedback, validate_observation
from hal.safety.limits import SafetyLimits
from policies.interface.policy import check_observation
from robot_edge.control.config import ObservationLimits, RobotTimeouts
from robot_edge.control.mode import NO_HOLD, Hold, HoldReason
from robot_edge.control.observation_checks import ObservationMonitor
from robot_edge.control.rest_motion import RestMotion
from wire.clock import Clock
from wire.errors import (
    CameraLostError,
    ConfigError,
    FleetError,
    InvalidDataError,
    RobotDisconnectedError,
    RobotError,
    RobotMovingError,
    RobotStoppedError,
)
from wire.messages.gateway import START_FRESH_S, OperatorCommand
from wire.stop_state import StopState
from wire.types import Observation, OperatorCommandKind

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ASK_NS = 500_000_000
"""between two looks at who stops a robot that waits to be tried again"""


class GuardedRobot:
    """One robot."""

    def __init__(
        self,
        name: str,
        robot: HoldingRobot,
        timeouts: RobotTimeouts,
        limits: ObservationLimits,
        clock: Clock,
        notify: Callable[[str, str], None],
        safety: SafetyLimits | None = None,
    ) -> None:
        """A `robot` that is connected already; `start_disconnected` otherwise. `notify(kind, detail)`: for people.

        `safety`: its limits, which say what measures it on its way to a rest pose.
        """
        self.connected = True
        self.fault = NO_HOLD
        """why it cannot be used now, or what was wrong when it was commanded last"""
        self.observation_fault = NO_HOLD
        """why it must not move on what was read last"""
        self.refused_commands = 0
        """in a row"""
        self.stop_state = StopState()
        """who stops or slows it, as it said last"""
        self._unheard_stop = False
        self.executed = np.zeros(robot.spec.action_dim, np.float32)
        self.still = True
        """what it did with its last command, whoever gave it, as it said, and whether it stands"""
        self.rest_motion: RestMotion | None = None
        """while it moves to its rest pose"""
        self._name = name
        self._robot = robot
        self._expect_read: Callable[[int], None] | None = getattr(robot, "expect_read", None)
        self._timeouts = timeouts
        self._monitor = ObservationMonitor(robot.spec, limits, notify)
        self._clock = clock
        self._notify = notify
        self._safety = safety
        self._notified = False
        """people know of the fault"""
        self._must_take_command = False
        """the fault is over only when a command is taken"""
        self._logged = ""
        """the error whose traceback is in the log"""
        self._previews = False
        self._failures = 0
        self._due_ns = self._asked_ns = 0
        self._bad_since_ns = -1

    def start_disconnected(self) -> None:
        """Nobody has connected it yet: the next `ensure_connected` does."""
        self.connected, self.fault = False, Hold(HoldReason.no_robot)

    def ensure_connected(self) -> bool:
        """Whether it can be used; connects it when that is due, which may take its time."""
        now_ns = self._clock.now_ns()
        if self._due_ns and now_ns < self._due_ns:
            if now_ns - self._asked_ns > _ASK_NS:
                self._asked_ns = now_ns
                self.poll_stop()
            return False
        self._due_ns = 0
        if self.connected:
            return True
        try:
            self._call("connect", self._robot.connect)
        except RobotStoppedError:
            self.poll_stop()
            return False
        except FleetError as error:
            self.disconnect(HoldReason.no_robot, f"it cannot be connected: {error}")
            return False
        self.connected = True
        return True

    def reset(self, task: str, seed: int, *, move: bool) -> bool | None:
        """Whether the robot stands at the start of `task`; None when that takes more ticks: call it again in the next.

        It may have to come to hold before, be started, or see again, and to move to its rest pose after, unless it is
        not to `move` by itself.
        """
        try:
            if self.rest_motion is not None:
                return self._move_to_rest(self.rest_motion, move)
            pose = self._call("reset", lambda: self._robot.reset(task, seed))
            self._bad_since_ns, self.refused_commands = -1, 0
            self._monitor.reset()
            if pose is not None and move:
                seen = self.read()
                # It moves by what is read next, which must be judged by what came before.
                self._monitor.check(seen, self._clock.now_ns())
                self.rest_motion = RestMotion(self._robot.spec, pose, seen.state, self._safety)
                return None
        except RobotStoppedError:
            self.poll_stop()
            return None
        except RobotMovingError:
            self.write(None)
            return None
        except CameraLostError as error:
            # Closing an arm may take its torque: no cable of a camera is worth that.
            self.disconnect(HoldReason.stale_camera, f"it cannot be reset to '{task}': {error}", keep=True)
            return None
        except FleetError as error:
            self.disconnect(
                HoldReason.no_reset, f"it cannot be reset to '{task}': {error}", keep=isinstance(error, ConfigError)
            )
            return False
        return True

    def _move_to_rest(self, motion: RestMotion, move: bool) -> bool | None:
        """One tick of it. A robot that does not get there holds, and is reset anew after a pause."""
        if not move:
            self.rest_motion = None
            return True
        action = None
        if (seen := self.observe()) is not None and not self.observation_fault:
            try:
                action = motion.next_action(seen.state)
            except RobotError as error:
                # Closing an arm may take its torque, here in mid-air.
                self.disconnect(HoldReason.no_reset, str(error), keep=True)
                return None
            if action is None:
                self.rest_motion = None
                self._monitor.reset()
                return True
        if (feedback := self.write(action)) is not None:
            commanded = action is not None and self.stop_state.free
            motion.on_executed(feedback.executed, self.stop_state.speed_limit if commanded else 0.0)
        return None

    def observe(self) -> Observation | None:
        """The newest observation, None without a valid one; `observation_fault` says whether it may be acted on."""
        try:
            observation = self.read()
        except (InvalidDataError, RobotError) as error:
            self.observation_fault = self._monitor.report_failure(str(error))
            self._on_read_failure(error)
            return None
        self.observation_fault = self._monitor.check(observation, self._clock.now_ns())
        self._on_valid_read()
        return observation

    def read(self) -> Observation:
        """The newest observation, valid. Raises `RobotError` or `InvalidDataError` for whatever went wrong."""
        return self._call("read", self._read)

    def _read(self) -> Observation:
        observation = validate_observation(self._robot.spec, self._robot.read())
        check_observation(self._robot.spec, observation)
        return observation

    def request_previews(self, wanted: bool) -> None:
        """Pass it on if the robot has larger pictures; one that fails at it goes on without."""
        if wanted == self._previews:
            return
        self._previews = wanted
        try:
            self._call("request_previews", lambda: request_previews(self._robot, wanted))
        except FleetError as error:
            log.warning("robot '%s': no larger pictures: %s", self._name, error)

    def write(self, action: np.ndarray | None, next_read_ns: int = 0) -> Feedback | None:
        """What came of `action`, float32[da], or of holding it; None when it was not taken. After too many of those it
        is given up.

        `next_read_ns`: when it will be read next, for a robot that gets ready for it (by a method `expect_read`, as
        `hal.driver_host.proxy` has); 0 when nobody knows.
        """

        def write() -> Feedback:
            if self._expect_read is not None and next_read_ns:
                self._expect_read(next_read_ns)
            return validate_feedback(
                self._robot.spec, self._robot.hold() if action is None else self._robot.write(action)
            )

        try:
            feedback = self._call("write", write)
        except FleetError as error:
            self.refused_commands += 1
            # That it can be read again will not prove that it can be commanded.
            self._must_take_command = True
            self._set_fault(HoldReason.safety, f"the robot does not take a command: {error}")
            if isinstance(error, RobotDisconnectedError):
                self.disconnect(HoldReason.no_robot, str(error))
            elif self.refused_commands > self._timeouts.refusals:
                self.disconnect(HoldReason.no_robot, f"it took none of {self.refused_commands} commands: {error}")
            return None
        self.stop_state = feedback.stop or StopState()
        self.executed, self.still = feedback.executed, feedback.still
        if self._must_take_command:
            self.refused_commands, self._must_take_command, self._failures = 0, False, 0
            self._clear_fault("the robot takes commands again.")
        return feedback

    def poll_stop(self) -> None:
        """Ask who stops or slows it; what is known stays when it does not answer."""
        with contextlib.suppress(FleetError):
            self.stop_state = self._call("stop_state", self._robot.stop_state)

    @property
    def stopped(self) -> bool:
        """Whether somebody stops it, also if it has not heard of it yet."""
        return self._unheard_stop or bool(self.stop_state.stops)

    @property
    def stop_conditions(self) -> dict[str, Any]:
        """Who stops it, as `ControlConditions` has it."""
        return {"estop": self.stopped, "ready": self.stop_state.ready}

    def give_orders(self, orders: deque[OperatorCommand]) -> None:
        """Pass on what people said of stopping and starting it, in this order; what it does not hear stays there."""
        while orders and self._give_order(orders[0]):
            orders.popleft()
        self._unheard_stop = any(order.kind == OperatorCommandKind.estop for order in orders)

    def _give_order(self, command: OperatorCommand) -> bool:
        robot, by = self._robot, command.operator
        late_s = (self._clock.now_ns() - command.captured_ns) / 1e9 if command.captured_ns else 0.0
        if command.kind == OperatorCommandKind.start and late_s > START_FRESH_S:
            log.warning("robot '%s': a start of '%s' is %.1f s old; nothing comes of it.", self._name, by, late_s)
            return True
        try:
            match command.kind:
                case OperatorCommandKind.estop:
                    self.stop_state = self._call("stop", lambda: robot.stop(command.stop or by, by))
                case OperatorCommandKind.release_estop:
                    self.stop_state = self._call("release", lambda: robot.release(command.stop))
                case OperatorCommandKind.start:
                    self.stop_state = self._call("start", lambda: robot.start(command.stop))
        except FleetError as error:
            self._set_fault(HoldReason.no_robot, f"it did not hear '{command.kind}': {error}")
            return False
        return True

    def look_at_rest(self, *, status_due: bool, scene: bool) -> None:
        """No episode runs and none begins: a reset under way is void. See `check_at_rest`, now and then."""
        self.rest_motion = None
        if status_due:
            self.check_at_rest(scene=scene)
        if status_due or not self.stop_state.free:
            self.poll_stop()

    def check_at_rest(self, *, scene: bool) -> None:
        """At rest, now and then: note what is wrong with the robot.

        Without a `scene`, which a reset makes, a robot need not answer: being connected is all that it can prove.
        """
        self._must_take_command = False
        self.observation_fault = NO_HOLD
        if not scene:
            self._clear_fault("the robot is connected again.")
            return
        try:
            self.read()
        except (InvalidDataError, RobotError) as error:
            self.observation_fault = Hold(HoldReason.bad_observation, str(error))
            self._on_read_failure(error)
        else:
            self._on_valid_read()

    def disconnect(self, reason: HoldReason, error: str, *, keep: bool = False) -> None:
        """Give it up and try again after a pause, from the reset on; `keep`: the connection stays."""
        self.rest_motion = None
        timeouts = self._timeouts
        pause_s = min(timeouts.longest_pause_s, timeouts.first_pause_s * 2 ** min(self._failures, 30))
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

    def _on_read_failure(self, error: FleetError) -> None:
        """No valid observation came. After a while of that, and at once when the driver is gone, it is given up."""
        now_ns = self._clock.now_ns()
        if self._bad_since_ns < 0:
            self._bad_since_ns = now_ns
        gone = isinstance(error, RobotDisconnectedError)
        if gone or now_ns - self._bad_since_ns > self._timeouts.give_up_s * 1e9:
            self.disconnect(HoldReason.no_robot, str(error))

    def _on_valid_read(self) -> None:
        self._bad_since_ns = -1
        if not self._must_take_command:
            self._failures = 0
            self._clear_fault("the robot answers again.")

    def _set_fault(self, reason: HoldReason, text: str) -> None:
        self.fault = Hold(reason, text)
        if not self._notified:
            self._notified = True
            self._notify_unless_known("hold", text)

    def _clear_fault(self, text: str) -> None:
        self.fault = NO_HOLD
        if self._notified:
            self._notified = False
            self._notify_unless_known("recovered", text)

    def _notify_unless_known(self, kind: str, text: str) -> None:
        # While a hold of the monitor lasts, people know already, and will hear of its end.
        if not self._monitor.issue:
            self._notify(kind, text)

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
