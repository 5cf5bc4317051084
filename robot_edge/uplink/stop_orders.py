"""Stops, releases and starts on their way from people to the robot's host, past control."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

from hal.driver_host.stop_line import StopOrder
from wire.clock import Clock
from wire.errors import FleetError
from wire.messages.gateway import OperatorCommand
from wire.stop_state import StopState
from wire.types import OperatorCommandKind

log = logging.getLogger(__name__)

_RETRY_NS = 100_000_000
_KINDS: dict[str, Literal["stop", "release", "start"]] = {
    OperatorCommandKind.estop: "stop",
    OperatorCommandKind.release_estop: "release",
    OperatorCommandKind.start: "start",
}


class StopOrders:
    """Gives each order once, in the order they came; again only while the host does not answer.

    A start is not given again: it would come later than the person meant it, perhaps after another stop.
    """

    def __init__(self, robot: str, give: Callable[[StopOrder], StopState], clock: Clock) -> None:
        """`give` raises a `FleetError` when the host does not answer."""
        self._robot, self._give, self._clock = robot, give, clock
        self._waiting: deque[StopOrder] = deque()
        self._next_ns = 0
        self._unheard = False

    def take(self, command: OperatorCommand) -> bool:
        """Whether a person's command is a matter of stopping; then the host is told."""
        kind = _KINDS.get(command.kind)
        if kind is None:
            return False
        stop = command.stop or (command.operator if kind == "stop" else "")
        self.add(StopOrder(kind, stop, command.operator))
        return True

    def add(self, order: StopOrder) -> None:
        """Give it now, or as soon as the host answers."""
        if order.kind == "start" and self._waiting:
            log.error("robot '%s': the start of %s is left out: its host does not answer.", self._robot, order.who)
        elif order not in self._waiting:
            self._waiting.append(order)
        self.poll()

    def poll(self) -> None:
        """Give what waits, if it is time."""
        while self._waiting and self._clock.now_ns() >= self._next_ns:
            order = self._waiting[0]
            try:
                self._give(order)
            except FleetError as error:
                if not self._unheard:
                    log.error("robot '%s' did not hear '%s' of %s: %s", self._robot, order.kind, order.who, error)
                self._unheard, self._next_ns = True, self._clock.now_ns() + _RETRY_NS
                if order.kind != "start":
                    return
            else:
                self._unheard = False
            self._waiting.popleft()
