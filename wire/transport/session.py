"""What every process says to its gateway to be known there: who it is, then that it lives."""

from __future__ import annotations

import logging
import time

import msgspec

from wire.clock import Clock
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.gateway import Heartbeat, Hello, HelloAck, ReintroduceRequest, Rejection
from wire.transport.channel import Channel

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""between two heartbeats"""
SILENT_AFTER_S = 2 * BEAT_S
"""a peer that was not heard for so long is silent, whichever side says so"""
_REJECTED_TIMEOUT_S = 5.0


class Heartbeats:
    """The messages that keep a connection. Each names the newest answer, for a round trip of the other side's."""

    def __init__(self) -> None:
        self._answer = 0, 0

    def on_answer(self, answer: HelloAck, now_ns: int) -> None:
        """The other side answered the one before, or a hello."""
        self._answer = answer.received_ns, now_ns

    def forget(self) -> None:
        """Whoever answers next may be another."""
        self._answer = 0, 0

    def next(self, now_ns: int) -> Heartbeat:
        return Heartbeat(now_ns, *self._answer)


def stamped(hello: Hello, now_ns: int) -> Hello:
    """`hello` as it is sent now, by both clocks of this computer."""
    return msgspec.structs.replace(hello, sent_ns=now_ns, wall_ns=time.time_ns())


class GatewaySession:
    """Introduces this process to the gateway, and again after a break; keeps the connection with heartbeats."""

    def __init__(self, channel: Channel, hello: Hello, clock: Clock, every_s: float = BEAT_S) -> None:
        """`hello` is sent until the gateway accepts it, each time with the time of sending; then a heartbeat, both
        `every_s`."""
        self.accepted = False
        self.rejection = ""
        """why the gateway refuses this process, '' when it does not"""
        self.channel = channel
        self._hello = hello
        self._clock = clock
        self._heartbeats = Heartbeats()
        self._every_ns = round(every_s * 1e9)
        self._next_ns = 0
        self._rejected_ns: int | None = None
        self._answered_ns: int | None = None

    @property
    def silent(self) -> bool:
        """Whether the gateway answered neither a hello nor a heartbeat lately."""
        return self._answered_ns is None or self._clock.now_ns() - self._answered_ns > SILENT_AFTER_S * 1e9

    @property
    def refusal(self) -> str:
        """Why there is no connection, or none that the gateway accepts; '' when nothing is wrong."""
        return self.rejection or getattr(self.channel, "refusal", "")

    def handle_message(self, message: Message) -> bool:
        """Take in what is about the connection; False for any other message."""
        match message:
            case HelloAck():
                self.accepted, self.rejection = True, ""
                self._answered_ns = self._clock.now_ns()
                self._heartbeats.on_answer(message, self._answered_ns)
            case ReintroduceRequest():
                self.accepted, self._next_ns = False, 0
                self._heartbeats.forget()
            case Rejection(reason=reason):
                if reason != self.rejection:
                    log.error("%s '%s' is refused by the gateway: %s", self._hello.role, self._hello.name, reason)
                self.rejection = reason
            case _:
                return False
        return True

    def poll(self) -> bool:
        """Say what is due; True when it was time for a heartbeat."""
        now_ns = self._clock.now_ns()
        if now_ns < self._next_ns:
            return False
        was_accepted = self.accepted
        due = self._heartbeats.next(now_ns) if was_accepted else stamped(self._hello, now_ns)
        if self.channel.send(due):
            self._next_ns = now_ns + self._every_ns
        else:
            # The connection is down: whoever answers when it is back may be a new gateway.
            self.accepted = False
        return was_accepted

    def raise_if_rejected(self) -> None:
        """Raises `RejectedError`, with the gateway's reason, when it has gone on refusing this process for a while."""
        now_ns = self._clock.now_ns()
        if not self.refusal:
            self._rejected_ns = None
        elif self._rejected_ns is None:
            self._rejected_ns = now_ns
        elif now_ns - self._rejected_ns > _REJECTED_TIMEOUT_S * 1e9:
            raise RejectedError(self.refusal)
