"""Stops what moves by the driver's own way, again and again until that is done: a thread of the host, for it may take
its time or fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hal.driver_host.priority import watching
from hal.safety.limited_robot import LimitedRobot

_AGAIN_S = 0.1


class MotionStopper:
    """`start` it, and `ask` for it from any thread, which does not wait.

    It is done when the driver took it and whatever call was under way then has ended: a reset may go on moving. Until
    then it is tried again ten times a second, as long as it is wanted.
    """

    def __init__(self, robot: LimitedRobot, wanted: Callable[[], bool]) -> None:
        """`wanted`: whether there still is a reason to."""
        self._robot, self._wanted = robot, wanted
        self._asked = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stop motion", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self) -> None:
        """Stop what moves, now."""
        self._asked.set()

    def close(self) -> None:
        """May be called without `start`, and twice."""
        self._closing = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        watching()
        robot, settled, taken, during = self._robot, True, False, 0
        while True:
            asked = self._asked.wait(None if settled else _AGAIN_S)
            if self._closing:
                return
            self._asked.clear()
            if not asked and ((taken and robot.under_way != during) or not self._wanted()):
                settled = True
                continue
            during = robot.under_way
            taken = robot.stop_motion()
            settled = not robot.stoppable or not (during if taken else robot.connected or during)
