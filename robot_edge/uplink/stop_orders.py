"""Stops, releases and starts on their way from people to the robot's host, past control."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

from hal.driver_host.stop_line import StopOrder
from wire.clock import Clock
from wire.errors import FleetError, RejectedError
from wire.messages.gateway import START_FRESH_S, OperatorCommand
from wire.stop_state import StopState
from wire.types import OperatorCommandKind

log = logging.getLogger(__name__)

_RETRY_NS = 100_000_000
_MOST_REFUSED = 32
_ONCE = ("start", "slow")
KINDS: dict[str, Literal["stop", "release", "start"]] = {
    OperatorCommandKind.estop: "stop",
    OperatorCommandKind.release_estop: "release",
    OperatorCommandKind.start: "start",
}
"""what a command is for the robot's host"""


class StopOrders:
    """Gives each order once, in the order they came; again only while the host does not answer.

    A start, or a speed limit, which may make the robot faster, is not given again: it would come later than the person
    meant it, perhaps after another stop.
    """

    def __init__(self, robot: str, give: Callable[[StopOrder], StopState], clock: Clock) -> None:
        """`give` raises a `FleetError` when the host does not answer."""
        self._robot, self._give, self.clock = robot, give, clock
        self._waiting: deque[StopOrder] = deque()
        self._next_ns = 0
        self._unheard = False
        self._answer: StopState | None = None
        self._started_ns = 0
        """when the newest start was made that was let through"""
        self._refused: deque[str] = deque(maxlen=_MOST_REFUSED)

    def take(self, command: OperatorCommand) -> bool:
        """Whether a person's command is a matter of stopping or slowing; then the host is told.

        Only who is `beside` the robot, on its computer, limits its speed: another could lift a limit by its name.
        """
        if command.kind == OperatorCommandKind.speed_limit:
            if command.beside and len(command.action) == 1:
                self.add(StopOrder("slow", who=command.operator, share=command.action[0]))
            else:
                log.error("robot '%s': a speed limit of %s is not for it.", self._robot, command.operator)
            return True
        kind = KINDS.get(command.kind)
        if kind is None:
            return False
        if kind == "start" and (why := self._refusal(command)):
            detail = f"{command.kind} of '{command.operator}': {why}"
            log.warning("robot '%s': %s", self._robot, detail)
            self._refused.append(detail)
            return True
        stop = command.stop or (command.operator if kind == "stop" else "")
        self.add(StopOrder(kind, stop, command.operator))
        return True

    def add(self, order: StopOrder) -> None:
        """Give it now, or as soon as the host answers."""
        if order.kind in _ONCE and self._waiting:
            log.error(
                "robot '%s': '%s' of %s is left out: its host does not answer.", self._robot, order.kind, order.who
            )
        elif order not in self._waiting:
            self._waiting.append(order)
        self.poll()

    def poll(self) -> None:
        """Give what waits, if it is time."""
        while self._waiting and self.clock.now_ns() >= self._next_ns:
            order = self._waiting[0]
            try:
                self._answer = self._give(order)
            except RejectedError as error:
                log.error("robot '%s' does not follow '%s' of %s: %s", self._robot, order.kind, order.who, error)
            except FleetError as error:
                if not self._unheard:
                    log.error("robot '%s' did not hear '%s' of %s: %s", self._robot, order.kind, order.who, error)
                self._unheard, self._next_ns = True, self.clock.now_ns() + _RETRY_NS
                if order.kind not in _ONCE:
                    return
            else:
                self._unheard = False
            self._waiting.popleft()

    def pop_refused(self) -> list[str]:
        """What was not given since the last call, and why. May be called by another thread."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def _refusal(self, command: OperatorCommand) -> str:
        """Why a person's start is not given, '' when it may be: one that is late, or has been here before."""
        if not command.captured_ns:
            return "it does not say when it was made."
        if abs(self.clock.now_ns() - command.captured_ns) > START_FRESH_S * 1e9:
            return f"it was not made in the last {START_FRESH_S:g} s. Look at the robot and start it again."
        if command.captured_ns <= self._started_ns:
            return "it, or one that was made after it, has been here before."
        self._started_ns = command.captured_ns
        return ""

    def pop_answer(self) -> StopState | None:
        """What the host answered last since the last call, None when it did not."""
        answer, self._answer = self._answer, None
        return answer
