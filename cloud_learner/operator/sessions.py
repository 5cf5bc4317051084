"""Who may move which robot: checks the commands of pages, rejects what must not be, queues the rest.

One operator per robot. An operator is one open page (one websocket). A page that holds robots must speak at least
every `heartbeat_s`; when it does not, or when it closes, its robots get `drop_link` and hold.
Used from the page's event loop only, so it needs no lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

from cloud_learner.operator.command_queue import VersionChange
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import DROPPED, WEB_OPERATOR, not_drivable
from hal.resource.lease import ESTOP, Priority
from wire.clock import Clock, MonotonicClock
from wire.errors import ProtocolError, RejectedError, suggest
from wire.identity.refusals import AddressLimit, RefusalReason
from wire.messages.fleet import VersionAction
from wire.messages.gateway import LAST_SEQUENCE, OperatorCommand
from wire.stop_state import new_stop_id
from wire.types import EPISODE_COMMANDS, Lease, OperatorCommandKind, RobotSpec

HEARTBEAT_S = 0.3
MAX_MESSAGE_BYTES = 16 * 1024
_WISHES, _WISH_S = 100, 0.05
"""of one page: so many at once, then one every so often, but for stops and what drives a robot"""
_LATEST_MS = 2**62 / 1e6
"""what still is a time in nanoseconds"""


class PageMessageKind(StrEnum):
    """What a page says: that it is alive, what it wants with versions, or one of some `OperatorCommandKind`s."""

    heartbeat = "heartbeat"
    versions = "versions"
    """anybody may"""
    take_over = "take_over"
    hand_back = "hand_back"
    command = "command"
    estop = "estop"
    """anybody may"""
    release_estop = "release_estop"
    start = "start"
    """after the last release"""
    success = "success"
    failure = "failure"
    end = "end"
    discard = "discard"
    rerecord = "rerecord"
    scene_ready = "scene_ready"
    recover = "recover"
    correct = "correct"


class PageMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a page."""

    type: PageMessageKind
    robot: str = ""
    """'' with `heartbeat`; with `versions` to pin, '' for all"""
    action: tuple[float, ...] = ()
    """with `command`: da numbers within the limits of the robot's spec, to hold until the next command"""
    sequence: Annotated[int, msgspec.Meta(ge=0, lt=LAST_SEQUENCE)] = 0
    """grows with every message for a robot; a command that comes twice moves nothing. The last number is the gateway's,
    which so takes the robot back whatever a page has sent"""
    captured_ms: float = 0.0
    """with `command` and `start`: when the person did it, by the gateway's clock as the page has measured it, never
    later than it was"""
    stop: str = ""
    """with `release_estop`: which stop"""
    change: VersionAction | None = None
    """with `versions`: what to do"""
    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """with `versions`: which version"""


class RobotNotClaimedError(RejectedError):
    """A command for a robot that this page does not hold, or no longer: a page may learn that a moment too late."""


class TooManyWishesError(RejectedError):
    """More than a person asks for."""


_decoder = msgspec.json.Decoder(PageMessage)


