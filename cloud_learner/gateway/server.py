"""The gateway: the one process of the cloud that robots and trainers connect to.

It stores, serves weights, hands out jobs and forwards people's commands; it never trains. Killed at any point and
started again on the same data directory it goes on: what was acknowledged is on disk, and every peer introduces itself
anew.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from cloud_learner.buffer.check import segment_bytes
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.dispatcher import CALLS, Dispatcher
from cloud_learner.gateway import peer_checks
from cloud_learner.gateway.commands import CommandForwarder
from cloud_learner.gateway.ingest import Ingest, IngestOutcome, IngestResult
from cloud_learner.gateway.metrics import CountedChannel, GatewayMetrics, RejectionKind
from cloud_learner.gateway.peers import AuthenticatedServerChannel, EventBudget, KnownPeer, key_mismatch
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.gateway.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from wire.clock import Clock, clock_name
from wire.errors import FleetError, StorageError
from wire.identity.permissions import Port, may_send
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeEvent,
    EdgeStatus,
    Evaluate,
    Evaluation,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    OperatorCommand,
    Preview,
    Publish,
    Published,
    ReintroduceRequest,
    Rejection,
    Segment,
    SegmentCommitted,
    TrainerStatus,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.channel import PEER_SUFFIX
from wire.types import CALLERS, EpisodeSource, PolicyVersion, RobotSpec, Role

log = logging.getLogger(__name__)

_SUBSCRIBERS = (Role.edge, Role.evaluator, Role.thinker)
"""roles that versions are announced to"""

_MESSAGES_PER_POLL = 200
_SEGMENTS_AT_ONCE = 64
_BYTES_AT_ONCE = 32 * 1024 * 1024
_FORGET_NS = 600_000_000_000
_ALIVE_NS = 3_000_000_000
"""a robot's process that sent a message so lately is there; it sends at least one a second"""


