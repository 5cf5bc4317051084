"""A robot's connection to the gateway: who it is, that it lives, and what people should see of it. Heartbeats go first,
then what is newest of the robot; of pictures only what the connection takes at once."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from robot_edge.uplink.segments import encode_jpeg
from wire.clock import Clock
from wire.messages import Message
from wire.messages.gateway import (
    EdgeEvent,
    EdgeStatus,
    Hello,
    HelloAck,
    Preview,
    ReintroduceRequest,
    Rejection,
    VersionActivated,
)
from wire.messages.local import FrameRecorded
from wire.transport.channel import Channel
from wire.transport.peer_clock import PeerClock
from wire.transport.session import BEAT_S, SILENT_AFTER_S, Heartbeats, stamped

log = logging.getLogger(__name__)

_EVENTS = 100
"""newest events kept while the gateway cannot be reached"""
_SLOW_NS = 500_000_000
"""a heartbeat whose answer takes longer waited behind something: no pictures for people then"""
_JUMP_NS = 100_000_000
"""clocks that jump by less are not worth a person's attention"""
_DRIVEN_PAUSE_S = 0.1
"""between two pictures of a camera while a person drives"""
_LARGER_NS = 1_000_000_000
"""for so long after a larger picture no small one is sent in its place"""


class GatewayLink:
    """`poll` says what is due. While the gateway is silent it gets heartbeats alone: what a stall keeps back does not
    come in a burst when it is over."""

    def __init__(self, name: str, channel: Channel, clock: Clock) -> None:
        self._name, self._channel, self._clock = name, channel, clock
        self.accepted = False
        """the gateway has let this robot in, as far as is known"""
        self.rejection = ""
        self.heard_ns = clock.now_ns()
        """when the gateway spoke last; before that, when this began"""
        self.clock = PeerClock()
        """the gateway's"""
        self.activated: VersionActivated | None = None
        """said again to a gateway that lets the robot in"""
        self._hello: Hello | None = None
        self._heartbeats = Heartbeats()
        self._next_beat_ns = 0
        self._asked_ns = self._trip_ns = 0
        """when the oldest heartbeat was sent that is not answered, and how long the answer of the newest took"""
        self._status: EdgeStatus | None = None
        self._events: deque[EdgeEvent] = deque()
        self._forgotten = 0
        self._was_silent = False

    @property
    def silent(self) -> bool:
        """Whether the gateway was not heard for two beats."""
        return self._clock.now_ns() - self.heard_ns > SILENT_AFTER_S * 1e9

    @property
    def open(self) -> bool:
        """Whether what is sent now is likely to be taken in."""
        return self.accepted and not self.silent

    @property
    def slow(self) -> bool:
        """Whether something that is sent waits on its way, as far as heartbeats tell."""
        waits_ns = self._clock.now_ns() - self._asked_ns if self._asked_ns else 0
        return max(waits_ns, self._trip_ns) > _SLOW_NS

    def introduce(self, hello: Hello) -> None:
        """Control says what the robot is; the gateway is told at once, unless it was told the same."""
        # Control repeats it every two seconds, and what is under way is sent again after each introduction.
        if self._hello is None or msgspec.structs.astuple(hello) != msgspec.structs.astuple(self._hello):
            self._hello = hello
            self._disconnect()

    def show_status(self, status: EdgeStatus) -> None:
        """The newest one; one before it that has not left is of no use any more."""
        self._status = status

    def add_event(self, event: EdgeEvent) -> None:
        """It leaves as soon as the gateway can take it, unless too many come after it."""
        self._events.append(event)
        if len(self._events) > _EVENTS:
            self._events.popleft()
            self._forgotten += 1

    def send_activation(self, activated: VersionActivated) -> None:
        """Inference runs another version."""
        self.activated = activated
        if self.accepted:
            self._channel.send(activated)

    def send_preview(self, preview: Preview) -> None:
        """A picture for people; it is lost where the connection does not take it."""
        self._channel.send(preview)

    def on_message(self) -> bool:
        """Something came from the gateway; whether it had been silent."""
        now_ns = self._clock.now_ns()
        silent_s = (now_ns - self.heard_ns) / 1e9
        self.heard_ns, was_silent, self._was_silent = now_ns, self._was_silent, False
        if was_silent:
            log.info("robot '%s': the gateway is heard again after %.1f s.", self._name, silent_s)
        return was_silent or silent_s > SILENT_AFTER_S

    def handle_message(self, message: HelloAck | ReintroduceRequest | Rejection) -> bool:
        """Take in what is about the connection; True when the gateway has just let this robot in."""
        match message:
            case HelloAck():
                return self._on_answer(message)
            case ReintroduceRequest():
                self._disconnect()
            case Rejection(reason=reason):
                if reason != self.rejection:
                    log.error("robot '%s' is refused by the gateway: %s", self._name, reason)
                self.rejection = reason
        return False

    def poll(self) -> None:
        """Send the heartbeat that is due, and what people should see."""
        self._beat()
        if self.silent and not self._was_silent and self._hello is not None:
            self._was_silent = True
            log.warning("robot '%s': the gateway has been silent for %g s.", self._name, SILENT_AFTER_S)
        if not self.open:
            return
        if self._status is not None and self._channel.send(self._status):
            self._status = None
        while self._events and self._channel.send(self._events[0]):
            self._events.popleft()
        if self._forgotten and not self._events:
            text = f"{self._forgotten} older events were forgotten while the gateway could not be reached."
            if self._channel.send(EdgeEvent(self._name, self._clock.now_ns(), "events", text)):
                self._forgotten = 0

    # --- inside -------------------------------------------------------------------------------------------------

    def _on_answer(self, answer: HelloAck) -> bool:
        now_ns = self._clock.now_ns()
        self._heartbeats.on_answer(answer, now_ns)
        if answer.echo_ns >= self._asked_ns:
            self._asked_ns, self._trip_ns = 0, now_ns - answer.echo_ns
        jump_ns = self.clock.on_answer(answer, now_ns)
        if abs(jump_ns) > _JUMP_NS:
            log.warning("robot '%s': its clock and the gateway's jumped apart by %.3f s.", self._name, jump_ns / 1e9)
        if self.accepted:
            return False
        self.accepted, self.rejection = True, ""
        if self.activated is not None:
            self._channel.send(self.activated)
        return True

    def _disconnect(self) -> None:
        self.accepted, self._next_beat_ns, self._asked_ns = False, 0, 0
        self._heartbeats.forget()

    def _beat(self) -> None:
        now_ns = self._clock.now_ns()
        if self._hello is None or now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + round(BEAT_S * 1e9)
        due: Message = self._heartbeats.next(now_ns) if self.accepted else stamped(self._hello, now_ns)
        if self._channel.send(due):
            self._asked_ns = self._asked_ns or now_ns
        else:
            # The line is down: introduce ourselves again when it is back, to a gateway that may be a new one.
            self.accepted, self._asked_ns = False, 0


