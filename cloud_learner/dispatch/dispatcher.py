"""The gateway's scheduler at work: robots come, report and leave; jobs are handed out, counted and kept."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.client_sessions import ClientSessions
from cloud_learner.dispatch.job_store import JobStore
from cloud_learner.dispatch.robot_holds import RobotHolds
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import FINISHED
from hal.resource.capabilities import capabilities_of
from hal.resource.lease import Leases
from hal.scheduler.scheduler import Scheduler
from wire.errors import ConfigError, RejectedError, StorageError, suggest
from wire.messages import Message
from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    ListFleet,
    ReleaseLease,
    RenewLease,
    Response,
    SubmitJob,
)
from wire.messages.gateway import EdgeStatus, Hello, Job, OperatorCommand, Segment
from wire.types import EpisodeOutcome, EpisodeSource, OperatorCommandKind, RobotSpec

log = logging.getLogger(__name__)

_VIEW_PERIOD_NS = 200_000_000
_RESEND_NS = 3_000_000_000
"""a robot that works on something else than its job is sent the job again so often; it may have missed it"""
_EPISODES_REMEMBERED = 4096
CALLS = ListFleet | SubmitJob | CancelJob | AcquireLease | RenewLease | ReleaseLease


class Dispatcher:
    """Times are of the gateway's clock; `poll` hands out what is to be handed out."""

    def __init__(
        self,
        ledger: Ledger,
        view: FleetView,
        tasks: Sequence[str],
        send: Callable[[str, Message], bool],
        announce: Callable[[str, int | None], None],
        role_of: Callable[[str], str],
        wall_ns: Callable[[], int],
        now_ns: int,
    ) -> None:
        """Go on where the last gateway was. Raises `StorageError`.

        `announce(robot, version)` announces a policy version to a robot, None: the newest; `role_of` a peer's key.
        """
        self._ledger = ledger
        self._view = view
        self._tasks = tuple(tasks)
        self._send = send
        self._announce = announce
        self._specs: dict[str, RobotSpec] = {}
        self._assigned: dict[str, Job] = {}
        self._assigned_ns: dict[str, int] = {}
        self._counted: deque[str] = deque(maxlen=_EPISODES_REMEMBERED)
        self._next_view_ns = 0
        kept = ledger.kept_leases()
        self.leases = Leases(ledger.reserve_leases())
        self._holds = RobotHolds(ledger)
        counts = ledger.task_counts(EpisodeSource.online)
        # Robots keep their seeds, whatever the order they come back in.
        known = sorted((row for row in ledger.robots() if row.spec_hash), key=lambda row: row.first_seen_ns)
        self.scheduler = Scheduler(
            self.leases,
            [row.name for row in known],
            counts,
            on_health=lambda robot, text: view.add_event("health", text, robot),
        )
        self.jobs = JobStore(ledger, self.scheduler, view, tasks, wall_ns)
        self.clients = ClientSessions(
            self.leases,
            self.scheduler,
            view,
            send,
            self._keep_leases,
            lambda robot: self.pinned_version(robot) > 0,
            self._exists,
            role_of,
        )
        self.operators = self.clients.operators
        practised = sum(episodes for episodes, _ in counts.values()), sum(won for _, won in counts.values())
        self.jobs.restore(kept, practised, now_ns)
        for lease in kept:
            self.clients.restore(lease, now_ns)

    # --- robots ---------------------------------------------------------------------------------------------------

    def task_mismatch(self, name: str, hello: Hello) -> str:
        """Why a robot can do nothing here, '' when it can."""
        if not hello.tasks or set(hello.tasks) & set(self._tasks):
            return ""
        return (
            f"tasks: robot '{name}' can do {', '.join(hello.tasks)}, but this fleet works on {', '.join(self._tasks)}."
            f"{suggest(hello.tasks[0], self._tasks)} Start it with the fleet's recipe."
        )

    def held_elsewhere(self, name: str) -> str:
        """Why a robot is not let in: another gateway on the same ledger has it; '' when it is here from now on."""
        reason, moved = self._holds.take(name)
        if moved:
            # It refuses lower numbers than those it got there.
            self.leases.last_number = max(self.leases.last_number, self._ledger.reserve_leases())
        return reason

    def on_hello(self, name: str, hello: Hello, now_ns: int) -> None:
        """A robot said hello, for the first time or again."""
        assert hello.spec is not None
        capabilities = capabilities_of(hello.spec, hello.tasks, hello.site)
        self._specs[hello.spec.hash] = hello.spec
        spent = self._ledger.episodes_of_robot(name)
        anew = self.scheduler.join(name, capabilities, now_ns, f"{hello.clock}:{hello.pid}", spent)
        if anew:
            self._assigned.pop(name, None)
        self.operators.on_hello(name, anew, now_ns)
        if name in self._assigned:
            self._notify(name, self._assigned[name], now_ns)

    def _exists(self, robot: str) -> bool:
        """Whether there is such a robot, here now or not; there may be while the ledger cannot be asked."""
        try:
            row = self._ledger.robot(robot)
        except StorageError as error:
            log.error("whether there is a robot '%s' cannot be asked now: %s", robot, error)
            return True
        return row is not None and row.spec_hash is not None

    def on_status(self, status: EdgeStatus, now_ns: int) -> None:
        """A robot reported."""
        robot = status.robot
        self._holds.hear(robot)
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

    def on_segment_stored(self, segment: Segment, duplicate: bool, now_ns: int) -> None:
        """Count an episode, once, when its last segment is on disk; `duplicate`: it was before."""
        episode = segment.episode
        if not segment.last or episode.id in self._counted:
            return
        row = self._ledger.episode(episode.id)
        helped = row is not None and row.human_steps > 0
        unjudged = segment.outcome == EpisodeOutcome.unjudged
        success = segment.outcome == EpisodeOutcome.success if segment.outcome in FINISHED else None
        if episode.source == EpisodeSource.evaluation and helped:
            success = None  # what a person did says nothing about the policy
        if not (duplicate and success is None and not unjudged):
            job = self.scheduler.episode_done(
                episode.robot,
                episode.task,
                success,
                now_ns,
                seed=episode.seed,
                source=episode.source,
                unjudged=unjudged,
            )
            self.jobs.count(job, episode.id)
        self._counted.append(episode.id)

    # --- people and programs --------------------------------------------------------------------------------------

    def handle_page_command(self, command: OperatorCommand, now_ns: int) -> OperatorCommand | None:
        """What of a command of the page is to go to its robot, with the lease it is from. Raises `RejectedError`."""
        stamped = self.operators.stamp(command)
        allowed = self.operators.handle_command(command, command.operator, now_ns)
        if command.kind != OperatorCommandKind.command:
            self._keep_leases()
        if command.kind == OperatorCommandKind.take_over:
            stamped = self.operators.stamp(command)
        return stamped if allowed else None

    def handle_call(self, peer: str, call: CALLS, now_ns: int) -> Response:
        """Answer a call of a console or a teleoperator."""
        try:
            match call:
                case ListFleet():
                    robots, jobs = self.scheduler.robots(now_ns), self.jobs.states()
                    return Response(call.call, robots=robots, jobs=jobs, specs=dict(self._specs))
                case SubmitJob():
                    return Response(call.call, jobs=(self.jobs.submit(call.request, now_ns),))
                case CancelJob():
                    return Response(call.call, jobs=(self.jobs.cancel(call.job, now_ns),))
                case AcquireLease():
                    return Response(call.call, lease=self.clients.acquire(peer, call, now_ns))
                case RenewLease():
                    return Response(call.call, lease=self.clients.renew(peer, call, now_ns))
                case ReleaseLease():
                    return Response(call.call, lease=self.clients.release(peer, call, now_ns))
        except (RejectedError, ConfigError, StorageError) as error:
            return Response(call.call, refused=str(error))

    # --- deciding -------------------------------------------------------------------------------------------------

    def poll(self, now_ns: int) -> None:
        """Send robots their jobs, note what must be kept, show what people should see."""
        self._holds.poll(now_ns)
        decisions = self.scheduler.step(now_ns)
        self.operators.poll(now_ns)
        self.clients.poll(now_ns)
        self._keep_leases()
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

    def _keep_leases(self) -> str:
        return self.jobs.keep_leases([self.operators.note_stops(lease) for lease in self.leases.all()])
