"""A site's relay: what comes from robots and from the gateway, handed to who handles it."""

from __future__ import annotations

import itertools
import logging
from collections import Counter

from robot_edge.relay.chunk_relay import CACHE_BYTES, ChunkRelay
from robot_edge.relay.upload_relay import UploadRelay
from robot_edge.relay.upload_spool import UploadSpool
from wire.clock import Clock, clock_name
from wire.identity.permissions import Port, may_send
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    FetchPictures,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    Rejection,
    SealedSegment,
    Stop,
    WeightBytes,
)
from wire.transport.channel import Channel, ServerChannel
from wire.transport.session import SILENT_AFTER_S, GatewaySession
from wire.types import Role
from wire.wakeup import Wakeup

log = logging.getLogger(__name__)

_AT_ONCE = 500
_REPORT_NS = 10_000_000_000
_CLOSE_S = 3.0


class SiteRelay:
    """`poll` is called in a loop. `start` has a thread wait for the disk; without it `poll` does, for tests."""

    def __init__(
        self,
        name: str,
        robots: ServerChannel,
        gateway: Channel,
        clock: Clock,
        cache_bytes: int = CACHE_BYTES,
        spool: UploadSpool | None = None,
    ) -> None:
        """`robots`: where they connect; `cache_bytes`: as of `ChunkRelay`; `spool`: for their segments, None: they send
        them to the gateway."""
        self.session = GatewaySession(gateway, Hello(name, Role.relay, clock_name(), 0), clock)
        self.stopping = False
        self.refused: Counter[str] = Counter()
        """what came and is nothing, by reason"""
        self.wakeup = Wakeup()
        """rings when the thread is done with something"""
        self.chunks = ChunkRelay(robots, gateway, clock, self.refused, cache_bytes)
        self.uploads = UploadRelay(spool, robots, gateway, clock, self.refused) if spool is not None else None
        self._robots, self._gateway, self._clock = robots, gateway, clock
        self._heard_ns = 0
        self._report_ns, self._reported = clock.now_ns(), ""

    def start(self) -> None:
        """Have a thread wait for the disk."""
        if self.uploads is not None:
            self.uploads.disk.on_result = self.wakeup.ring
            self.uploads.disk.start()

    @property
    def heard(self) -> bool:
        """Whether the gateway has let this relay in and was heard lately."""
        return self.session.accepted and not self._silent

    def poll(self) -> None:
        """Handle what has come, and pass on what can be passed on."""
        self.wakeup.silence()
        while (message := self._gateway.recv()) is not None:
            if self._silent and self.uploads is not None:
                self.uploads.sender.on_heard_again()
            self._heard_ns = self._clock.now_ns()
            self._from_gateway(message)
        for robot, asked in itertools.islice(iter(self._robots.recv, None), _AT_ONCE):
            self._from_robot(robot, asked)
        self.chunks.poll(self.heard)
        if self.uploads is not None:
            self.uploads.poll(self.heard)
        self.session.poll()
        self._report()

    def progress(self) -> str:
        """What has come and gone, for people."""
        chunks, uploads = self.chunks, self.uploads
        text = f"weights: {chunks.fetched_bytes / 1e6:.1f} MB fetched, {chunks.served_bytes / 1e6:.1f} MB handed out"
        if uploads is None:
            return text
        spool, line = uploads.spool, "" if self.heard else "; the gateway is silent"
        line += f"; nothing can be stored now: {uploads.fault}" if uploads.fault else ""
        text += f"; segments: {uploads.taken} taken, {uploads.sent} brought, {spool.index.segments} wait"
        text += f" ({spool.index.size / 1e6:.1f} MB), of {spool.held} pictures are held back"
        refused = f", {spool.refused} are not believed" if spool.refused else ""
        return f"{text}{refused}; room for {spool.room_bytes / 1e9:.2f} GB more{line}"

    def close(self) -> None:
        """What robots were told is stored is on the disk already."""
        if self.uploads is not None:
            self.uploads.close(_CLOSE_S)
        self.wakeup.close()

    @property
    def _silent(self) -> bool:
        return self._clock.now_ns() - self._heard_ns > SILENT_AFTER_S * 1e9

    # --- inside -----------------------------------------------------------------------------------------------------

    def _from_robot(self, robot: str, message: Message) -> None:
        if not may_send(Port.relay, self._robots.role(robot), message):
            self.refused["role"] += 1
            text = "a relay passes versions on to whoever runs them, and segments of those who record."
            self._robots.send(robot, Rejection(text))
            return
        match message:
            case FetchWeights():
                self.chunks.on_request(robot, message)
            case Hello(sent_ns=sent_ns) | Heartbeat(sent_ns=sent_ns):
                credit = self.uploads.credit_bytes if self.uploads is not None else 0
                answer = HelloAck(clock_name(), self._clock.now_ns(), sent_ns, credit_bytes=credit)
                self._robots.send(robot, answer)
            case SealedSegment() if self.uploads is not None:
                self.uploads.on_segment(robot, message)
            case _:
                self._robots.send(robot, Nack("this relay takes no segments (--no-uploads)."))

    def _from_gateway(self, message: Message) -> None:
        match message, self.uploads:
            case WeightBytes(), _:
                self.chunks.on_chunk(message)
            case Stop(), _:
                self.stopping = True
            case Ack(), UploadRelay() as uploads:
                uploads.on_answer(message)
            case Nack(), UploadRelay() as uploads:
                uploads.on_nack(message)
            case FetchPictures(), UploadRelay() as uploads:
                uploads.on_request(message)
            case Rejection(request=FetchWeights() as request), _:
                self.chunks.on_refused(request, message.reason)
            case _:
                before = self.session.accepted
                if not self.session.handle_message(message):
                    log.debug("a relay does nothing with %s.", type(message).__name__)
                elif isinstance(message, HelloAck) and self.uploads is not None:
                    self.uploads.on_alive(message, connected=not before)

    def _report(self) -> None:
        if self._clock.now_ns() - self._report_ns < _REPORT_NS:
            return
        self._report_ns = self._clock.now_ns()
        if (text := self.progress()) != self._reported:
            self._reported = text
            log.info("%s", text)