class OperatorSessions:
    """Holds the claims of all open pages on robots."""

    def __init__(
        self,
        view: FleetView,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Clock | None = None,
        stop: Callable[[OperatorCommand], None] | None = None,
    ) -> None:
        """`stop` sends a stop at once; without it stops wait with the other commands."""
        self._view = view
        self._stop = stop
        self._clock = clock or MonotonicClock()
        self._heartbeat_ns = round(heartbeat_s * 1e9)
        self._last_message_ns: dict[int, int] = {}
        self._holder: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._next = 1
        self._wishes = AddressLimit(_WISHES, _WISH_S, lambda: self._clock.now_ns() / 1e9)
        """by page, not by address"""
        self.refused: Counter[str] = Counter()
        """what pages sent in vain, by reason"""

    def now_ns(self) -> int:
        """By the gateway's clock, which pages stamp commands with."""
        return self._clock.now_ns()

    def join(self) -> int:
        """The number of a new operator."""
        operator, self._next = self._next, self._next + 1
        self._last_message_ns[operator] = self._clock.now_ns()
        return operator

    def leave(self, operator: int) -> list[str]:
        """The page of `operator` is gone: its robots are told to hold. Returns their names."""
        self._last_message_ns.pop(operator, None)
        return self._drop(operator)

    def expire(self) -> dict[int, list[str]]:
        """Drop the robots of every operator that holds some and has been silent too long; their names by operator."""
        now_ns = self._clock.now_ns()
        silent = {who for who in self._holder.values() if now_ns - self._last_message_ns[who] > self._heartbeat_ns}
        return {operator: self._drop(operator) for operator in sorted(silent)}

    def pop_rejections(self, operator: int) -> list[str]:
        """Why commands of `operator` were rejected after all, since the last call; its robots among them are let go.

        The gateway leases a robot to whoever takes it over, and somebody else may have been faster.
        """
        reasons = []
        for robot, reason in self._view.pop_rejections(_name(operator)):
            reasons.append(reason)
            if robot and self._holder.get(robot) == operator:
                del self._holder[robot]
        return reasons

    def control(self, operator: int | None = None) -> dict[str, str]:
        """By robot: you (held by `operator`), other (also without a page), or dropped (its operator vanished)."""
        found = {}
        for robot, lease in self._view.leases().items():
            if lease.holder.startswith(DROPPED):
                found[robot] = "dropped"
            elif _drives(lease):
                found[robot] = "other"
        found |= dict.fromkeys(self._dropped, "dropped")
        return found | {robot: "you" if who == operator else "other" for robot, who in self._holder.items()}

    def handle_message(self, operator: int, data: str | bytes) -> str:
        """Act on one message of a page. Returns a warning for that person, mostly ''.

        Raises `ProtocolError` for what is no message and `RejectedError` for what must not be done; nothing happened
        then.
        """
        try:
            return self._handle(operator, data)
        except ProtocolError as error:
            self.refused[error.reason] += 1
            raise
        except RejectedError as error:
            often = isinstance(error, TooManyWishesError)
            self.refused[RefusalReason.too_often if often else RefusalReason.rejected] += 1
            raise

    def _handle(self, operator: int, data: str | bytes) -> str:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is above the cap of {MAX_MESSAGE_BYTES}.")
        self._last_message_ns[operator] = self._clock.now_ns()
        try:
            message = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this page: {error}.") from error
        if message.type == PageMessageKind.heartbeat:
            return ""
        if message.type == PageMessageKind.versions:
            self._change_versions(operator, message)
            return ""
        if not message.robot:
            raise ProtocolError("not a message of this page: it names no robot.")
        self._check_known(message.robot)
        return self._act(operator, message)

    def _check_known(self, robot: str) -> None:
        robots = self._view.robots()
        if robot not in robots:
            name = robot[:64]
            raise RejectedError(f"There is no robot '{name}'.{suggest(name, robots)}")

    def _change_versions(self, operator: int, message: PageMessage) -> None:
        if message.change in (None, VersionAction.list):
            raise ProtocolError("not a message of this page: it does not say what to do with versions.")
        if not self._wishes.take(_name(operator)):
            raise TooManyWishesError(
                f"This page asks for too much at once, so '{message.change}' was not done. Wait a moment."
            )
        if message.robot and message.number:  # a pin may be taken from a robot that is gone
            self._check_known(message.robot)
        change = VersionChange(_name(operator), message.change, message.number, message.robot)
        if not self._view.submit_version_change(change):
            raise RejectedError(
                f"The gateway takes no commands now, so '{message.change}' was not done. See the gateway's log."
            )

    def _act(self, operator: int, message: PageMessage) -> str:
        robot, kind = message.robot, OperatorCommandKind(message.type)
        wish = kind not in (OperatorCommandKind.estop, OperatorCommandKind.command)
        if wish and not self._wishes.take(_name(operator)):
            raise TooManyWishesError(
                f"This page asks for too much at once, so {robot} did not get '{kind}'. Wait a moment."
            )
        holder = self._holder.get(robot)
        own = self._view.stops(robot).get(message.stop) == _name(operator)
        anybody = kind == OperatorCommandKind.estop or (kind == OperatorCommandKind.release_estop and own)
        if holder not in (None, operator) and not anybody:
            raise RejectedError(
                f"{robot} is driven from another page (operator {holder}). Wait until it is handed back."
            )
        if kind == OperatorCommandKind.take_over:
            self._check_take_over(robot)
        elif kind == OperatorCommandKind.command:
            if holder is None:
                raise RobotNotClaimedError(f"{robot} is not under your control. Take it over first.")
            spec = self._view.spec(robot)
            if spec is None:
                raise RejectedError(f"{robot} has not said what its actions mean. Wait until it is connected.")
            check_action(robot, spec, message.action)
        timed = kind == OperatorCommandKind.command or kind in EPISODE_COMMANDS
        if timed and not 0 < message.captured_ms < _LATEST_MS:
            raise ProtocolError(f"a {kind} for {robot} that does not say when it was made.")
        stop = new_stop_id(_name(operator)) if kind == OperatorCommandKind.estop else message.stop
        self._queue(operator, robot, kind, message, stop)
        if kind in (OperatorCommandKind.take_over, OperatorCommandKind.hand_back):
            self._dropped.discard(robot)
            self._holder.pop(robot, None)
        if kind == OperatorCommandKind.take_over:
            self._holder[robot] = operator
        if kind == OperatorCommandKind.estop and self._view.is_lost(robot):
            return f"{robot} has no link to the gateway: this stop may not reach it. Use the stop on the robot."
        return ""

    def _check_take_over(self, robot: str) -> None:
        if self._view.is_lost(robot):
            raise RejectedError(f"{robot} has no link to the gateway now. Wait until it is back, then take over.")
        lease = self._view.leases().get(robot)
        if lease is not None and _drives(lease):
            raise RejectedError(f"{robot} is held by '{lease.holder}' ({lease.purpose}). Wait until it is given back.")
        reason = not_drivable(self._view.spec(robot))
        if reason:
            raise RejectedError(f"{robot} cannot be driven from this page: {reason}.")

    def _drop(self, operator: int) -> list[str]:
        robots = sorted(robot for robot, who in self._holder.items() if who == operator)
        for robot in robots:
            del self._holder[robot]
            self._dropped.add(robot)
            self._queue(operator, robot, OperatorCommandKind.drop_link)
        return robots

    def _queue(
        self,
        operator: int,
        robot: str,
        kind: str,
        message: PageMessage | None = None,
        stop: str = "",
    ) -> None:
        command = OperatorCommand(robot, kind, operator=_name(operator), stop=stop)
        if message is not None:
            made_ns = round(1e6 * max(0.0, min(message.captured_ms, _LATEST_MS)))
            command = msgspec.structs.replace(
                command, action=message.action, sequence=message.sequence, captured_ns=made_ns
            )
        if kind == OperatorCommandKind.estop and self._stop is not None:
            self._stop(command)
        elif not self._view.submit_command(command):
            raise RejectedError(
                f"The gateway takes no commands now, so {robot} did not get '{kind}'. See the gateway's log."
            )


def _name(operator: int) -> str:
    return f"{WEB_OPERATOR}{operator}"


def _drives(lease: Lease) -> bool:
    """Whether somebody drives by this lease who is not at a page."""
    at_page = lease.holder.startswith((WEB_OPERATOR, DROPPED))
    return lease.priority >= Priority.operator and lease.purpose != ESTOP and not at_page


def check_action(robot: str, spec: RobotSpec, action: tuple[float, ...]) -> None:
    """Raise `RejectedError` unless `action` is da finite numbers within the limits of `spec`."""
    if len(action) != spec.action_dim:
        raise RejectedError(f"A command of {len(action)} numbers for {robot}, whose actions have {spec.action_dim}.")
    for value, dimension in zip(action, spec.action, strict=True):
        if not math.isfinite(value):
            raise RejectedError(
                f"A command for {robot} with '{dimension.name}' = {value}, which is no number to act on."
            )
        if not dimension.low <= value <= dimension.high:
            raise RejectedError(
                f"A command for {robot} with '{dimension.name}' = {value:g}, "
                f"outside [{dimension.low:g}, {dimension.high:g}] {dimension.unit}."
            )
