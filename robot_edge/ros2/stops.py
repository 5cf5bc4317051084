"""Stops that are asked of the edge node while it has no operator: before its edge runs, in transitions, after it.

    an edge runs ──► its robot's host, as soon as that answers
    none does    ──► the file with which the next host begins; before the node is configured they wait here

So the robot begins stopped, and what was released meanwhile still needs a start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hal.driver_host.stop_line import ANSWER_S, StopOrder, send_order
from hal.safety.stop_latch import StopLatch
from robot_edge.ros2.operator import WHO
from robot_edge.runtime.robot_host import HOST, STOP_FILE
from wire.errors import FleetError, RobotError, storage_errors
from wire.stop_state import StopState, new_stop_id

_LOOK_S = 0.02


class NodeStops:
    """May be used by several threads; `settle` now and then."""

    def __init__(self, edge: Callable[[], Path | None], home: Callable[[], Path | None]) -> None:
        """`edge`: where the running edge's channels lie, None while none runs; `home`: the robot's own directory, None
        while nobody knows it.
        """
        self._edge, self._home = edge, home
        self._waiting: deque[StopOrder] = deque()
        self._lock = threading.Lock()
        self._problem = ""
        self.shown = StopState()
        """who stops the robot, as was seen last; what waits is not among it"""

    def stop(self, timeout_s: float) -> str:
        """Stop the robot; '' when its host knows or none runs, else what went wrong: it is tried again then."""
        return self._give([StopOrder("stop", new_stop_id(WHO), WHO)], timeout_s)

    def release(self, timeout_s: float) -> str:
        """Take back every stop that was made through ROS; '' or what went wrong. A start is needed then."""
        with self._lock:
            own = [order.stop for order in self._waiting if order.kind == "stop"]
        try:
            self.shown = self._ask()
        except RobotError as error:
            return str(error)
        own += [stop for stop, who in self.shown.stops.items() if who == WHO and stop not in own]
        if not own and self.shown.stops:
            return f"the robot is {self.shown}; none of that was made through ROS: release it where it was made."
        return self._give([StopOrder("release", stop, WHO) for stop in own], timeout_s)

    @property
    def waits(self) -> bool:
        """Whether something was asked that nobody could be told yet."""
        return bool(self._waiting)

    def settle(self) -> None:
        """Pass on what waits, in this order, to who can be told."""
        with self._lock:
            while self._waiting:
                try:
                    if not self._pass_on(self._waiting[0]):
                        return
                except FleetError as error:
                    self._problem = str(error)
                    return
                self._waiting.popleft()

    def _give(self, orders: list[StopOrder], timeout_s: float) -> str:
        with self._lock:
            self._waiting.extend(orders)
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._problem = ""
            self.settle()
            if not (self._problem and self._waiting):
                return ""
            if time.monotonic() >= deadline_s:
                return f"it is tried again until it is heard: {self._problem}"
            time.sleep(_LOOK_S)

    def _ask(self) -> StopState:
        edge, home = self._edge(), self._home()
        if edge is not None:
            return send_order(edge / HOST, StopOrder("ask"), ANSWER_S)
        return StopState() if home is None else StopLatch(home / STOP_FILE).state

    def _pass_on(self, order: StopOrder) -> bool:
        """Whether it is known where it counts. Raises `RobotError` when it ought to be and is not."""
        if (edge := self._edge()) is not None:
            self.shown = send_order(edge / HOST, order, ANSWER_S)
            return True
        if (home := self._home()) is None:
            return False
        file = home / STOP_FILE
        with storage_errors("noting a stop", file):
            home.mkdir(parents=True, exist_ok=True)
        latch = StopLatch(file)
        if order.kind == "stop":
            latch.stop(order.stop, WHO)
        else:
            latch.release(order.stop)
        latch.save()
        if StopLatch(file).state != latch.state:
            raise RobotError(f"'{order.kind}' could not be noted in {file}.")
        self.shown = latch.state
        # A host that has begun meanwhile may have read the file before.
        return self._edge() is None