class PreviewSender:
    """Pictures for people: one of each camera every so often, none where the line is slow."""

    def __init__(self, robot: str, link: GatewayLink) -> None:
        self.pause_s = 1.0
        """between two pictures of a camera, as the gateway says"""
        self._robot, self._link = robot, link
        self._shown_ns: dict[str, int] = {}
        self._larger_ns: dict[str, int] = {}

    def show(self, message: FrameRecorded, jpeg: bytes | None, driven: bool) -> None:
        """Send it if one is due. `jpeg`: its image, where that is encoded already; `driven`: a person drives by it."""
        camera, frame = message.camera, message.frame
        if frame.preview is not None:
            self._larger_ns[camera] = frame.time_ns
        shown_ns, pause_s = self._shown_ns.get(camera), _DRIVEN_PAUSE_S if driven else self.pause_s
        if shown_ns is not None and frame.time_ns - shown_ns < 1e9 * pause_s:
            return
        if not self._link.open or self._link.slow:
            return
        if frame.preview is not None:
            jpeg = encode_jpeg(frame.preview, 80)
        elif 0 <= frame.time_ns - self._larger_ns.get(camera, -_LARGER_NS) < _LARGER_NS:
            return
        self._shown_ns[camera] = frame.time_ns
        self._link.send_preview(Preview(self._robot, camera, frame.time_ns, jpeg or encode_jpeg(frame.image, 80)))