class Gateway:
    """Everybody's messages come in here; `poll` is called in a loop."""

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        ledger: Ledger,
        ingest: Ingest,
        weights: WeightStore,
        view: FleetView,
        tasks: Sequence[str],
        spec: RobotSpec,
        clock: Clock,
        wall_ns: Callable[[], int] = time.time_ns,
        stops: StopServer | None = None,
    ) -> None:
        """`tasks`: what the fleet practises when nobody asks for anything else; `spec`: of the robots its policy is
        made for, others are refused with the difference. `stops`: their own way; without it they go like the rest."""
        self._peers: dict[str, KnownPeer] = {}
        self.metrics = GatewayMetrics(view, ledger, self._peers, clock)
        self._channel = channel = CountedChannel(channel, self.metrics)
        self._ledger = ledger
        self._ingest = ingest
        self._weights = weights
        self._view = view
        self._spec = spec
        self._clock = clock
        self._wall_ns = wall_ns
        self._announced_ns: dict[int, int] = {}
        self._segments: list[tuple[str, Segment]] = []
        self._segment_bytes = 0
        self._storage_fault = ""
        self._rejections: dict[str, str] = {}
        """by the name of a key: why it was turned away last"""
        self.refused: Counter[str] = Counter()
        """messages of known keys that nothing came of, by reason"""
        self._kept, self._told = EventBudget(), EventBudget()
        self._commands = CommandForwarder(channel, stops, view, clock, self._add_event)
        send = self._commands.send
        self._dispatcher = Dispatcher(ledger, view, tasks, send, self._announce, channel.role, wall_ns, clock.now_ns())
        self._commands.dispatcher = self._dispatcher

    def close(self) -> None:
        """End what goes on beside `poll`."""
        self._weights.close()

    def poll(self) -> None:
        """Handle what is there, and hand out what is to be handed out; it never waits."""
        self._commands.poll_stops()
        for _ in range(_MESSAGES_PER_POLL):
            if (received := self._channel.recv()) is None:
                break
            with self._reported(*received):
                self._handle(*received)
        self._store_segments()
        for name, reason in self._channel.rejections():
            self._view.add_event("refused", f"refused: {reason}", name)
            self._add_event(name, "refused", reason)
        for version in self._weights.pop_arrived():
            self._show_version(version)
        self._commands.poll_stops()
        self._commands.poll_page()
        self._dispatcher.poll(self._clock.now_ns())

    @contextlib.contextmanager
    def _reported(self, peer: str, message: Message) -> Iterator[None]:
        """Whatever one peer sends, the others are served."""
        try:
            yield
        except StorageError as error:
            self.refused["storage"] += 1
            # Reported once per change, not once per message: a full disk stays full for a while.
            if str(error) != self._storage_fault:
                log.error("%s", error)
                self._view.add_event("storage", str(error), peer)
            self._storage_fault = str(error)
            self.metrics.storage_faults.inc()
            self._channel.send(peer, Nack(str(error)))
        except (FleetError, OverflowError) as error:  # a number that no database holds
            self.refused["rejected"] += 1
            self._channel.send(peer, Rejection(str(error)))
            if self._told.take(peer, self._clock.now_ns()):
                log.error("a %s of '%s': %s", type(message).__name__, peer, error)
                self._view.add_event("error", str(error), peer)
        except Exception:
            self.refused["failed"] += 1
            log.exception("a %s of '%s' could not be handled.", type(message).__name__, peer)
            self._view.add_event("error", f"a {type(message).__name__} could not be handled; see the log", peer)

    # --- peers ----------------------------------------------------------------------------------------------------

    def _handle(self, peer: str, message: Message) -> None:
        role = self._channel.role(peer)
        if not may_send(Port.messages, role, message):
            self._drop(peer, role, message, RefusalReason.wrong_role)
            return
        if isinstance(message, Hello):
            # what it gets to do depends on what it brought
            self._store_segments()
            self._handle_hello(peer, role, message)
            return
        known = self._peers.get(peer)
        if known is None or known.rejected:
            self.refused["unknown"] += 1
            self._channel.send(peer, ReintroduceRequest())
            return
        now_ns = known.last_message_ns = self._clock.now_ns()
        match message:
            case Segment():
                self._segments.append((peer, message))
                self._segment_bytes += segment_bytes(message)
                if len(self._segments) >= _SEGMENTS_AT_ONCE or self._segment_bytes >= _BYTES_AT_ONCE:
                    self._store_segments()
            case EdgeStatus(robot=robot) | Preview(robot=robot) if robot == peer and role == Role.demonstrator:
                log.debug("nobody watches the demonstrator '%s' or takes it over.", peer)
            case EdgeStatus(robot=robot) if robot == peer:
                self._view.update_status(message)
                self._commands.show(peer, message.stop)
                self._dispatcher.on_status(message, now_ns)
            case Preview(robot=robot) if robot == peer:
                peer_checks.check_preview(message, self._spec)
                self._view.update_preview(message)
            case EdgeEvent(robot=robot) if robot == peer and not self._kept.take(peer, now_ns):
                self.refused["too_many_events"] += 1
            case EdgeEvent(robot=robot) if robot == peer:
                kind, detail = peer_checks.event_text(message)
                self._view.add_event(kind, detail, robot)
                self._add_event(robot, kind, detail)
                self._dispatcher.clients.forward(message)
            case VersionActivated(robot=robot) if robot == peer:
                self._note_activation(peer, message)
            case Heartbeat(sent_ns=sent_ns):
                self._measure_clock(peer, known, sent_ns)
                self._channel.send(peer, self._hello_ack(sent_ns))
            case _ if isinstance(message, CALLS):
                self._channel.send(peer, self._dispatcher.handle_call(peer, message, now_ns))
            case OperatorCommand():
                self._commands.forward_teleop_command(peer, message)
            case FetchWeights() if (part := self._weights.serve(message)) is not None:
                self._channel.send(peer, part)
            case FetchWeights():
                log.debug("'%s' asks for version %d, which is on its way here.", peer, message.number)
            case Publish():
                if (version := self._weights.begin(message)) is not None:
                    self._channel.send(peer, Published(version.number))
            case WeightBytes():
                self._receive_weights(peer, message)
            case TrainerStatus():
                self._view.update_trainer(message)
            case Evaluate(number=number):
                self._announce(peer, number)
            case Evaluation():
                peer_checks.check_evaluation(message)
                if self._ledger.add_evaluation(message, self._wall_ns()):
                    self._view.add_evaluation(message)
            case _:
                # It speaks for another robot.
                self._drop(peer, role, message, RefusalReason.wrong_name)

    def _drop(self, peer: str, role: str, message: Message, reason: RefusalReason) -> None:
        """What its key gives no right to send: counted, and told while a person can read it."""
        self.metrics.on_rejected(RejectionKind.wrong_role)
        self.refused[reason] += 1
        if self._told.take(peer, self._clock.now_ns()):
            log.error("dropped a %s of '%s', a %s (%s).", type(message).__name__, peer, role, reason)

    def _handle_hello(self, peer: str, role: str, hello: Hello) -> None:
        peer_checks.check_hello(hello)
        now_ns = self._clock.now_ns()
        name = peer.partition(PEER_SUFFIX)[0]
        is_client = role in CALLERS
        if (mismatch := key_mismatch(name, role, hello)) is not None:
            self.refused[mismatch.reason] += 1
            self._reject(peer, mismatch.text)
            return
        if peer != name and not is_client:
            if reason := self._duplicate_name(peer, name, hello, now_ns):
                self._reject(peer, reason)
                return
            peer = self._channel.adopt(peer)
        reason = peer_checks.spec_mismatch(peer, hello, self._spec)
        if role == Role.edge:
            reason = reason or self._dispatcher.task_mismatch(peer, hello) or self._dispatcher.held_elsewhere(peer)
        if reason:
            self._reject(peer, reason)
            return
        if is_client:
            self._forget_silent_clients(now_ns)
        before = self._peers.get(peer)
        known = KnownPeer(role, hello.clock, hello.pid, hello.site, now_ns, before.offset_ns if before else None)
        self._peers[peer] = known
        self._rejections.pop(name, None)
        if not is_client:
            self._ledger.see_robot(peer, hello.spec, hello.clock, now_ns)
        self._measure_clock(peer, known, hello.sent_ns)
        self._channel.send(peer, self._hello_ack(hello.sent_ns))
        if role == Role.edge:
            self._view.add_robot(peer, hello.spec)
            self._dispatcher.on_hello(peer, hello, now_ns)
        if role in _SUBSCRIBERS:
            self._announce(peer, None)
        if before is None or before.rejected:
            log.info("%s '%s' is here.", role, peer)

    def _forget_silent_clients(self, now_ns: int) -> None:
        """Each command line that somebody runs is a peer of its own: those long silent are not kept."""
        for peer, known in list(self._peers.items()):
            if known.role in CALLERS and now_ns - known.last_message_ns > _FORGET_NS:
                del self._peers[peer]

    def _duplicate_name(self, peer: str, name: str, hello: Hello, now_ns: int) -> str:
        """Why the second connection of a name is not let in, '' for the same process or when the first is gone."""
        first = self._peers.get(name)
        if first is None or (first.clock, first.pid) == (hello.clock, hello.pid):
            return ""
        # Says nothing new to a peer that has one; a connection that is gone does not take it.
        probe = self._hello_ack(now_ns)
        if now_ns - first.last_message_ns >= _ALIVE_NS or not self._channel.send(name, probe):
            return ""
        there = peer_checks.location(self._channel.address(name), first.pid, first.site)
        here = peer_checks.location(self._channel.address(peer), hello.pid, hello.site)
        return peer_checks.second_of_a_name(name, there, here)

    def _reject(self, peer: str, reason: str) -> None:
        """Say no, and show it to people when it is news: a peer goes on asking."""
        if (known := self._peers.get(peer)) is not None:
            known.rejected = True
        name = peer.partition(PEER_SUFFIX)[0]
        if self._rejections.get(name) != reason and self._told.take(name, self._clock.now_ns()):
            self._rejections[name] = reason
            log.error("'%s' is rejected: %s", peer, reason)
            self._view.add_event("refused", f"refused: {reason}", name)
        self.refused["hello"] += 1
        self._channel.send(peer, Rejection(reason))

    def _measure_clock(self, peer: str, known: KnownPeer, sent_ns: int) -> None:
        """Offset = gateway time - robot time; the smallest sample is the one that waited least on its way."""
        offset_ns = 0
        if known.clock != clock_name():
            sample_ns = self._clock.now_ns() - peer_checks.check_time(sent_ns)
            offset_ns = sample_ns if known.offset_ns is None else min(sample_ns, known.offset_ns)
        if known.offset_ns != offset_ns:
            known.offset_ns = offset_ns
            if self._ledger.robot(peer) is not None:
                self._ledger.set_clock_offset(peer, offset_ns, self._clock.now_ns())

    # --- data in --------------------------------------------------------------------------------------------------

    def _store_segments(self) -> None:
        """Store what was received since the last time with one flush, then acknowledge it."""
        segments, self._segments, self._segment_bytes = self._segments, [], 0
        if not segments:
            return
        with self.metrics.commit_s.time():
            results = self._ingest.accept_all(segments, self._clock.now_ns())
        for (peer, segment), result in zip(segments, results, strict=True):
            self.metrics.on_ingested(segment, result)
            with self._reported(peer, segment):
                self._acknowledge(peer, segment, result)

    def _acknowledge(self, peer: str, segment: Segment, result: IngestResult) -> None:
        if result.outcome == IngestOutcome.retry:
            self._view.add_event("storage", result.reason, peer)
            self._channel.send(peer, Nack(result.reason))
            return
        self._storage_fault = ""
        if result.outcome == IngestOutcome.quarantined:
            self._view.add_event("quarantine", result.reason, peer)
            self._channel.send(peer, Ack((), (segment.id,)))
            return
        # Counted before it is acknowledged: what is not counted yet when this process dies comes again.
        self._dispatcher.on_segment_stored(segment, result.outcome == IngestOutcome.duplicate, self._clock.now_ns())
        self._channel.send(peer, Ack((segment.id,)))
        if result.outcome == IngestOutcome.stored:
            if segment.episode.source != EpisodeSource.evaluation:
                committed = SegmentCommitted(result.row, segment)
                for name in self._peers_with(Role.trainer):
                    # It need not read the segment from disk; one that cannot take it now does.
                    self._channel.send(name, committed)
            online = segment.episode.source == EpisodeSource.online
            self._view.add_stored_steps(segment.steps, result.latency_s if online else None)
            if segment.last:
                episode = self._ledger.episode(segment.episode.id)
                human_steps = episode.human_steps if episode else 0
                version = int(segment.version.max(initial=0))
                self._view.add_episode(
                    peer, segment.episode.task, segment.outcome, human_steps, version=version, practised=online
                )

    # --- weights out ----------------------------------------------------------------------------------------------

    def _receive_weights(self, peer: str, part: WeightBytes) -> None:
        version = self._weights.receive(part)
        if version is None:
            return
        self._channel.send(peer, Published(version.number))
        self._show_version(version)

    def _show_version(self, version: PolicyVersion) -> None:
        """A version is here, published at this gateway or at another one."""
        self._view.add_version(version)
        self._announced_ns[version.number] = self._clock.now_ns()
        for name in self._peers_with(*_SUBSCRIBERS):
            self._announce(name, version.number)

    def _announce(self, peer: str, number: int | None) -> None:
        pinned = self._dispatcher.pinned_version(peer)
        if pinned and number not in (None, pinned):
            # It evaluates an older version: newer ones are announced to it when it has done so.
            return
        number = pinned or number
        row = self._ledger.newest_version() if number is None else self._ledger.version(number)
        if row is None:
            if number is not None:
                self._channel.send(peer, Rejection(f"there is no policy version {number}."))
            return
        announced_ns = self._announced_ns.setdefault(row.version.number, self._clock.now_ns())
        self._channel.send(peer, VersionAvailable(row.version, announced_ns))

    def _note_activation(self, peer: str, activated: VersionActivated) -> None:
        announced_ns = self._announced_ns.get(activated.number)
        if announced_ns is None:
            return
        activated_ns = peer_checks.check_time(activated.applied_ns) + (self._peers[peer].offset_ns or 0)
        if self._ledger.note_applied(peer, activated.number, announced_ns, activated_ns):
            self._view.add_activation((activated_ns - announced_ns) / 1e9)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _hello_ack(self, sent_ns: int) -> HelloAck:
        watched = self._view.pages > 0
        return HelloAck(clock_name(), self._clock.now_ns(), sent_ns, watched, self._commands.stop_port)

    def _peers_with(self, *roles: str) -> list[str]:
        return [name for name, known in self._peers.items() if known.role in roles and not known.rejected]

    def _add_event(self, robot: str, kind: str, detail: str) -> None:
        """Enter an event in the ledger; a full disk must not keep a command or a rejection from its effect."""
        try:
            self._ledger.add_event(self._clock.now_ns(), robot, kind, detail)
        except StorageError as error:
            self.metrics.storage_faults.inc()
            log.error("the event '%s' of '%s' could not be noted: %s", kind, robot, error)
