"""Stops a robot whose driver does not come back: a thread of the host that no call of the driver keeps from it."""

from __future__ import annotations

import logging
import threading

from hal.driver_host.motion_stopper import MotionStopper
from hal.driver_host.priority import watching
from hal.driver_host.watchdog import CallDeadline
from hal.driver_host.watched_robot import WatchedRobot

log = logging.getLogger(__name__)

_LATE_TICKS = 2
_LATE_S = 0.05
"""but no less: a machine that is busy keeps a thread waiting so long, and no driver is stuck then"""
_POLL_S = 0.1


class StuckDriverWatch:
    """`start` it, and the driver's own `stop_motion` is called when hold has been due for two periods and not begun.

    That is four periods after the last command, at high rates a little more. A driver that has no such way is cut off
    by `CallDeadline`. So is one that holds the interpreter, which keeps this thread from running: soon, where this
    thread would have stopped the robot or the robot moves on by itself.
    """

    def __init__(self, watched: WatchedRobot, deadline: CallDeadline) -> None:
        self._watched, self._deadline = watched, deadline
        self._stuck = False
        self.stopper = MotionStopper(watched.robot, lambda: self._stuck or not watched.robot.stop_state().free)
        """also for whoever else stops it"""
        self._late_s = max(_LATE_S, _LATE_TICKS * watched.robot.spec.period_ns / 1e9)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stuck-driver", daemon=True)

    def start(self) -> None:
        self._deadline.guard_interpreter(self._deadline.coasting_s if self._watched.robot.stoppable else 0.0)
        self.stopper.start()
        self._thread.start()

    def close(self) -> None:
        """May be called without `start`, and twice."""
        # While somebody sees to the deadline.
        self.stopper.close()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        watching()
        robot = self._watched.robot
        while not self._over.wait(min(_POLL_S, self._late_s / 2)):
            self._deadline.guard()
            late_s = self._watched.overdue_s()
            if late_s < self._late_s:
                self._stuck = False
            elif not self._stuck:
                self._stuck = True
                self.stopper.ask()
                how = "it is stopped by its own way" if robot.stoppable else "it has no way of its own to be stopped"
                log.error(
                    "robot '%s': its driver blocks, hold has been due for %.0f ms; %s.",
                    robot.spec.embodiment,
                    late_s * 1e3,
                    how,
                )
