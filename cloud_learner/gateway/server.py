"""The gateway: the one process of the cloud that robots and trainers connect to.

It stores, serves weights, hands out jobs and forwards people's commands; it never trains. Killed at any point and
started again on the same data directory it goes on: what was acknowledged is on disk, and every peer introduces itself
anew.

    page, teleoperators ──► loop ──► robots          people first, between short slices of everything else
    robots, trainers ─────► loop ──► storage thread  segments as they came, and all that the ledger is to know
                                └──► weights thread  versions in and out

The loop never waits: what may have to wait for a disk, a database or an object store is done in the threads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.dispatcher import CALLS, Dispatcher
from cloud_learner.dispatch.notes import Note
from cloud_learner.gateway import peer_checks
from cloud_learner.gateway.commands import CommandForwarder
from cloud_learner.gateway.held_pictures import HeldPictures
from cloud_learner.gateway.introductions import Introductions
from cloud_learner.gateway.metrics import CountedChannel, GatewayMetrics
from cloud_learner.gateway.peer_clock import PeerClocks
from cloud_learner.gateway.peers import AuthenticatedServerChannel, KnownPeer, MessageRate, event_budget, is_wish
from cloud_learner.gateway.segment_intake import SegmentIntake
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.storage_thread import StorageThread
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.gateway.versions.version_service import VersionService
from cloud_learner.operator.view import FleetView
from cloud_learner.rollout.config import RolloutConfig
from hal.resource.admitted_robots import AdmittedRobots
from wire.clock import Clock, clock_name
from wire.codec import Undecoded, decode
from wire.errors import DiskFullError, FleetError, MessageTooLargeError, ProtocolError, StorageError
from wire.identity.permissions import MAY_SEND, Port
from wire.identity.refusals import RefusalReason
from wire.identity.sealing import SealOpener
from wire.messages import Message
from wire.messages.fleet import ChangeVersions, Response
from wire.messages.gateway import (
    EdgeEvent,
    EdgeStatus,
    Evaluate,
    Evaluation,
    FetchDeltas,
    FetchPictures,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    OperatorCommand,
    PicturesGone,
    Preview,
    Publish,
    ReintroduceRequest,
    Rejection,
    SealedSegment,
    Segment,
    ShadowReport,
    TrainerStatus,
    VersionActivated,
    WeightBytes,
)
from wire.task_thread import TaskThread
from wire.types import CALLERS, Role
from wire.wakeup import Wakeup

log = logging.getLogger(__name__)

_SLICES = 32
_MESSAGES_PER_SLICE = 16
_SLICE_S = 0.002
"""people's commands are looked at so often at least, whatever else there is"""
_RECORDED = frozenset(Role) - frozenset(CALLERS)
"""roles that the ledger knows by name"""
_LOOK_S, _LONGEST_LOOK_S, _LOOK_REST = 0.005, 0.05, 10
"""between two looks at all robots: so many times as long as one took"""
_UNDECODED: frozenset[type[Message]] = frozenset({Segment, SealedSegment})
_TOO_OFTEN = "this key asks for more than people do. Wait a moment, and ask again."
_PREVIEWS_PER_S = 200
"""pictures for people, of all robots together: each costs the loop as much as a status"""
_PREVIEW_S, _UNWATCHED_PREVIEW_S = 0.1, 1.0
"""between two of a camera at the least; while nobody looks, so that a page that is opened has something to show"""
_CLOSE_S = 10.0
"""for what waits to be stored when the gateway ends"""


