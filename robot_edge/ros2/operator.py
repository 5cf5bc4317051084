"""The edge node as the operator beside its robot: hears the uplink, sends commands and sees whether they came true.

The other end is `robot_edge.uplink.server.Uplink`, and of a stop the robot's host; nothing here needs the gateway.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hal.driver_host.stop_line import ANSWER_S, StopOrder, send_order
from wire.errors import FleetError
from wire.messages.gateway import EdgeEvent, EdgeStatus, OperatorCommand
from wire.stop_state import StopState, new_stop_id
from wire.transport.channel import Channel
from wire.types import OperatorCommandKind

log = logging.getLogger(__name__)

WHO = "ros"
"""who stops a robot through its node"""
_LOOK_S = 0.02
_EVENTS = 100


class Ros2Operator:
    """May be used by several threads. `channel` is closed with it."""

    def __init__(
        self, robot: str, channel: Channel, now_s: Callable[[], float] = time.monotonic, host: Path | None = None
    ) -> None:
        """`host`: where the robot's host listens, which is stopped without the uplink."""
        self.robot = robot
        self.status: EdgeStatus | None = None
        self._channel = channel
        self._now_s = now_s
        self._host = host
        self._since_s = now_s()
        self._events: deque[EdgeEvent] = deque(maxlen=_EVENTS)
        self._lock = threading.Lock()
        self._closed = False
        self._made: set[str] = set()
        """stops that were sent and perhaps not seen yet"""
        self._answer: StopState | None = None
        """of the host to a stop; None once a status is newer"""

    def poll(self) -> None:
        """Take in what has come."""
        with self._lock:
            while not self._closed and (message := self._channel.recv()) is not None:
                if isinstance(message, EdgeStatus):
                    self.status, self._since_s, self._answer = message, self._now_s(), None
                elif isinstance(message, EdgeEvent):
                    self._events.append(message)

    @property
    def age_s(self) -> float:
        """Seconds since the newest status, or since this object was made when there is none."""
        return self._now_s() - self._since_s

    def events(self) -> list[EdgeEvent]:
        """What happened since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    @property
    def stop_state(self) -> StopState:
        """Who stops the robot, as it said last."""
        if (answer := self._answer) is not None:
            return answer
        return self.status.stop if self.status is not None else StopState()

    def stop(self, timeout_s: float) -> str:
        """Stop the robot; '' when its host or its status says so, else what went wrong."""
        stop = new_stop_id(WHO)
        with self._lock:
            self._made.add(stop)
        taken = self._stop_at_host(stop)
        # By the other way only if need be, and as the same stop: a copy may be late and come after the release.
        left = () if taken else (stop,)
        problem = self.command("estop", lambda status: stop in status.stop.stops, timeout_s, left)
        return "" if taken else problem

    def _stop_at_host(self, stop: str) -> bool:
        """Whether the host says that it is stopped."""
        if self._host is None:
            return False
        try:
            answer = send_order(self._host, StopOrder("stop", stop, WHO), ANSWER_S)
        except FleetError as error:
            log.warning("robot '%s': its uplink is told to stop it, for %s", self.robot, error)
            return False
        with self._lock:
            self._answer = answer
        # By its name, or among those beyond what is remembered by name.
        return bool(answer.stops)

    def release(self, timeout_s: float) -> str:
        """Take back every stop that was made here, by a node before this one too; '' or what went wrong."""
        self.poll()
        shown = self.stop_state
        with self._lock:
            own, self._made = {stop for stop, who in shown.stops.items() if who == WHO} | self._made, set()
        if not own and shown.stops:
            return f"robot '{self.robot}' is {shown}; none of that was made through ROS: release it where it was made."
        if not own:
            return ""
        problem = self.command(
            "release_estop", lambda status: not own & status.stop.stops.keys(), timeout_s, tuple(own)
        )
        if problem:
            with self._lock:
                self._made |= own
        return problem

    def start(self, timeout_s: float) -> str:
        """Let a robot that was stopped and released move again; '' or what went wrong."""
        self.poll()
        if self.stop_state.stops:
            return f"robot '{self.robot}' is {self.stop_state}; release that first."
        return self.command("start", lambda status: status.stop.free, timeout_s, (self.stop_state.last,))

    def limit_speed(self, share: float, timeout_s: float) -> str:
        """Have the robot move at most at `share` of its velocity limits; '' or what went wrong."""
        return self.command(
            OperatorCommandKind.speed_limit,
            lambda status: status.stop.speed_limits.get(WHO, 1.0) == share,
            timeout_s,
            action=(share,),
        )

    def command(
        self,
        kind: str,
        came_true: Callable[[EdgeStatus], bool],
        timeout_s: float,
        stops: tuple[str, ...] = ("",),
        action: tuple[float, ...] = (),
    ) -> str:
        """Send a command, one for each of `stops`, and wait until a newer status shows that it `came_true`; '' then,
        else what went wrong.
        """
        deadline_s = self._now_s() + timeout_s
        before = self.status
        left = list(stops)
        while self._now_s() < deadline_s:
            while left and self._send(self._stamped(kind, left[0], action)):
                left.pop(0)
            sent = not left
            self.poll()
            if sent and self.status is not None and self.status is not before and came_true(self.status):
                return ""
            time.sleep(_LOOK_S)
        if left:
            return f"robot '{self.robot}': its uplink process does not listen; is the edge running?"
        return f"robot '{self.robot}': '{kind}' was sent, but control did not confirm it within {timeout_s:.1f} s"

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._channel.close()

    def _stamped(self, kind: str, stop: str, action: tuple[float, ...] = ()) -> OperatorCommand:
        """On one computer with the robot: their clocks are one."""
        now_ns = time.monotonic_ns()
        return OperatorCommand(self.robot, kind, action, now_ns, WHO, stop, now_ns, now_ns)

    def _send(self, command: OperatorCommand) -> bool:
        with self._lock:
            return not self._closed and self._channel.send(command)
