"""Where a robot's segments go: to its site's relay while that takes them, else to the gateway itself."""

from __future__ import annotations

import logging

from robot_edge.uplink.gateway_link import GatewayLink
from robot_edge.uplink.segment_sender import SegmentSender
from wire.clock import Clock, clock_name
from wire.identity.sealing import Sealer
from wire.messages import Message
from wire.messages.gateway import Ack, Hello, HelloAck, Nack, Rejection, Segment
from wire.transport.channel import Channel
from wire.transport.session import SILENT_AFTER_S, GatewaySession
from wire.types import Role

log = logging.getLogger(__name__)

_REST_NS = 60_000_000_000
"""a relay that was silent, or took nothing, is left out for so long"""
_ANSWER_NS = 20_000_000_000
"""in so long a relay answers something of what is under way: it has only to write it to its disk"""


class RelayLink:
    """The connection to the relay. Keeps the `Channel` protocol for a `SegmentSender`, whose segments it seals."""

    def __init__(self, name: str, channel: Channel, sealer: Sealer, clock: Clock, relay: str = "the relay") -> None:
        """`name`: the robot's; `relay`: by which a person finds that."""
        self.channel, self.relay = channel, relay
        self.credit_bytes = 0
        """so much the relay takes without an answer; 0: nothing, it only passes weights on"""
        self._name, self._sealer, self._clock = name, sealer, clock
        self._session = GatewaySession(channel, Hello(name, Role.edge, clock_name(), 0), clock)
        self._heard_ns = self._answered_ns = 0
        self._rests_ns = 0
        self._sent: set[str] = set()
        """ids that it has not acknowledged"""

    @property
    def open(self) -> bool:
        """Whether segments are likely to be taken in now."""
        return self._heard and self.credit_bytes > 0

    @property
    def lost(self) -> bool:
        """Whether it was there and is not any more: its connection ended, or it misses its heartbeats."""
        return self._heard_ns > 0 and not self._heard

    @property
    def _heard(self) -> bool:
        return self._session.accepted and self._clock.now_ns() - self._heard_ns < SILENT_AFTER_S * 1e9

    @property
    def rests(self) -> bool:
        """Whether it is left out, as long as there is another way."""
        return self._clock.now_ns() < self._rests_ns

    def begin(self) -> None:
        """Segments go this way from now on."""
        self._sent.clear()
        self._answered_ns = self._clock.now_ns()

    def check(self, bytes_under_way: int) -> None:
        """Leave out a relay that answers nothing of what it was sent."""
        now_ns = self._clock.now_ns()
        if not bytes_under_way:
            self._answered_ns = now_ns
        elif now_ns - self._answered_ns > _ANSWER_NS:
            self._rest("answers nothing of what it is sent")

    def leave(self) -> None:
        """It is silent, or says that it takes nothing."""
        if not self.rests:
            self._rest("is silent" if self.credit_bytes else "takes nothing")

    def on_message(self) -> None:
        """Something came from it."""
        self._heard_ns = self._clock.now_ns()

    def acknowledged(self, message: Ack) -> tuple[str, ...]:
        """Which segments the relay has on its disk, of those that it was sent."""
        self._answered_ns = self._clock.now_ns()
        self.credit_bytes = message.credit_bytes
        found = tuple(segment for segment in message.segments if segment in self._sent)
        self._sent.difference_update(found)
        return found

    def handle_message(self, message: Message) -> bool:
        """False for what is not about the connection."""
        match message:
            case Nack(reason=reason):
                log.warning("robot '%s': %s cannot store now: %s", self._name, self.relay, reason)
            case Rejection(reason=reason):
                log.error("robot '%s': %s refuses: %s", self._name, self.relay, reason)
            case _ if not self._session.handle_message(message):
                return False
            case HelloAck():
                self.credit_bytes = message.credit_bytes
        return True

    def poll(self) -> None:
        self._session.poll()

    def send(self, message: Message) -> bool:
        assert isinstance(message, Segment)
        if not self.channel.send(self._sealer.seal(message)):
            return False
        self._sent.add(message.id)
        return True

    def recv(self) -> Message | None:
        return self.channel.recv()

    def close(self) -> None:
        self.channel.close()

    def _rest(self, what: str) -> None:
        log.error("%s %s; for a minute segments go to the gateway itself.", self.relay, what)
        self._rests_ns = self._clock.now_ns() + _REST_NS


class UploadRoute:
    """Has a sender send by the relay, where there is one that takes segments, or to the gateway."""

    def __init__(self, sender: SegmentSender, gateway: Channel, link: GatewayLink, relay: RelayLink | None) -> None:
        self._sender, self._gateway, self._link, self._relay = sender, gateway, link, relay
        self.by_relay = False

    def poll(self) -> None:
        """Send what may be sent now, by the way that is open."""
        relay = self._relay
        if relay is not None:
            relay.poll()
            if self.by_relay:
                relay.check(self._sender.bytes_under_way)
            by_relay = relay.open and not (relay.rests and self._link.open)
            if self.by_relay != by_relay:
                self._switch(relay, by_relay)
            if self.by_relay:
                self._sender.on_credit(relay.credit_bytes)
        if self.by_relay or self._link.open:
            self._sender.poll()
        else:
            self._sender.pause()

    def on_gateway_connected(self) -> None:
        """A gateway has let this robot in."""
        if not self.by_relay:
            self._sender.on_connected()

    def on_gateway_credit(self, credit_bytes: int) -> None:
        if not self.by_relay:
            self._sender.on_credit(credit_bytes)

    def _switch(self, relay: RelayLink, by_relay: bool) -> None:
        self.by_relay = by_relay
        if by_relay:
            relay.begin()
        else:
            relay.leave()
        # What was under way on the other way is sent again, and stored once.
        self._sender.on_connected(relay if by_relay else self._gateway)