class Gateway:
    """Everybody's messages come in here; `poll` is called in a loop.

    `start` has threads store meanwhile. Without them `poll` does their work itself, before it returns: for tests, and
    for fleets within one process.
    """

    def __init__(
        self,
        channel: AuthenticatedServerChannel,
        ledger: Ledger,
        ingest: Ingest,
        weights: WeightStore,
        view: FleetView,
        robots: AdmittedRobots,
        clock: Clock,
        wall_ns: Callable[[], int] = time.time_ns,
        stops: StopServer | None = None,
        rollout: RolloutConfig | None = None,
        seals: SealOpener | None = None,
    ) -> None:
        """`robots`: those that can work here, and on what; others are refused with what fits. `stops`: their own way;
        without it they go like the rest. `rollout`: how new versions come to act on all robots; `seals`: as of
        `StorageThread`.

        Goes on where the last gateway was, from the ledger. Raises `StorageError`.
        """
        self._peers: dict[str, KnownPeer] = {}
        self.refused: Counter[str] = Counter()
        """messages of known keys that nothing came of, by `RefusalReason`"""
        refusals = [self.refused, channel.refused, *([stops.refused] if stops is not None else [])]
        self.metrics = GatewayMetrics(view, ledger, self._peers, refusals, clock)
        self._channel = channel = CountedChannel(channel, self.metrics)
        self._ledger, self._view, self._robots, self._clock, self._wall_ns = ledger, view, robots, clock, wall_ns
        self._kept, self._told, self._rate = event_budget(), event_budget(), MessageRate()
        self._next_look_s = 0.0
        self.wakeup = Wakeup()
        """rings when there is something to do that no channel tells of"""
        self._intake = SegmentIntake(channel, self._peers, view, self.metrics, clock, self.refused)
        on_step_s = self.metrics.commit_s.observe
        told = self._intake.on_answer, self._on_storage_fault, on_step_s
        self._storage = StorageThread(ledger, ingest, *told, seals, self._intake.offset_ns)
        self._intake.storage = self.metrics.storage = self._storage
        rollout = rollout or RolloutConfig()
        self._pictures = HeldPictures(channel, self._peers, ledger, self._storage, clock)
        self._versions = VersionService(
            channel, self._peers, view, ledger, weights, self._storage, clock, self.refused, rollout
        )
        self._rollout = self._versions.rollout
        self._intake.on_stored = self._rollout.on_segment
        self._intake.on_disk_full = partial(self._rollout.prune, full=True)
        self._threads: tuple[TaskThread, ...] = (self._storage, *self._versions.threads)
        self._clocks = PeerClocks(self._store_clock_offset, self._tell, wall_ns)
        self._commands = CommandForwarder(channel, stops, view, clock, self._add_event)
        ways = self._commands.send, self._versions.announce, channel.role
        self._dispatcher = Dispatcher(ledger, self._storage, view, robots, *ways, wall_ns, clock.now_ns())
        self._commands.dispatcher = self._intake.dispatcher = self._dispatcher
        self._versions.follow(self._dispatcher)
        counted = self.refused, self._told, self._clocks.forget
        self._introductions = Introductions(channel, self._peers, view, robots, clock, *counted)
        for thread in self._threads:
            thread.on_result = self.wakeup.ring
        view.on_command = self.wakeup.ring

    def start(self) -> None:
        """Have threads do what may have to wait."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Store what has come, if storage takes it, and acknowledge that."""
        self.poll()
        ended = [thread.close(_CLOSE_S) for thread in self._threads]
        while self._deliver():
            pass
        self._view.on_command = lambda: None
        if all(ended):
            self.wakeup.close()
        else:
            # a thread that still waits may ring it
            log.error("not all that came could be stored: %s", self._storage.segment_fault)

    def poll(self) -> None:
        """Handle what is there, and hand out what is to be handed out; it never waits."""
        self.wakeup.silence()
        self._commands.poll()
        for _ in range(_SLICES):
            went_on = self._receive()
            if not went_on:
                # not before: what came together is stored together
                for thread in self._threads:
                    went_on |= thread.inline and thread.step()
            went_on = self._deliver() or went_on
            self._commands.poll()
            if not went_on:
                break
        now_s = time.monotonic()
        if self._storage.inline or now_s >= self._next_look_s:
            self._look_around()
            # it looks at all robots: not as often as something comes, and the seldomer the more there are
            rest_s = _LOOK_REST * (time.monotonic() - now_s)
            self._next_look_s = now_s + min(max(rest_s, _LOOK_S), _LONGEST_LOOK_S)

    def _look_around(self) -> None:
        self._intake.poll()
        for name, reason in self._channel.rejections():
            self._view.add_event("refused", f"refused: {reason}", name)
            self._add_event(name, "refused", reason)
        self._dispatcher.poll(self._clock.now_ns())
        self._rollout.poll()
        self._pictures.poll()

    def _slice(self) -> Iterator[None]:
        """So many turns as people can wait for; in one thread as many, however fast this computer is."""
        until_s = time.monotonic() + _SLICE_S
        for _ in range(_MESSAGES_PER_SLICE):
            yield
            if not self._storage.inline and time.monotonic() >= until_s:
                return

    def _receive(self) -> bool:
        """Handle some of what came; whether there was anything."""
        for _ in self._slice():
            if (received := self._channel.recv_unless(_UNDECODED)) is None:
                return False
            with self._reported(*received):
                self._handle(*received)
        return True

    def _deliver(self) -> bool:
        """Handle some of what came back from the threads; whether there was anything."""
        delivered = False
        for _ in self._slice():
            result = next((one for thread in self._threads if (one := thread.pop_result()) is not None), None)
            if result is None:
                return delivered
            delivered = True
            try:
                result()
            except Exception:
                self.refused[RefusalReason.failed] += 1
                log.exception("what came of something that was stored could not be handled.")
        return True

    @contextlib.contextmanager
    def _reported(self, peer: str, message: Message | Undecoded) -> Iterator[None]:
        """Whatever one peer sends, the others are served."""
        kind = message.kind if isinstance(message, Undecoded) else type(message)
        try:
            yield
        except (FleetError, OverflowError) as error:  # a number that no database holds
            self.refused[RefusalReason.rejected] += 1
            self._channel.send(peer, Rejection(str(error)))
            if self._told.take(peer, self._clock.now_ns()):
                log.error("a %s of '%s': %s", kind.__name__, peer, error)
                self._view.add_event("error", str(error), peer)
        except Exception:
            self.refused[RefusalReason.failed] += 1
            log.exception("a %s of '%s' could not be handled.", kind.__name__, peer)
            self._view.add_event("error", f"a {kind.__name__} could not be handled; see the log", peer)

    # --- peers ----------------------------------------------------------------------------------------------------

    def _handle(self, peer: str, message: Message | Undecoded) -> None:
        role = self._channel.role(peer)
        kind = message.kind if isinstance(message, Undecoded) else type(message)
        known = self._peers.get(peer)
        if role not in MAY_SEND[Port.messages].get(kind, ()):
            self._drop(peer, role, message, RefusalReason.wrong_role)
        elif isinstance(message, Undecoded):
            if known is None or known.rejected:
                self._drop(peer, role, message, RefusalReason.no_hello)
            else:
                known.last_message_ns = self._clock.now_ns()
                self._intake.submit(peer, message)
        elif self._rate.take(peer, message, self._clock.now_ns()):
            if isinstance(message, Hello):
                self._handle_hello(peer, role, message)
            elif known is None or known.rejected:
                self._drop(peer, role, message, RefusalReason.no_hello)
            else:
                self._handle_known(peer, role, known, message)
        else:
            self.refused[RefusalReason.too_often] += 1
            if is_wish(message):
                refused = f"{kind.__name__}: {_TOO_OFTEN}"
                self._channel.send(peer, Response(getattr(message, "call", 0), refused=refused))

    def _handle_known(self, peer: str, role: str, known: KnownPeer, message: Message) -> None:
        now_ns = known.last_message_ns = self._clock.now_ns()
        match message:
            case EdgeStatus(robot=robot) | Preview(robot=robot) if robot == peer and role == Role.demonstrator:
                log.debug("nobody watches the demonstrator '%s' or takes it over.", peer)
            case EdgeStatus(robot=robot) if robot == peer:
                self._view.update_status(message)
                self._rollout.on_status(message)
                self._commands.show(peer, message.stop)
                self._dispatcher.on_status(message, now_ns)
            case Preview(robot=robot) if robot == peer:
                peer_checks.check_preview(message, known.spec)
                self._view.update_preview(message)
            case EdgeEvent(robot=robot) if robot == peer and not self._kept.take(peer, now_ns):
                self.refused[RefusalReason.too_often] += 1
            case EdgeEvent(robot=robot) if robot == peer:
                kind, detail = peer_checks.event_text(message)
                self._view.add_event(kind, detail, robot)
                self._add_event(robot, kind, detail)
                self._dispatcher.clients.forward(message)
            case VersionActivated(robot=robot) if robot == peer:
                self._versions.note_activation(peer, message, known.offset_ns or 0)
            case ShadowReport(robot=robot) if robot == peer:
                self._rollout.on_shadow(message)
            case Heartbeat(sent_ns=sent_ns):
                known.offset_ns = self._clocks.measure(peer, known.clock, message, now_ns)
                self._versions.when_received(peer, partial(self._send_hello_ack, peer, sent_ns, now_ns))
            case ChangeVersions():
                self._rollout.handle_call(peer, message, partial(self._channel.send, peer))
            case _ if isinstance(message, CALLS):
                self._dispatcher.handle_call(peer, message, now_ns, partial(self._channel.send, peer))
            case OperatorCommand():
                self._commands.forward_teleop_command(peer, message)
            case FetchWeights() | FetchDeltas():
                self._versions.serve(peer, message)
            case FetchPictures() | PicturesGone():
                self._pictures.handle_message(peer, message)
            case Publish():
                self._versions.begin(peer, message)
            case WeightBytes():
                self._versions.receive(peer, message)
            case TrainerStatus():
                self._view.update_trainer(message)
            case Evaluate(number=number):
                self._versions.announce_to_measure(peer, number)
            case Evaluation():
                self._versions.note_evaluation(message, self._wall_ns())
            case _:  # it speaks for another robot
                self._drop(peer, role, message, RefusalReason.wrong_name)

    def _drop(self, peer: str, role: str, message: Message | Undecoded, reason: RefusalReason) -> None:
        """What its key gives no right to send, or not yet: counted, and told while a person can read it."""
        if isinstance(message, Undecoded):
            try:
                message = decode(message.data)
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                self._channel.send(peer, Rejection(str(error)))
                return
        self.refused[reason] += 1
        if reason == RefusalReason.no_hello:
            self._channel.send(peer, ReintroduceRequest())
        elif self._told.take(peer, self._clock.now_ns()):
            log.error("dropped a %s of '%s', a %s (%s).", type(message).__name__, peer, role, reason)

    def _handle_hello(self, peer: str, role: str, hello: Hello) -> None:
        now_ns = self._clock.now_ns()
        if (admitted := self._introductions.admit(peer, role, hello, self._hello_ack(now_ns, now_ns))) is None:
            return
        peer, known = admitted
        if role in _RECORDED:
            run = partial(self._ledger.see_robot, peer, hello.spec, hello.clock, now_ns)
            self._storage.submit(Note(run, key=f"hello {peer}", ordered=True))
        known.offset_ns = self._clocks.measure(peer, hello.clock, hello, now_ns)

        def welcome() -> None:
            self._send_hello_ack(peer, hello.sent_ns, now_ns)
            self._versions.on_hello(peer, role)

        if role == Role.edge:
            self._view.add_robot(peer, hello.spec)
            self._dispatcher.on_hello(peer, hello, now_ns, welcome)
        else:
            welcome()

    def _store_clock_offset(self, peer: str, offset_ns: int, now_ns: int) -> None:
        run = partial(self._ledger.set_clock_offset, peer, offset_ns, now_ns, self._peers[peer].clock)
        self._storage.submit(Note(run, key=f"offset {peer}"))

    def _tell(self, robot: str, kind: str, text: str) -> None:
        self._view.add_event(kind, text, robot)
        self._add_event(robot, kind, text)

    def _send_hello_ack(self, peer: str, echo_ns: int, received_ns: int) -> None:
        self._channel.send(peer, self._hello_ack(echo_ns, received_ns))

    def _hello_ack(self, echo_ns: int, received_ns: int) -> HelloAck:
        watched, intake = self._view.pages > 0, self._intake
        least_s = _PREVIEW_S if watched else _UNWATCHED_PREVIEW_S
        preview_s = max(least_s, intake.recorders * self._robots.most_cameras / _PREVIEWS_PER_S)
        fixed = self._commands.stop_port, intake.credit_bytes, preview_s, self._versions.signing_key
        return HelloAck(clock_name(), received_ns, echo_ns, watched, *fixed)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _add_event(self, robot: str, kind: str, detail: str) -> None:
        """Enter an event in the ledger, sooner or later."""
        run = partial(self._ledger.add_event, self._clock.now_ns(), robot, kind, detail)
        self._storage.submit(Note(run, droppable=True))

    def _on_storage_fault(self, error: StorageError) -> None:
        """Notes could not be stored; they are tried again."""
        self.metrics.storage_faults.inc()
        if isinstance(error, DiskFullError):
            self._rollout.prune(full=True)
