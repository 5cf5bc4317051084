"""The uplink process: makes what control recorded durable, sends it, and brings weights, jobs and commands down.

One outbound line to the gateway. When it is cut the robot works on and the spool grows; when it is back the spool
drains. Nothing is forgotten before it is acknowledged.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from pathlib import Path

import msgspec

from robot_edge.uplink.episode_recorder import EpisodeRecorder
from robot_edge.uplink.segments import Spool, encode_jpeg
from robot_edge.uplink.sticky_commands import StickyCommands
from robot_edge.uplink.stop_link import StopLink
from robot_edge.uplink.weight_client import WeightClient
from wire.clock import Clock, clock_name
from wire.errors import StorageError
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    Heartbeat,
    Hello,
    HelloAck,
    Job,
    Nack,
    OperatorCommand,
    Preview,
    ReintroduceRequest,
    Rejection,
    Stop,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.messages.local import (
    EpisodeEnded,
    EpisodeJudged,
    EpisodeStarted,
    FrameRecorded,
    LoadWeights,
    RequestPreviews,
    StepRecorded,
)
from wire.transport.channel import Channel
from wire.transport.gateway_clock import GatewayClock

log = logging.getLogger(__name__)

_AT_ONCE = 500
"""messages of one channel that are handled before the next one is looked at"""
_WINDOW = 8
_RESEND_S = 5.0
_HEARTBEAT_S = 1.0
_PREVIEW_S = 0.1
"""between two pictures for people while somebody looks"""
_UNWATCHED_S = 1.0
"""the same while nobody does: a page that is opened has something to show"""
_LARGER_NS = 1_000_000_000
"""for so long after a larger picture no small one is sent in its place"""
_EVENTS = 100
"""newest events kept while the gateway cannot be reached"""


class Uplink:
    """`poll` does all there is to do now and returns."""

    def __init__(
        self,
        name: str,
        directory: Path,
        gateway: Channel,
        control: Channel,
        inference: Channel,
        clock: Clock,
        segment_steps: int = 80,
        stops: StopLink | None = None,
    ) -> None:
        """`directory` is this robot's own: spool and weight cache. `stops`: to the robot's host; without it control is
        told of stops. Raises `StorageError`."""
        self.name = name
        self.spool = Spool(directory / "spool.sqlite")
        self.weights = WeightClient(directory / "weights", gateway, clock)
        self.stopping = False
        self.rejection = ""
        self.status: EdgeStatus | None = None
        """the newest one, with what the uplink itself knows"""
        self.heard_ns = clock.now_ns()
        """when the gateway spoke last; before that, when this uplink began"""
        self.newest_version = 0
        """that was announced, whether it is here or not"""
        self.operator: Channel | None = None
        """to a process beside the robot that sees each status and event, and may command it without a gateway"""
        self.keys: Channel | None = None
        """from keys beside the robot, which command it likewise and see nothing"""
        self._recorder = EpisodeRecorder(name, self.spool, control, clock, segment_steps)
        self._gateway = gateway
        self._control = control
        self._inference = inference
        self._clock = clock
        self._hello: Hello | None = None
        self._accepted = False
        self._watched = False
        self._job: Job | None = None
        self._activated: VersionActivated | None = None
        self._in_flight: dict[str, int] = {}
        self._sent_row = 0
        self._progress_ns = clock.now_ns()
        self._next_heartbeat_ns = 0
        self._next_preview_ns: dict[str, int] = {}
        self._larger_ns: dict[str, int] = {}
        self._control_done = False
        self._control_pid = self._inference_pid = 0
        self._last_status: EdgeStatus | None = None
        self._acknowledged: list[str] = []
        self._commands = StickyCommands()
        self._stops = stops
        self._gateway_clock = GatewayClock()
        self._events: deque[EdgeEvent] = deque(maxlen=_EVENTS)

    @property
    def accepted(self) -> bool:
        """Whether the gateway has let this robot in, as far as is known."""
        return self._accepted

    @property
    def drained(self) -> bool:
        """Control has finished and everything it recorded is acknowledged."""
        return self._control_done and not self._recorder.unspooled and len(self.spool) == 0

    def poll(self) -> None:
        for channel, handle in (
            (self._control, self._from_control),
            (self._inference, self._from_inference),
            (self._gateway, self._from_gateway),
            (self.operator, self._from_operator),
            (self.keys, self._from_operator),
        ):
            if channel is not None:
                for message in itertools.islice(iter(channel.recv, None), _AT_ONCE):
                    handle(message)
        if self._stops is not None:
            for detail in self._stops.pop_refused():
                self._keep_event(EdgeEvent(self.name, self._clock.now_ns(), "refused", detail))
        self._recorder.poll()
        self._send_segments()
        self._send_events()
        self.weights.poll()
        self._greet()

    def stop(self) -> None:
        """Ask control to finish; `drained` turns true when all is safe in the cloud."""
        if not self.stopping:
            self.stopping = True
            self._control.send(Stop())

    def control_gone(self) -> None:
        """Control's process has ended: what it recorded last is all there will be."""
        self._recorder.break_off()
        self._control_done = True

    def report_drained(self) -> None:
        """Tell the gateway the final counters of the spool."""
        if self._last_status is not None:
            self._send_status(self._last_status)

    def close(self) -> None:
        self.spool.close()

    # --- from this computer ---------------------------------------------------------------------------------------

    def _from_control(self, message: Message) -> None:
        match message:
            case StepRecorded() | EpisodeStarted() | EpisodeEnded() | EpisodeJudged():
                self._recorder.handle_message(message)
            case FrameRecorded():
                self._frame(message)
            case EdgeStatus():
                self._last_status = message
                self._send_status(message)
            case EdgeEvent():
                self._keep_event(message)
            case Hello():
                self._hello = msgspec.structs.replace(message, name=self.name, clock=clock_name())
                self._accepted, self._next_heartbeat_ns = False, 0
                self._control_done = False
                if self._control_pid not in (0, message.pid):
                    # Whoever recorded the running episode is gone.
                    self._recorder.break_off()
                self._control_pid = message.pid
                for waiting in (self._commands.state(), self._job, self._activated):
                    if waiting is not None:
                        self._control.send(waiting)
                # Also when nothing is wrong: an earlier uplink may have said that something was.
                self._recorder.report_storage()
                self._control.send(RequestPreviews(self._watched))
            case Stop():
                self._control_done = True
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _send_events(self) -> None:
        while self._accepted and self._events and self._gateway.send(self._events[0]):
            self._events.popleft()

    def _keep_event(self, event: EdgeEvent) -> None:
        self._events.append(event)
        if self.operator is not None:
            self.operator.send(event)

    def _send_status(self, status: EdgeStatus) -> None:
        whole = msgspec.structs.replace(
            status,
            steps_recorded=self.spool.steps_recorded,
            spooled=len(self.spool) + self._recorder.unspooled,
            control_pid=self._control_pid,
            inference_pid=self._inference_pid,
            uplink_pid=os.getpid(),
        )
        self.status = whole
        if self.operator is not None:
            self.operator.send(whole)
        # A gateway that does not know this robot yet must first hear its name.
        if self._accepted:
            self._gateway.send(whole)

    def _from_inference(self, message: Message) -> None:
        match message:
            case Hello():
                self._inference_pid = message.pid
                self._send_weights()
            case VersionActivated():
                self._activated = message
                self._control.send(message)
                if self._accepted:
                    self._gateway.send(message)
            case EdgeEvent():
                self._keep_event(message)
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _frame(self, message: FrameRecorded) -> None:
        camera, frame = message.camera, message.frame
        jpeg = self._recorder.frame(message)
        if not self._accepted or frame.time_ns < self._next_preview_ns.get(camera, 0):
            return
        if frame.preview is not None:
            self._larger_ns[camera] = frame.time_ns
            jpeg = encode_jpeg(frame.preview, 80)
        elif 0 <= frame.time_ns - self._larger_ns.get(camera, -_LARGER_NS) < _LARGER_NS:
            return
        pause_s = _PREVIEW_S if self._watched else _UNWATCHED_S
        self._next_preview_ns[camera] = frame.time_ns + int(pause_s * 1e9)
        self._gateway.send(Preview(self.name, camera, frame.time_ns, jpeg or encode_jpeg(frame.image, 80)))

    def _watch(self, watched: bool) -> None:
        """Somebody looks at the page, or nobody does any more."""
        if watched != self._watched:
            self._watched = watched
            self._next_preview_ns.clear()
            self._control.send(RequestPreviews(watched))

    def _forget(self) -> None:
        """Drop what is acknowledged; what a full disk does not let go of stays until there is room again."""
        try:
            self.spool.forget(tuple(self._acknowledged))
        except StorageError as error:
            log.error("robot '%s': %s", self.name, error)
        else:
            self._acknowledged = []

    # --- to and from the gateway ----------------------------------------------------------------------------------

    def _from_gateway(self, message: Message) -> None:
        self.heard_ns = self._clock.now_ns()
        match message:
            case Ack(segments=segments, quarantined=quarantined):
                if quarantined:
                    log.error(
                        "robot '%s': the gateway put aside %s as not valid; see its log.",
                        self.name,
                        quarantined,
                    )
                done = (*segments, *quarantined)
                self._acknowledged += done
                self._forget()
                for segment_id in done:
                    self._in_flight.pop(segment_id, None)
                self._progress_ns = self._clock.now_ns()
            case Nack(reason=reason):
                log.warning("robot '%s': the gateway cannot store now: %s", self.name, reason)
                self._progress_ns = self._clock.now_ns()
            case VersionAvailable(version=version):
                self.newest_version = version.number
                if self.weights.fetch(version):
                    self._send_weights()
            case WeightBytes():
                if self.weights.add_part(message):
                    self._send_weights()
            case Job():
                self._job = message
                self._control.send(message)
            case OperatorCommand():
                at_ns = self._gateway_clock.ours(message.captured_ns) if message.captured_ns else 0
                self._pass_on(msgspec.structs.replace(message, captured_ns=at_ns, beside=False))
            case HelloAck():
                self._gateway_clock.measure(message, self._clock.now_ns())
                self._watch(message.watched)
                if self._stops is not None:
                    self._stops.follow(message.stop_port)
                if not self._accepted:
                    self._accepted = True
                    self.rejection = ""
                    if self._activated is not None:
                        self._gateway.send(self._activated)
                    self._resend_all()
            case ReintroduceRequest():
                self._accepted, self._next_heartbeat_ns = False, 0
            case Rejection(reason=reason):
                if reason != self.rejection:
                    log.error("robot '%s' is refused by the gateway: %s", self.name, reason)
                self.rejection = reason
            case Stop():
                self.stop()
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _from_operator(self, message: Message) -> None:
        if isinstance(message, OperatorCommand) and message.robot == self.name:
            self._pass_on(msgspec.structs.replace(message, beside=True))
        else:
            log.warning("robot '%s': its local operator sent what is not for it: %r", self.name, message)

    def _pass_on(self, command: OperatorCommand) -> None:
        if self._stops is not None and self._stops.take(command):
            return
        self._commands.remember(command)
        self._control.send(command)

    def _greet(self) -> None:
        now_ns = self._clock.now_ns()
        if self._hello is None or now_ns < self._next_heartbeat_ns:
            return
        self._next_heartbeat_ns = now_ns + int(_HEARTBEAT_S * 1e9)
        if self._accepted:
            sent = self._gateway.send(Heartbeat(now_ns))
        else:
            sent = self._gateway.send(msgspec.structs.replace(self._hello, sent_ns=now_ns))
        if not sent:
            # The line is down: introduce ourselves again when it is back, to a gateway that may be a new one.
            self._accepted = False

    def _send_segments(self) -> None:
        if not self._accepted:
            return
        now_ns = self._clock.now_ns()
        if self._in_flight and now_ns - self._progress_ns > _RESEND_S * 1e9:
            self._resend_all()
        if self._sent_row >= self.spool.newest:
            return
        room = _WINDOW - len(self._in_flight)
        for row, segment_id in self.spool.waiting(self._sent_row, room) if room > 0 else ():
            segment = self.spool.get(row)
            if segment is None or not self._gateway.send(segment):
                return
            if not self._in_flight:
                self._progress_ns = now_ns
            self._in_flight[segment_id] = row
            self._sent_row = row

    def _resend_all(self) -> None:
        self._in_flight.clear()
        self._sent_row = 0
        self._progress_ns = self._clock.now_ns()

    def _send_weights(self) -> None:
        if self.weights.ready is not None:
            version, path = self.weights.ready
            self._inference.send(LoadWeights(version, str(path)))
