"""The gateway: the one door of the cloud. It stores, serves weights, hands out jobs and passes people's commands on.

It never trains. Killed at any point and started again on the same data directory it goes on: what was acknowledged is
on disk, and every peer introduces itself anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.dispatcher import CALLS, Dispatcher
from cloud_learner.gateway.ingest import Ingest
from cloud_learner.gateway.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from wire.clock import Clock, clock_name
from wire.errors import FleetError, RejectedError, SpecMismatchError, StorageError
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
from wire.transport.channel import PEER_SUFFIX, ServerChannel
from wire.types import CALLERS, RobotSpec, Role

log = logging.getLogger(__name__)

_FOLLOW = (Role.edge, Role.evaluator, Role.thinker)
"""roles that hear of versions"""

_MESSAGES_PER_TURN = 200
_FORGET_NS = 600_000_000_000
_ALIVE_NS = 3_000_000_000
"""a robot's process that was heard so lately is there; it speaks at least once a second"""


class AuthenticatedServerChannel(ServerChannel, Protocol):
    """A server channel that can say whom it turned away, and that tells two lines of one name apart."""

    def rejections(self) -> list[tuple[str, str]]: ...

    def adopt(self, peer: str) -> str: ...

    def address(self, peer: str) -> str: ...


class Gateway:
    """`turn` answers what has come and returns."""

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
    ) -> None:
        """`tasks`: what the fleet practises when nobody asks for anything else; `spec`: of the robots its policy is
        made for, others are refused with the difference."""
        self._channel = channel
        self._ledger = ledger
        self._ingest = ingest
        self._weights = weights
        self._view = view
        self._spec = spec
        self._clock = clock
        self._wall_ns = wall_ns
        self._roles: dict[str, Role] = {}
        self._clocks: dict[str, str] = {}
        self._offsets_ns: dict[str, int] = {}
        self._heard_ns: dict[str, int] = {}
        self._processes: dict[str, tuple[str, int, str]] = {}
        self._announced_ns: dict[int, int] = {}
        self._no_room = ""
        self._refused: dict[str, str] = {}
        self._dispatcher = Dispatcher(ledger, view, tasks, channel.send, self._announce, wall_ns)
        self._dispatcher.open(clock.now_ns())

    def turn(self) -> int:
        """Handle what is there; returns how many messages that was."""
        handled = 0
        while handled < _MESSAGES_PER_TURN and (received := self._channel.recv()) is not None:
            handled += 1
            peer, message = received
            try:
                self._handle(peer, message)
            except StorageError as error:
                # Told once per change, not once per message: a full disk stays full for a while.
                if str(error) != self._no_room:
                    log.error("%s", error)
                    self._view.event("storage", str(error), peer)
                self._no_room = str(error)
                self._channel.send(peer, Nack(str(error)))
            except FleetError as error:
                log.error("a %s of '%s': %s", type(message).__name__, peer, error)
                self._view.event("error", str(error), peer)
                self._channel.send(peer, Rejection(str(error)))
            except Exception:
                # Whatever one peer sends, the others are served; the trace is in the log.
                log.exception("a %s of '%s' could not be handled.", type(message).__name__, peer)
                self._view.event("error", f"a {type(message).__name__} could not be handled; see the log", peer)
        for name, reason in self._channel.rejections():
            self._view.refused(name, reason)
            self._note(name, "refused", reason)
        for wish in self._view.wishes():
            self._pass_on(wish)
        self._dispatcher.turn(self._clock.now_ns())
        return handled

    # --- peers ----------------------------------------------------------------------------------------------------

    def _handle(self, peer: str, message: Message) -> None:
        if isinstance(message, Hello):
            self._welcome(peer, message)
            return
        role = self._roles.get(peer)
        if role is None:
            self._channel.send(peer, ReintroduceRequest())
            return
        now_ns = self._heard_ns[peer] = self._clock.now_ns()
        match message:
            case Segment():
                self._store(peer, message)
            case EdgeStatus(robot=robot) | Preview(robot=robot) if robot == peer and role is Role.demonstrator:
                log.debug("nobody watches the demonstrator '%s' or takes it over.", peer)
            case EdgeStatus(robot=robot) if robot == peer:
                self._view.status(message)
                self._dispatcher.status(message, now_ns)
            case Preview(robot=robot) if robot == peer:
                self._view.preview(message)
            case EdgeEvent(robot=robot, kind=kind, detail=detail) if robot == peer:
                self._view.event(kind, detail, robot)
                self._note(robot, kind, detail)
            case VersionActivated(robot=robot) if robot == peer:
                self._applied(peer, message)
            case Heartbeat(sent_ns=sent_ns):
                self._measure_clock(peer, sent_ns)
                self._channel.send(peer, HelloAck(clock_name(), self._clock.now_ns(), sent_ns, self._view.watched))
            case _ if role in CALLERS and isinstance(message, CALLS):
                self._channel.send(peer, self._dispatcher.answer(peer, message, now_ns))
            case OperatorCommand() if role is Role.teleoperator:
                self._drive(peer, message)
            case FetchWeights():
                self._channel.send(peer, self._weights.serve(message))
            case Publish() if role is Role.trainer:
                if (version := self._weights.begin(message)) is not None:
                    self._channel.send(peer, Published(version.number))
            case WeightBytes() if role is Role.trainer:
                self._weight_part(peer, message)
            case TrainerStatus() if role is Role.trainer:
                self._view.trainer(message)
            case Evaluate(number=number) if role is Role.evaluator:
                self._announce(peer, number)
            case Evaluation() if role is Role.evaluator:
                if self._ledger.add_evaluation(message, self._wall_ns()):
                    self._view.evaluation(message)
            case _:
                log.error("dropped a %s of '%s', which as %s may not send it.", type(message).__name__, peer, role)

    def _welcome(self, peer: str, hello: Hello) -> None:
        now_ns = self._clock.now_ns()
        name = peer.partition(PEER_SUFFIX)[0]
        if hello.name != name:
            self._channel.send(peer, Rejection(f"the key of '{name}' cannot speak for '{hello.name}'."))
            return
        if hello.role is not Role.edge and not name.startswith(hello.role):
            self._refuse(
                peer, f"the key of '{name}' is a robot's: the name of a {hello.role} begins with '{hello.role}'."
            )
            return
        if peer != name and hello.role not in CALLERS:
            if reason := self._doubled(peer, name, hello, now_ns):
                self._refuse(peer, reason)
                return
            peer = self._channel.adopt(peer)
        if reason := self._unfit(peer, hello):
            self._refuse(peer, reason)
            return
        if hello.role in CALLERS:
            self._forget_callers(now_ns)
        known = self._roles.get(peer)
        self._roles[peer], self._clocks[peer] = hello.role, hello.clock
        self._heard_ns[peer] = now_ns
        self._processes[peer] = (hello.clock, hello.pid, hello.site)
        self._refused.pop(peer, None)
        self._measure_clock(peer, hello.sent_ns)
        if hello.role not in CALLERS:
            self._ledger.see_robot(peer, hello.spec, hello.clock, now_ns)
        self._channel.send(peer, HelloAck(clock_name(), now_ns, hello.sent_ns, self._view.watched))
        if hello.role is Role.edge:
            self._view.robot_seen(peer, hello.spec)
            self._dispatcher.joined(peer, hello, now_ns)
        if hello.role in _FOLLOW:
            self._announce(peer, None)
        if known is None:
            log.info("%s '%s' is here.", hello.role, peer)

    def _unfit(self, peer: str, hello: Hello) -> str:
        """Why this fleet has no use for a robot, with the field; '' when it has."""
        if hello.spec is not None:
            try:
                self._spec.require(hello.spec, f"the policy of this fleet and robot '{peer}'")
            except SpecMismatchError as error:
                return f"spec: {error}"
        elif hello.role is Role.edge:
            return f"spec: robot '{peer}' did not say what it measures and accepts. Start it with `vla-fleet edge`."
        return self._dispatcher.unfit(peer, hello) if hello.role is Role.edge else ""

    def _forget_callers(self, now_ns: int) -> None:
        """Each command that somebody runs is a line of its own: those long silent are not kept."""
        for peer in [peer for peer, role in self._roles.items() if role in CALLERS]:
            if now_ns - self._heard_ns[peer] > _FORGET_NS:
                for kept in (self._roles, self._clocks, self._offsets_ns, self._heard_ns, self._processes):
                    kept.pop(peer, None)

    def _doubled(self, peer: str, name: str, hello: Hello, now_ns: int) -> str:
        """Why the second line of a name is not let in, '' when it is the same process or the first one is gone."""
        process = self._processes.get(name)
        if process is None or process[:2] == (hello.clock, hello.pid):
            return ""
        silent_ns = now_ns - self._heard_ns.get(name, -_ALIVE_NS)
        # A welcome says nothing new to who is welcome already; a line that is gone does not take it.
        welcome = HelloAck(clock_name(), now_ns, now_ns, self._view.watched)
        if silent_ns >= _ALIVE_NS or not self._channel.send(name, welcome):
            return ""
        there = _place(self._channel.address(name), *process[1:])
        here = _place(self._channel.address(peer), hello.pid, hello.site)
        return (
            f"name: there is a robot '{name}' already, {there}; this one is {here}. Give each robot a name and a key "
            "of its own: `vla-fleet keys NAME`, then `vla-fleet edge --name NAME`."
        )

    def _refuse(self, peer: str, reason: str) -> None:
        """Say no, and tell people of it when it is news: a peer goes on asking."""
        self._roles.pop(peer, None)
        if self._refused.get(peer) != reason:
            self._refused[peer] = reason
            log.error("'%s' is refused: %s", peer, reason)
            self._view.refused(peer.partition(PEER_SUFFIX)[0], reason)
        self._channel.send(peer, Rejection(reason))

    def _measure_clock(self, peer: str, sent_ns: int) -> None:
        """Offset = gateway time - robot time; the smallest sample is the one that waited least on its way."""
        if self._clocks.get(peer) == clock_name():
            offset_ns = 0
        else:
            sample_ns = self._clock.now_ns() - sent_ns
            offset_ns = min(sample_ns, self._offsets_ns.get(peer, sample_ns))
        if self._offsets_ns.get(peer) != offset_ns:
            self._offsets_ns[peer] = offset_ns
            if self._ledger.robot(peer) is not None:
                self._ledger.set_clock_offset(peer, offset_ns)

    # --- data in --------------------------------------------------------------------------------------------------

    def _store(self, peer: str, segment: Segment) -> None:
        result = self._ingest.accept(peer, segment, self._clock.now_ns())
        if result.outcome == "retry":
            self._view.event("storage", result.reason, peer)
            self._channel.send(peer, Nack(result.reason))
            return
        self._no_room = ""
        if result.outcome == "quarantined":
            self._view.event("quarantine", result.reason, peer)
            self._channel.send(peer, Ack((), (segment.id,)))
            return
        # Counted before it is acknowledged: what is not counted yet when this process dies comes again.
        self._dispatcher.stored(segment, result.outcome == "duplicate", self._clock.now_ns())
        self._channel.send(peer, Ack((segment.id,)))
        if result.outcome == "stored":
            self._pass_to_trainers(SegmentCommitted(result.row, segment))
            latency_s = (self._clock.now_ns() - segment.closed_ns - self._offsets_ns.get(peer, 0)) / 1e9
            self._view.stored(segment.steps, latency_s if segment.episode.source == "online" else None)
            if segment.last:
                episode = self._ledger.episode(segment.episode.id)
                human_steps = episode.human_steps if episode else 0
                self._view.episode_done(
                    peer,
                    segment.episode.task,
                    segment.outcome,
                    human_steps,
                    version=int(segment.version.max(initial=0)),
                    practised=segment.episode.source == "online",
                )

    def _pass_to_trainers(self, fresh: SegmentCommitted) -> None:
        """Spare trainers the way to the disk; one that cannot take it now reads the segment from the store."""
        if fresh.segment.episode.source == "evaluation":
            return
        for name, role in self._roles.items():
            if role is Role.trainer and not self._channel.send(name, fresh):
                log.debug("trainer '%s' reads row %d from the store.", name, fresh.row)

    # --- weights out ----------------------------------------------------------------------------------------------

    def _weight_part(self, peer: str, part: WeightBytes) -> None:
        version = self._weights.receive(part)
        if version is None:
            return
        self._channel.send(peer, Published(version.number))
        self._view.version(version)
        self._announced_ns[version.number] = self._clock.now_ns()
        for name, role in self._roles.items():
            if role in _FOLLOW:
                self._announce(name, version.number)

    def _announce(self, peer: str, number: int | None) -> None:
        pinned = self._dispatcher.pin(peer)
        if pinned and number not in (None, pinned):
            # It examines an older version: it hears of newer ones when it has done so.
            return
        number = pinned or number
        row = self._ledger.newest_version() if number is None else self._ledger.version(number)
        if row is None:
            if number is not None:
                self._channel.send(peer, Rejection(f"there is no policy version {number}."))
            return
        announced_ns = self._announced_ns.setdefault(row.version.number, self._clock.now_ns())
        self._channel.send(peer, VersionAvailable(row.version, announced_ns))

    def _applied(self, peer: str, applied: VersionActivated) -> None:
        announced_ns = self._announced_ns.get(applied.number)
        if announced_ns is None:
            return
        applied_ns = applied.applied_ns + self._offsets_ns.get(peer, 0)
        if self._ledger.note_applied(peer, applied.number, announced_ns, applied_ns):
            self._view.applied(applied)

    # --- people's commands ----------------------------------------------------------------------------------------

    def _pass_on(self, wish: OperatorCommand) -> None:
        try:
            if not self._dispatcher.wish(wish, self._clock.now_ns()):
                return
        except RejectedError as error:
            self._view.refuse(wish, str(error))
            return
        sent = self._channel.send(wish.robot, wish)
        if wish.kind != "command":
            note = "" if sent else " (the robot cannot be reached)"
            self._note(wish.robot, wish.kind, f"by {wish.operator}{note}")
            if not sent:
                later = "; it is sent again as soon as the robot is back" if wish.kind == "estop" else ""
                self._view.event("error", f"{wish.kind} did not reach the robot{later}", wish.robot)

    def _drive(self, peer: str, wish: OperatorCommand) -> None:
        """A teleoperator drives a robot it holds."""
        refusal = self._dispatcher.drive(peer, wish, self._clock.now_ns())
        if refusal is not None:
            self._channel.send(peer, refusal)
        elif wish.kind != "command":
            self._note(wish.robot, wish.kind, f"by {peer}")

    def _note(self, robot: str, kind: str, detail: str) -> None:
        """Enter an event in the ledger; a full disk must not keep a command or a refusal from its effect."""
        try:
            self._ledger.add_event(self._clock.now_ns(), robot, kind, detail)
        except StorageError as error:
            log.error("the event '%s' of '%s' could not be noted: %s", kind, robot, error)


def _place(address: str, pid: int, site: str) -> str:
    """Where a robot's process runs, as a person would look for it."""
    where = f"at {address or 'an unknown address'}"
    return f"{where}{f' ({site})' if site else ''}, process {pid}"
