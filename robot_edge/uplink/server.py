"""The uplink process: makes what control recorded durable, sends it, and brings weights, jobs and commands down.

One outbound line to the gateway. When it is cut the robot works on and the spool grows; when it is back the spool
drains. Nothing is forgotten before it is acknowledged, but for what the spool has no room for and nobody acted in but
the policy (`robot_edge.uplink.spool`). Heartbeats and what people see go first, then segments, in the spool's order,
then pictures.

The loop waits for no disk: two threads do what may have to, one with the spool, one with the files of weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from robot_edge.operators.sticky_commands import StickyCommands
from robot_edge.uplink.episode_recorder import EpisodeRecorder
from robot_edge.uplink.gateway_link import GatewayLink, PreviewSender
from robot_edge.uplink.relay_link import RelayLink, UploadRoute
from robot_edge.uplink.segment_sender import SegmentSender
from robot_edge.uplink.spool import Spool
from robot_edge.uplink.spool_thread import SpoolThread
from robot_edge.uplink.stop_link import StopLink
from robot_edge.uplink.weights.acting_client import ActingWeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from robot_edge.uplink.weights.shadow_link import ShadowLink
from wire.clock import Clock, clock_name
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    Deltas,
    EdgeEvent,
    EdgeStatus,
    FetchWeights,
    Hello,
    HelloAck,
    Job,
    Nack,
    OperatorCommand,
    ReintroduceRequest,
    Rejection,
    ShadowRequest,
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
    SwapReverted,
)
from wire.transport.channel import Channel
from wire.types import Mode
from wire.wakeup import Wakeup

log = logging.getLogger(__name__)

_SLICE_NS = 50_000_000
"""so long messages of one channel are handled before the next one is looked at"""
_CLOSE_S = 3.0
"""so long a disk that does not answer is waited for in the end"""


class Uplink:
    """`poll` does all there is to do now and returns.

    `start` has threads wait for the disk meanwhile. Without them `poll` does their work itself, before it returns: for
    tests, and robots within one process.
    """

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
        spool_bytes: int = 0,
        relay: RelayLink | None = None,
    ) -> None:
        """`directory` is this robot's own: spool and weight cache. `stops`: to the robot's host; without it control is
        told of stops. `spool_bytes`: as of `Spool`; `relay`: for weights and segments. Raises `StorageError`."""
        self.name = name
        self.spool = Spool(directory / "spool.sqlite", spool_bytes)
        """only its thread reads or writes it once there is one"""
        self.wakeup = Wakeup()
        """rings when a thread is done with something"""
        self._disk = SpoolThread(name, self.spool, clock)
        self.link = GatewayLink(name, gateway, clock)
        self.sender = SegmentSender(self.spool, self._disk, gateway, clock)
        self._route = UploadRoute(self.sender, gateway, self.link, relay)
        self.relay: RelaySource | None = None
        """of weights"""
        if relay is not None:
            self.relay = RelaySource(
                relay.channel, clock, relay.relay, lambda text: self._add_event("relay", text), lambda: relay.lost
            )
        self.weights = ActingWeightClient(directory / "weights", gateway, clock, relay=self.relay)
        self.weights.is_gateway_silent = lambda: self.link.silent
        self.shadow = ShadowLink(name, directory / "shadow", gateway, self.link, self.weights, clock, self.relay)
        """beside the version that acts; its `process` is to be set where there is one"""
        self.stopping = False
        self.status: EdgeStatus | None = None
        """the newest one, with what the uplink itself knows"""
        self.operator: Channel | None = None
        """to a process beside the robot that sees each status and event, and may command it without a gateway"""
        self.keys: Channel | None = None
        """from keys beside the robot, which command it likewise and see nothing"""
        self._recorder = EpisodeRecorder(name, self.spool, self._disk, control, clock, segment_steps)
        self._gateway, self._relay = gateway, relay
        self._control = control
        self._inference = inference
        self._clock = clock
        self._job: Job | None = None
        self._previews = PreviewSender(name, self.link)
        self._control_done = self._watched = False
        self._control_pid = self._inference_pid = 0
        self._last_status: EdgeStatus | None = None
        self._status_is_new = False
        self._gateway_fault = ""
        self._commands = StickyCommands()
        self._stops = stops
        self._threads = (self._disk, self.weights.tasks, self.shadow.weights.tasks)
        for thread in self._threads:
            thread.on_result = self.wakeup.ring

    def start(self) -> None:
        """Have threads wait for the disk."""
        for thread in self._threads:
            thread.start()

    @property
    def accepted(self) -> bool:
        """Whether the gateway has let this robot in, as far as is known."""
        return self.link.accepted

    @property
    def rejection(self) -> str:
        """Why the gateway does not, '' when it did not say."""
        return self.link.rejection

    @property
    def heard_ns(self) -> int:
        """When the gateway spoke last; before that, when this uplink began."""
        return self.link.heard_ns

    @property
    def drained(self) -> bool:
        """Control has finished and everything it recorded is acknowledged."""
        return self._control_done and not self._recorder.unspooled and len(self.spool) == 0

    def poll(self) -> bool:
        """Whether it stopped early, for the sake of what is due meanwhile, and should be called again at once."""
        self.wakeup.silence()
        early = False
        for channel, handle in (
            # What is not taken stays with control, which says that it cannot record.
            (None if self._recorder.overloaded else self._control, self._from_control),
            (self._inference, self._from_inference),
            (self.shadow.process, self.shadow.handle_process),
            (self._gateway, self._from_gateway),
            (self._relay, self._from_relay),
            (self.operator, self._from_operator),
            (self.keys, self._from_operator),
        ):
            if channel is not None:
                early |= self._handle_all(channel, handle)
        if self._stops is not None:
            for detail in self._stops.pop_refused():
                self._add_event("refused", detail)
        self._recorder.poll()
        if self.link.open and (detail := self._disk.report_dropped()):
            self._add_event("dropped", detail)
        self._disk.is_draining = self.stopping or self._control_done
        self._disk.poll()
        if self._status_is_new and self._last_status is not None:
            self._show_status(self._last_status)
        self.link.poll()
        self._route.poll()
        if self.weights.poll():
            self._send_weights()
        self.shadow.poll()
        return early

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
            self._show_status(self._last_status)
            self.link.poll()

    def close(self) -> None:
        """What the disk does not take within a few seconds is lost, and said to be."""
        ended = [thread.close(_CLOSE_S) for thread in self._threads]
        self._disk.poll()
        if self._recorder.unspooled:
            log.error("robot '%s': the disk did not take %d segments.", self.name, self._recorder.unspooled)
        if all(ended):
            # else a thread that still waits has them
            self.spool.close()
            self.wakeup.close()

    def _handle_all(self, channel: Channel, handle: Callable[[Message], None]) -> bool:
        """Whether there may be more, after so long that others should have their turn."""
        if (message := channel.recv()) is None:
            return False
        started_ns = self._clock.now_ns()
        while message is not None:
            handle(message)
            if self._clock.now_ns() - started_ns > _SLICE_NS:
                return True
            message = channel.recv()
        return False

    # --- from this computer ---------------------------------------------------------------------------------------

    def _from_control(self, message: Message) -> None:
        match message:
            case StepRecorded() | EpisodeStarted() | EpisodeEnded() | EpisodeJudged():
                self._recorder.handle_message(message)
            case FrameRecorded():
                jpeg = self._recorder.frame(message)
                driven = self._watched and self.status is not None and self.status.mode == Mode.human
                self._previews.show(message, jpeg, driven)
            case EdgeStatus():
                # of several that waited only the newest is news
                self._last_status, self._status_is_new = message, True
            case EdgeEvent():
                self._keep_event(message)
            case Hello():
                self.weights.check.spec_hash = message.spec.hash if message.spec is not None else ""
                self.link.introduce(msgspec.structs.replace(message, name=self.name, clock=clock_name()))
                self._control_done = False
                if self._control_pid not in (0, message.pid):
                    # Whoever recorded the running episode is gone.
                    self._recorder.break_off()
                self._control_pid = message.pid
                for waiting in (self._commands.state(), self._job, self.link.activated):
                    if waiting is not None:
                        self._control.send(waiting)
                # Also when nothing is wrong: an earlier uplink may have said that something was.
                self._recorder.report_storage()
                self._control.send(RequestPreviews(self._watched))
            case Stop():
                self._control_done = True
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _add_event(self, kind: str, detail: str) -> None:
        self._keep_event(EdgeEvent(self.name, self._clock.now_ns(), kind, detail))

    def _keep_event(self, event: EdgeEvent) -> None:
        self.link.add_event(event)
        if self.operator is not None:
            self.operator.send(event)

    def _show_status(self, status: EdgeStatus) -> None:
        self._status_is_new = False
        whole = msgspec.structs.replace(
            status,
            steps_recorded=self.spool.steps_recorded,
            steps_dropped=self.spool.dropped.steps,
            spooled=len(self.spool) + self._recorder.unspooled,
            detail="; ".join(filter(None, (status.detail, self._recorder.storage_fault))),
            control_pid=self._control_pid,
            inference_pid=self._inference_pid,
            uplink_pid=os.getpid(),
        )
        self.status = whole
        self.link.show_status(whole)
        if self.operator is not None:
            silent = "the gateway is silent" if self.link.silent else ""
            shown = "; ".join(filter(None, (whole.detail, silent)))
            self.operator.send(msgspec.structs.replace(whole, detail=shown))

    def _from_inference(self, message: Message) -> None:
        match message:
            case Hello():
                self._inference_pid = self.shadow.inference_pid = message.pid
                self._send_weights()
            case VersionActivated():
                self.weights.on_activated(message.number)
                self._control.send(message)
                self.link.send_activation(message)
            case SwapReverted(version=version, damaged=damaged):
                self.weights.on_reverted(version, "damaged_file" if damaged else "half_loaded")
            case EdgeEvent():
                self._keep_event(message)
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _watch(self, watched: bool) -> None:
        """Somebody looks at the page, or nobody does any more."""
        if watched != self._watched:
            self._watched = watched
            self._control.send(RequestPreviews(watched))

    # --- to and from the gateway ----------------------------------------------------------------------------------

    def _from_gateway(self, message: Message) -> None:
        if self.link.on_message():
            self.sender.on_heard_again()
        match message:
            case Ack(segments=segments, quarantined=quarantined):
                if quarantined:
                    log.error("robot '%s': the gateway put aside %s: not valid, see its log.", self.name, quarantined)
                self._on_done((*segments, *quarantined))
                self._route.on_gateway_credit(message.credit_bytes)
                self._gateway_fault = ""
            case Nack(reason=reason):
                self.sender.on_refused()
                if reason != self._gateway_fault:
                    log.warning("robot '%s': the gateway cannot store now: %s", self.name, reason)
                self._gateway_fault = reason
            case VersionAvailable():
                self.weights.handle_message(message)
            case Deltas() | WeightBytes() | Rejection(request=FetchWeights()):
                self.weights.handle_message(message)
                self.shadow.handle_weights(message)
            case ShadowRequest():
                self.shadow.handle_request(message)
            case Job():
                self._job = message
                self._control.send(message)
            case OperatorCommand():
                at_ns = self.link.clock.ours(message.captured_ns) if message.captured_ns else 0
                self._pass_on(msgspec.structs.replace(message, captured_ns=at_ns, beside=False))
            case HelloAck() | ReintroduceRequest() | Rejection():
                if self.link.handle_message(message):
                    self._route.on_gateway_connected()
                if isinstance(message, HelloAck):
                    self._route.on_gateway_credit(message.credit_bytes)
                    self.weights.check.key = message.signing_key
                    self._watch(message.watched)
                    self._previews.pause_s = message.preview_s
                    if self._stops is not None:
                        self._stops.follow(message.stop_port)
            case Stop():
                self.stop()
            case _:
                log.warning("uplink of '%s' does not understand %s.", self.name, type(message).__name__)

    def _from_relay(self, message: Message) -> None:
        assert self._relay is not None
        self._relay.on_message()
        if isinstance(message, WeightBytes):
            self.weights.add_part(message, by_relay=True)
            self.shadow.handle_weights(message, by_relay=True)
        elif isinstance(message, Rejection) and message.request is not None:
            self.weights.on_relay_refused(message.request, message.reason)
            self.shadow.weights.on_relay_refused(message.request, message.reason)
        elif isinstance(message, Ack):
            self._on_done(self._relay.acknowledged(message))
        elif not self._relay.handle_message(message):
            log.warning("robot '%s': the relay sent what is not for it: %.200r", self.name, message)

    def _on_done(self, segments: tuple[str, ...]) -> None:
        """Somebody else has these on a disk."""
        self._disk.forget(segments)
        self.sender.on_answer(segments)

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

    def _send_weights(self) -> None:
        if self.weights.ready is not None:
            version, path = self.weights.ready
            self._inference.send(LoadWeights(version, str(path)))
