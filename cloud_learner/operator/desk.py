"""Who may move which robot: takes the wishes of people, refuses what must not be, queues the rest.

One operator per robot. An operator is one open page (one websocket). A page that holds robots must speak at least
every `heartbeat_s`; when it does not, or when it closes, its robots get `drop_link` and hold.
Used from the page's event loop only, so it needs no lock.
"""

from __future__ import annotations

import math

import msgspec

from cloud_learner.operator.view import FleetView, not_drivable
from wire.clock import Clock, MonotonicClock
from wire.errors import ProtocolError, Refused, nearest
from wire.messages import Operator
from wire.types import RobotSpec

HEARTBEAT_S = 0.3
MAX_MESSAGE_BYTES = 16 * 1024


class _Wish(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class TakeOver(_Wish, frozen=True, tag="take_over"):
    """Drive this robot from now on."""

    robot: str


class HandBack(_Wish, frozen=True, tag="hand_back"):
    """Let the policy go on with this robot."""

    robot: str


class Command(_Wish, frozen=True, tag="command"):
    """The action to hold until the next command."""

    robot: str
    action: tuple[float, ...]
    """da numbers within the limits of the robot's spec"""
    sequence: int = 0


class EStop(_Wish, frozen=True, tag="estop"):
    """Stop this robot now. Anybody may."""

    robot: str


class ReleaseEStop(_Wish, frozen=True, tag="release_estop"):
    """Let this robot move again."""

    robot: str


class Beat(_Wish, frozen=True, tag="heartbeat"):
    """The page is alive."""


class NotHeld(Refused):
    """A command for a robot that this page does not hold, or no longer: a page may learn that a moment too late."""


_decoder = msgspec.json.Decoder(TakeOver | HandBack | Command | EStop | ReleaseEStop | Beat)


class Desk:
    """Holds the claims of all open pages on robots."""

    def __init__(self, view: FleetView, *, heartbeat_s: float = HEARTBEAT_S, clock: Clock | None = None) -> None:
        self._view = view
        self._clock = clock or MonotonicClock()
        self._heartbeat_ns = round(heartbeat_s * 1e9)
        self._heard_ns: dict[int, int] = {}
        self._holder: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._next = 1

    def join(self) -> int:
        """The number of a new operator."""
        operator, self._next = self._next, self._next + 1
        self._heard_ns[operator] = self._clock.now_ns()
        return operator

    def leave(self, operator: int) -> list[str]:
        """The page of `operator` is gone: its robots are told to hold. Returns their names."""
        self._heard_ns.pop(operator, None)
        return self._drop(operator)

    def expire(self) -> dict[int, list[str]]:
        """Drop the robots of every operator that holds some and has been silent too long; their names by operator."""
        now_ns = self._clock.now_ns()
        silent = {who for who in self._holder.values() if now_ns - self._heard_ns[who] > self._heartbeat_ns}
        return {operator: self._drop(operator) for operator in sorted(silent)}

    def control(self, operator: int | None = None) -> dict[str, str]:
        """By robot: you (held by `operator`), other, or dropped (its operator vanished; it waits in a hold)."""
        held = {robot: "you" if who == operator else "other" for robot, who in self._holder.items()}
        return dict.fromkeys(self._dropped, "dropped") | held

    def hear(self, operator: int, data: str | bytes) -> str:
        """Act on one message of a page. Returns a warning for that person, mostly ''.

        Raises `ProtocolError` for what is no message and `Refused` for what must not be done; nothing happened then.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is above the cap of {MAX_MESSAGE_BYTES}.")
        self._heard_ns[operator] = self._clock.now_ns()
        try:
            wish = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this page: {error}.") from error
        if isinstance(wish, Beat):
            return ""
        robots = self._view.robots()
        if wish.robot not in robots:
            name = wish.robot[:64]
            raise Refused(f"There is no robot '{name}'.{nearest(name, robots)}")
        return self._act(operator, wish)

    def _act(self, operator: int, wish: TakeOver | HandBack | Command | EStop | ReleaseEStop) -> str:
        robot = wish.robot
        holder = self._holder.get(robot)
        if isinstance(wish, EStop):
            self._queue(operator, robot, "estop")
            if self._view.lost(robot):
                return f"{robot} has no link to the gateway: this stop may not reach it. Use the stop on the robot."
            return ""
        if holder is not None and holder != operator:
            raise Refused(f"{robot} is driven from another page (operator {holder}). Wait until it is handed back.")
        if isinstance(wish, TakeOver):
            self._check_take_over(robot)
            self._queue(operator, robot, "take_over")
            self._holder[robot] = operator
            self._dropped.discard(robot)
        elif isinstance(wish, HandBack):
            self._queue(operator, robot, "hand_back")
            self._holder.pop(robot, None)
            self._dropped.discard(robot)
        elif isinstance(wish, ReleaseEStop):
            self._queue(operator, robot, "release_estop")
        else:
            if holder is None:
                raise NotHeld(f"{robot} is not under your control. Take it over first.")
            spec = self._view.spec(robot)
            if spec is None:
                raise Refused(f"{robot} has not said what its actions mean. Wait until it is connected.")
            check_action(robot, spec, wish.action)
            self._queue(operator, robot, "command", wish.action, wish.sequence)
        return ""

    def _check_take_over(self, robot: str) -> None:
        if self._view.lost(robot):
            raise Refused(f"{robot} has no link to the gateway now. Wait until it is back, then take over.")
        reason = not_drivable(self._view.spec(robot))
        if reason:
            raise Refused(f"{robot} cannot be driven from this page: {reason}.")

    def _drop(self, operator: int) -> list[str]:
        robots = sorted(robot for robot, who in self._holder.items() if who == operator)
        for robot in robots:
            del self._holder[robot]
            self._dropped.add(robot)
            self._queue(operator, robot, "drop_link")
        return robots

    def _queue(self, operator: int, robot: str, kind: str, action: tuple[float, ...] = (), sequence: int = 0) -> None:
        wish = Operator(robot=robot, kind=kind, action=action, sequence=sequence, operator=f"web-{operator}")
        if not self._view.wish(wish):
            raise Refused(f"The gateway takes no wishes now, so {robot} did not get '{kind}'. See the gateway's log.")


def check_action(robot: str, spec: RobotSpec, action: tuple[float, ...]) -> None:
    """Raise `Refused` unless `action` is da finite numbers within the limits of `spec`."""
    if len(action) != spec.action_dim:
        raise Refused(f"A command of {len(action)} numbers for {robot}, whose actions have {spec.action_dim}.")
    for value, dimension in zip(action, spec.action, strict=True):
        if not math.isfinite(value):
            raise Refused(f"A command for {robot} with '{dimension.name}' = {value}, which is no number to act on.")
        if not dimension.low <= value <= dimension.high:
            raise Refused(
                f"A command for {robot} with '{dimension.name}' = {value:g}, "
                f"outside [{dimension.low:g}, {dimension.high:g}] {dimension.unit}."
            )
