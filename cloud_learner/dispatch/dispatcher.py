"""The gateway's scheduler at work: robots come, report and leave; jobs are handed out, counted and kept."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import TakenRobots
from cloud_learner.dispatch.client_sessions import ClientSessions
from cloud_learner.dispatch.job_store import JobStore
from cloud_learner.dispatch.lease_history import LeaseHistory
from cloud_learner.dispatch.lease_store import LeaseStore
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.dispatch.robot_holds import RobotHolds
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import FINISHED
from hal.resource.admitted_robots import AdmittedRobots
from hal.scheduler.scheduler import Scheduler
from wire.errors import ConfigError, RejectedError, StorageError
from wire.messages import Message
from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    JobKind,
    JobState,
    ListFleet,
    ReleaseLease,
    RenewLease,
    Response,
    SubmitJob,
)
from wire.messages.gateway import EdgeStatus, Hello, Job, OperatorCommand, Rejection, Segment
from wire.types import EpisodeOutcome, EpisodeSource, Lease, OperatorCommandKind, RobotSpec

log = logging.getLogger(__name__)

_VIEW_PERIOD_NS = 200_000_000
_RESEND_NS = 3_000_000_000
"""a robot that works on something else than its job is sent the job again so often; it may have missed it"""
_EPISODES_REMEMBERED = 4096
CALLS = ListFleet | SubmitJob | CancelJob | AcquireLease | RenewLease | ReleaseLease


class Dispatcher:
    """Times are of the gateway's clock; `poll` hands out what is to be handed out."""

    require_weights: Callable[[int], object]
    """raises `RejectedError` for a policy version whose weights are gone; set before the first call"""

    def __init__(
        self,
        ledger: Ledger,
        notes: Notes,
        view: FleetView,
        robots: AdmittedRobots,
        send: Callable[[str, Message], bool],
        announce: Callable[[str, int | None], None],
        role_of: Callable[[str], str],
        wall_ns: Callable[[], int],
        now_ns: int,
    ) -> None:
        """Go on where the last gateway was. Raises `StorageError`.

        `ledger`: asked at the start; afterwards `notes` may wait for it, and nobody else.
        `announce(robot, version)` announces a policy version to a robot, None: the newest; `role_of` a peer's key.
        """
        self._ledger = ledger
        self._notes = notes
        self._view = view
        self._admitted = robots
        self._send = send
        self._announce = announce
        self._specs: dict[str, RobotSpec] = {}
        self._assigned: dict[str, Job] = {}
        self._assigned_ns: dict[str, int] = {}
        self._counted: deque[str] = deque(maxlen=_EPISODES_REMEMBERED)
        self._next_view_ns = 0
        self._now_ns = now_ns
        """of the newest look at the leases, or call"""
        self._identities: dict[str, str] = {}
        """by robot: which of its processes said hello last"""
        self._lease_store = LeaseStore(ledger, notes, wall_ns)
        self.leases = self._lease_store.leases
        self._holds = RobotHolds(ledger, notes, self._lease_store)
        self._elsewhere: dict[str, str] = {}
        """by robot: why it was not let in last"""
        counts = ledger.task_counts(EpisodeSource.online)
        # Robots keep their seeds, whatever the order they come back in.
        known = sorted((row for row in ledger.robots() if row.spec_hash), key=lambda row: row.first_seen_ns)
        self._robots = {row.name for row in known}
        """all that ever joined"""
        self._brought = {name: tally.episodes for name, tally in ledger.robot_totals().items()}
        """by robot: how many episodes it ever brought, as far as is known"""
        self.scheduler = Scheduler(
            self.leases,
            [row.name for row in known],
            counts,
            on_health=lambda robot, text: view.add_event("health", text, robot),
        )
        self.jobs = JobStore(ledger, notes, self.scheduler, view, robots, wall_ns)
        self._history = LeaseHistory(
            ledger,
            notes,
            self.scheduler.is_job,
            lambda robot, text: view.add_event("error", text, robot),
            now_ns,
        )
        self._holds.on_moved = self._history.forget
        self.clients = ClientSessions(
            self.leases,
            self.scheduler,
            view,
            send,
            self._when_noted,
            notes,
            lambda robot: self.pinned_version(robot) > 0,
            self._robots.__contains__,
            role_of,
        )
        self.operators = self.clients.operators
        practised = sum(episodes for episodes, _ in counts.values()), sum(won for _, won in counts.values())
        self.jobs.restore(practised, now_ns)
        for lease in self._lease_store.kept:
            self.clients.restore(lease, now_ns)

    # --- robots ---------------------------------------------------------------------------------------------------

    def on_hello(self, name: str, hello: Hello, now_ns: int, then: Callable[[], None]) -> None:
        """A robot said hello, for the first time or again. `then` is called once it is one of the fleet.

        A new process gets work when the ledger has said how many seeds the robot has used up; while the ledger cannot
        be asked, by what was known last.
        """
        assert hello.spec is not None
        self._specs[hello.spec.hash] = hello.spec
        identity = f"{hello.clock}:{hello.pid}"
        before = self._identities.get(name)
        anew = before not in (None, identity)
        self._identities[name] = identity
        if anew:
            self._assigned.pop(name, None)
        self.operators.on_hello(name, anew, now_ns)
        if before == identity and name in self._robots and self._holds.is_here(name, now_ns):
            then()
            self._join(name, hello, now_ns)
            return
        waiting = [then]

        def found(answer: tuple[TakenRobots, int]) -> None:
            taken, brought = answer
            if not (reason := self._holds.take(name, taken)):
                join(brought)
            elif self._send(name, Rejection(reason)) and reason != self._elsewhere.get(name):
                self._elsewhere[name] = reason
                self._view.add_event("refused", f"refused: {reason}", name)

        def join(brought: int) -> None:
            self._elsewhere.pop(name, None)
            self._holds.hear(name, now_ns)
            self._brought[name] = max(brought, self._brought.get(name, 0))
            if self._identities[name] == identity:
                while waiting:
                    waiting.pop()()
                self._robots.add(name)
                self._join(name, hello, now_ns)

        def join_unasked(_: object = None) -> None:
            join(0)

        def ask() -> tuple[TakenRobots, int]:
            return self._holds.ask(name), self._ledger.episodes_of_robot(name)

        self._notes.submit(Note(ask, found, join_unasked, key=f"brought {name}", ordered=True))
        if self._notes.fault:
            join_unasked()

    def _join(self, name: str, hello: Hello, now_ns: int) -> None:
        assert hello.spec is not None
        capabilities = self._admitted.capabilities(hello.spec, hello.tasks, hello.site)
        if self.scheduler.join(name, capabilities, now_ns, self._identities[name], self._brought.get(name, 0)):
            self._assigned.pop(name, None)
        if name in self._assigned:
            self._notify(name, self._assigned[name], now_ns)

    def on_status(self, status: EdgeStatus, now_ns: int) -> None:
        """A robot reported."""
        robot = status.robot
        self._holds.hear(robot, now_ns)
        self.scheduler.report(status, now_ns)
        self.operators.on_status(status, now_ns)
        self.clients.forward(status)
        assigned = self._assigned.get(robot)
        if assigned is not None and status.job != assigned.id and now_ns - self._assigned_ns[robot] > _RESEND_NS:
            self._notify(robot, assigned, now_ns)

    def pinned_version(self, robot: str) -> int:
        """The policy version that `robot` is to keep for its job, 0 when it follows the newest."""
        assigned = self._assigned.get(robot)
        return assigned.version if assigned is not None and assigned.tasks else 0

    def on_segment_stored(
        self, segment: Segment, human_steps: int, duplicate: bool, now_ns: int, then: Callable[[], None]
    ) -> None:
        """Count an episode, once, when its last segment is on disk; `duplicate`: it was before; `human_steps`: of its
        episode. `then` is called when what it counts for is on disk as well."""
        episode = segment.episode
        if not segment.last or episode.id in self._counted:
            then()
            return
        self._counted.append(episode.id)
        unjudged = segment.outcome == EpisodeOutcome.unjudged
        success = segment.outcome == EpisodeOutcome.success if segment.outcome in FINISHED else None
        if episode.source == EpisodeSource.evaluation and human_steps > 0:
            success = None  # what a person did says nothing about the policy
        if duplicate and success is None and not unjudged:
            then()
            return
        job = self.scheduler.episode_done(
            episode.robot,
            episode.task,
            success,
            now_ns,
            seed=episode.seed,
            source=episode.source,
            unjudged=unjudged,
        )
        self.jobs.count(job, episode.id, then)

    # --- people and programs --------------------------------------------------------------------------------------

    def handle_page_command(self, command: OperatorCommand, now_ns: int) -> OperatorCommand | None:
        """What of a command of the page is to go to its robot, with the lease it is from. Raises `RejectedError`."""
        stamped = self.operators.stamp(command)
        allowed = self.operators.handle_command(command, command.operator, now_ns)
        if command.kind != OperatorCommandKind.command:
            self._note_leases(now_ns)
        if command.kind == OperatorCommandKind.take_over:
            stamped = self.operators.stamp(command)
        return stamped if allowed else None

    def handle_call(self, peer: str, call: CALLS, now_ns: int, answer: Callable[[Response], object]) -> None:
        """Answer a call of a console or a teleoperator, at once or when what must outlive this process is noted."""

        def answer_job(state: JobState | Exception) -> None:
            if isinstance(state, JobState):
                answer(Response(call.call, jobs=(state,)))
            else:
                refuse(state)

        def answer_lease(lease: Lease) -> None:
            answer(Response(call.call, lease=lease))

        def refuse(error: Exception) -> None:
            answer(Response(call.call, refused=str(error)))

        try:
            match call:
                case ListFleet():
                    robots, jobs = self.scheduler.robots(now_ns), self.jobs.states()
                    answer(Response(call.call, robots=robots, jobs=jobs, specs=dict(self._specs)))
                case SubmitJob():
                    if call.request.version > 0 and call.request.kind == JobKind.evaluation:
                        self.require_weights(call.request.version)
                    self.jobs.submit(call.request, now_ns, answer_job)
                case CancelJob():
                    self.jobs.cancel(call.job, now_ns, answer_job)
                case AcquireLease():
                    self.clients.acquire(peer, call, now_ns, answer_lease, refuse)
                case RenewLease():
                    answer_lease(self.clients.renew(peer, call, now_ns))
                case ReleaseLease():
                    answer_lease(self.clients.release(peer, call, now_ns))
        except (RejectedError, ConfigError, StorageError) as error:
            refuse(error)
        self._note_leases(now_ns)

    # --- deciding -------------------------------------------------------------------------------------------------

    def poll(self, now_ns: int) -> None:
        """Send robots their jobs, note what must be kept, show what people should see."""
        self._holds.poll(now_ns)
        decisions = self.scheduler.step(now_ns)
        self.operators.poll(now_ns)
        self.clients.poll(now_ns)
        self._note_leases(now_ns)
        for decision in decisions:
            log.info("robot '%s': job '%s': %s", decision.robot, decision.job.id, decision.reason)
            self._notify(decision.robot, decision.job, now_ns)
        if now_ns >= self._next_view_ns:
            self._next_view_ns = now_ns + _VIEW_PERIOD_NS
            self.jobs.poll()
            self._view.update_fleet(self.scheduler.robots(now_ns), self.jobs.states(), self.operators.stop_states())

    def _notify(self, robot: str, job: Job, now_ns: int) -> None:
        pinned = self.pinned_version(robot)
        self._assigned[robot], self._assigned_ns[robot] = job, now_ns
        if self.pinned_version(robot) != pinned:
            self._announce(robot, self.pinned_version(robot) or None)
        self._send(robot, job)

    def _note_leases(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._history.note(self.leases.all(), now_ns)
        leases = (lease for lease in self.leases.all() if not self.scheduler.is_job(lease.holder))
        self._lease_store.note(self.operators.note_stops(lease) for lease in leases)

    def _when_noted(self, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._note_leases(self._now_ns)
        self._lease_store.when_noted(then, failed)
