"""A robot that is held when no command comes in time, and stopped whatever is commanded."""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from hal.driver_host.protocol import error_text
from hal.driver_host.watchdog import CommandWatchdog
from hal.interfaces.robot import Feedback, RestPose
from hal.safety.limited_robot import LimitedRobot
from wire.clock import Clock, MonotonicClock

log = logging.getLogger(__name__)

_COME_TO_HOLD_NS = 2_000_000_000
"""at most, before its driver is closed"""


class WatchedRobot:
    """`poll` it as often as `left_s` says. Not for several threads at once."""

    def __init__(self, robot: LimitedRobot, clock: Clock | None = None) -> None:
        self.robot = robot
        self.fault = ""
        """why the last hold did not succeed"""
        self._clock = clock or MonotonicClock()
        self._watchdog = CommandWatchdog(robot.spec.period_ns)
        self._held_ticks = 0
        self._begun_ns = 0
        """when the command began that the driver is at, 0 for none"""
        self._what = f"robot '{robot.spec.embodiment}'"

    @property
    def commanded(self) -> bool:
        """Whether it was commanded anything in this scene, so that it may move."""
        return self.robot.executed is not None

    def end_scene(self) -> None:
        """The robot is reset or closed: it stands, and is not commanded."""
        self._watchdog.pause()
        self._held_ticks, self.fault = 0, ""

    def reset(self, task: str, seed: int) -> RestPose | None:
        """As `LimitedRobot.reset`. One that is not reset, because it moves or is stopped, is watched as before."""
        self.robot.require_at_rest()
        self.end_scene()
        return self.robot.reset(task, seed)

    def execute(self, action: np.ndarray | None, sent_ns: int) -> Feedback:
        """What came of `action`, float32[da], or None to hold, that control sent at `sent_ns`. Raises what the driver
        raises.

        While somebody stops the robot it is braked by `poll` alone, once in a period: nothing is executed here.
        """
        robot = self.robot
        stop = robot.stop_state()
        if stop.stops and robot.executed is not None:
            return Feedback(robot.executed, still=robot.still, held_ticks=self._held_ticks, stop=stop)
        late_ns = self._clock.now_ns() - sent_ns
        if late_ns > self._watchdog.timeout_ns:
            # It waited behind a driver that blocked: what was right then may be wrong now.
            log.warning("%s: a command is %.0f ms old and is not executed; it holds.", self._what, late_ns / 1e6)
            self._held_ticks, action = self._held_ticks + 1, None
        self._begun_ns = self._clock.now_ns()
        try:
            done = robot.hold() if action is None else robot.write(action)
        finally:
            self._begun_ns = 0
        self._watchdog.on_command(self._clock.now_ns())
        if self._held_ticks:
            log.info("%s: commanded again after %d periods of hold.", self._what, self._held_ticks)
        held_ticks, self._held_ticks = self._held_ticks, 0
        return msgspec.structs.replace(done, held_ticks=held_ticks)

    def on_stop(self) -> None:
        """Somebody stops it: hold is due now."""
        self._watchdog.on_stop(self._clock.now_ns())

    def on_disconnect(self) -> None:
        """Control is gone."""
        self._watchdog.on_disconnect(self._clock.now_ns())

    def left_s(self) -> float:
        """Until hold is due: 0 when it is now, infinite when it is not to come."""
        return self._watchdog.left_s(self._clock.now_ns())

    def overdue_s(self) -> float:
        """For how long hold has been due, 0 when it is not: for another thread, which so sees that this one is stuck.

        Before the first command of a scene has come back nothing is due, and that one may be what blocks.
        """
        now_ns, begun_ns = self._clock.now_ns(), self._begun_ns
        stuck_s = (now_ns - begun_ns - self._watchdog.timeout_ns) / 1e9 if begun_ns else 0.0
        return max(self._watchdog.overdue_s(now_ns), stuck_s)

    def poll(self, why: str) -> None:
        """Hold if that is due; `why` no command came."""
        if self.left_s() == 0:
            self.hold(why)

    def hold(self, why: str) -> None:
        """Hold it now. Whatever a driver raises is noted as `fault`: the next period must come."""
        if self._held_ticks == 0:
            log.info(
                "%s: %s; its host commands hold.", self._what, "it is stopped" if self.robot.stop_state().stops else why
            )
        self._held_ticks += 1
        try:
            self.robot.hold()
            self.fault = ""
        except BaseException as error:  # noqa: BLE001 - see above
            fault = f"{type(error).__name__}: {error_text(error)}"
            if fault != self.fault:
                log.error("%s cannot be held: %s", self._what, fault)
            self.fault = fault
        self._watchdog.on_hold(self._clock.now_ns())

    def come_to_hold(self, why: str) -> None:
        """Hold it until it stands, before it is closed: by its limits, or by a stop that comes meanwhile; no longer
        than its driver takes commands. `why` no command comes.
        """
        if not self.commanded:
            return
        deadline_ns = self._clock.now_ns() + _COME_TO_HOLD_NS
        self.on_stop()
        self.hold(why)
        while not (self.robot.still or self.fault) and (now_ns := self._clock.now_ns()) < deadline_ns:
            self._clock.sleep_until(now_ns + round(1e9 * min(self.robot.spec.period_ns / 1e9, self.left_s())))
            self.poll(why)
