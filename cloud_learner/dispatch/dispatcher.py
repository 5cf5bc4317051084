"""The gateway's scheduler at work: robots come, report and leave; jobs are handed out, counted and kept."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import JobRow
from cloud_learner.dispatch.client_sessions import ClientSessions
from cloud_learner.dispatch.job_store import JobStore
from cloud_learner.dispatch.operator_control import OperatorControl
from cloud_learner.dispatch.requests import LONGEST_NAME, check_names, check_request
from cloud_learner.operator.view import FleetView
from cloud_learner.operator.view_models import DROPPED
from hal.resource import HealthReport, Leases, RobotRegistry, capabilities_of
from hal.scheduler import TaskCount
from hal.scheduler.decision import job_of
from hal.scheduler.jobs import KINDS, Done
from hal.scheduler.scheduler import Scheduler
from wire.errors import ConfigError, RejectedError, StorageError, suggest
from wire.messages import Message
from wire.messages.fleet import (
    AcquireLease,
    CancelJob,
    JobRequest,
    JobState,
    ListFleet,
    ReleaseLease,
    RenewLease,
    Response,
    RobotState,
    SubmitJob,
)
from wire.messages.gateway import EdgeStatus, Hello, Job, OperatorCommand, Segment
from wire.types import Lease, OperatorCommandKind, RobotSpec

log = logging.getLogger(__name__)

MAIN = "main"
"""the standing job: practise the recipe's tasks"""
_VIEW_PERIOD_NS = 200_000_000
_RESEND_NS = 3_000_000_000
"""a robot that works on something else than its job is sent the job again"""
_EPISODES_REMEMBERED = 4096
CALLS = ListFleet | SubmitJob | CancelJob | AcquireLease | RenewLease | ReleaseLease


class Dispatcher:
    """Times are of the gateway's clock. `open` first; `poll` hands out what is to be handed out."""

    def __init__(
        self,
        ledger: Ledger,
        view: FleetView,
        tasks: Sequence[str],
        send: Callable[[str, Message], bool],
        announce: Callable[[str, int | None], None],
        wall_ns: Callable[[], int],
    ) -> None:
        """`announce(robot, version)` announces a policy version to a robot, None: the newest."""
        self._ledger = ledger
        self._view = view
        self._tasks = tuple(tasks)
        self._send = send
        self._announce = announce
        self._store = JobStore(ledger, wall_ns)
        self._specs: dict[str, RobotSpec] = {}
        self._assigned: dict[str, Job] = {}
        self._assigned_ns: dict[str, int] = {}
        self._episodes: dict[str, str] = {}
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._submitted: dict[str, JobRow] = {}
        self._open_jobs: set[str] = set()
        self._earlier_counts = (0, 0)
        self._ended_jobs: dict[str, JobState] = {}
        self._identities: dict[str, str] = {}
        self._dropped: set[str] = set()
        self._next_view_ns = 0

    def open(self, now_ns: int) -> None:
        """Go on where the last gateway was. Raises `StorageError`."""
        counts = {row.task: TaskCount(row.episodes, row.successes) for row in self._ledger.task_counts("online")}
        self._earlier_counts = sum(c.episodes for c in counts.values()), sum(c.successes for c in counts.values())
        leases, last_number = self._store.open()
        self.leases = Leases(last_number)
        self.registry = RobotRegistry(self.leases)
        # Robots keep their seeds, whatever the order they come back in.
        known = sorted((row for row in self._ledger.robots() if row.spec_hash), key=lambda row: row.first_seen_ns)
        self.scheduler = Scheduler(self.registry, self.leases, [row.name for row in known], counts)
        self._clients = ClientSessions(
            self.leases,
            self.scheduler,
            self._view,
            self._send,
            self._keep_leases,
            lambda robot: self.pinned_version(robot) > 0,
            self._exists,
        )
        self.operators = OperatorControl(self.leases, self.scheduler, self._clients.on_lease_ended, self._send)
        self._clients.operators = self.operators
        self.scheduler.submit(JobRequest(MAIN, "rollout", self._tasks, submitter="gateway"), now_ns)
        for row in self._ledger.jobs():
            counted = self._ledger.episodes_of_job(row.id)
            done = [Done(one.task, one.seed, one.outcome == "success") for one in counted]
            phase = row.phase
            if phase == "waiting":
                try:
                    check_names(row.request)
                    check_request(row.request)
                    self.scheduler.submit(row.request, now_ns, done)
                    self._submitted[row.id] = row
                    self._open_jobs.add(row.id)
                    continue
                except ConfigError as error:
                    # An older gateway took it; one job must not keep the fleet from starting.
                    log.error("job '%s' is cancelled, for it cannot be taken up again: %s", row.id, error)
                    phase = "cancelled"
                    self._store.end(row.id, phase)
            self._ended_jobs[row.id] = JobState(row.request, phase, (), len(done), sum(one.success for one in done))
        for lease in leases:
            # Leases of jobs are given anew; those of people and programs are theirs until they do not renew them.
            if not self._of_a_job(lease):
                self._restore(lease, now_ns)
        self._finish_jobs()

    # --- robots ---------------------------------------------------------------------------------------------------

    def task_mismatch(self, name: str, hello: Hello) -> str:
        """Why a robot can do nothing here, '' when it can."""
        if not hello.tasks or set(hello.tasks) & set(self._tasks):
            return ""
        return (
            f"tasks: robot '{name}' can do {', '.join(hello.tasks)}, but this fleet works on {', '.join(self._tasks)}."
            f"{suggest(hello.tasks[0], self._tasks)} Start it with the fleet's recipe."
        )

    def on_hello(self, name: str, hello: Hello, now_ns: int) -> None:
        """A robot said hello, for the first time or again."""
        assert hello.spec is not None
        identity = f"{hello.clock}:{hello.pid}"
        capabilities = capabilities_of(hello.spec, hello.tasks, hello.site)
        self._specs[hello.spec.hash] = hello.spec
        anew = self._identities.get(name) not in (None, identity)
        if anew:
            # A new control process knows nothing of what the old one was sent.
            self.registry.leave(name, "its control process is a new one", now_ns)
            self._assigned.pop(name, None)
        self._identities[name] = identity
        spent = self._ledger.episodes_of_robot(name)
        self.scheduler.join(name, capabilities, now_ns, identity, spent)
        if name in self._dropped:
            self._dropped.discard(name)
            self._send(name, OperatorCommand(name, "drop_link", operator="gateway"))
        self.operators.on_hello(name, anew, now_ns)
        if name in self._assigned:
            self._notify(name, self._assigned[name], now_ns)

    def _exists(self, robot: str) -> bool:
        """Whether there is such a robot, here now or not."""
        row = None if robot in self.registry else self._ledger.robot(robot)
        return robot in self.registry or (row is not None and row.spec_hash is not None)

    def on_status(self, status: EdgeStatus, now_ns: int) -> None:
        """A robot reported."""
        robot = status.robot
        self.registry.report(robot, HealthReport.of(status), now_ns, status.job)
        self.scheduler.heartbeat(robot, status.job, status.job_episodes, now_ns)
        self.operators.on_status(status, now_ns)
        self._clients.forward_status(status)
        assigned = self._assigned.get(robot)
        if status.episode != self._episodes.get(robot):
            self._episodes[robot] = status.episode
            # An episode has begun or ended since: a job that arrived would have been taken up by now.
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
        success = None if segment.outcome == "aborted" else segment.outcome == "success"
        if episode.source == "evaluation" and helped:
            success = None  # what a person did says nothing about the policy
        if not (duplicate and success is None):
            job = self.scheduler.episode_done(
                episode.robot, episode.task, success, now_ns, seed=episode.seed, source=episode.source
            )
            if job in self._open_jobs:
                self._store.count(job, episode.id)
        self._counted[episode.id] = None
        while len(self._counted) > _EPISODES_REMEMBERED:
            self._counted.popitem(last=False)

    # --- people and programs --------------------------------------------------------------------------------------

    def handle_page_command(self, command: OperatorCommand, now_ns: int) -> bool:
        """Whether a command of the page may go to its robot. Raises `RejectedError`."""
        robot, who = command.robot, command.operator
        match command.kind:
            case OperatorCommandKind.command:
                return self.operators.driver(robot) == who
            case OperatorCommandKind.estop:
                self.operators.estop(robot, who, now_ns)
            case OperatorCommandKind.release_estop:
                self.operators.release_estop(robot, now_ns)
            case OperatorCommandKind.take_over:
                self.operators.take_over(robot, who, now_ns)
            case OperatorCommandKind.hand_back:
                self.operators.hand_back(robot, who, now_ns)
            case OperatorCommandKind.drop_link:
                return self.operators.drop(robot, who, now_ns)
        self._keep_leases()
        return True

    def handle_teleop_command(self, peer: str, command: OperatorCommand, now_ns: int) -> Response | None:
        """A teleoperator's command goes to its robot; the answer when it must not."""
        try:
            self._clients.handle_command(peer, command, now_ns)
        except RejectedError as error:
            return Response(0, refused=str(error))
        return None

    def handle_call(self, peer: str, call: CALLS, now_ns: int) -> Response:
        """Answer a call of a console or a teleoperator."""
        try:
            match call:
                case ListFleet():
                    return Response(call.call, robots=self.robots(), jobs=self.jobs(), specs=dict(self._specs))
                case SubmitJob():
                    return Response(call.call, jobs=(self.submit(call.request, now_ns),))
                case CancelJob():
                    return Response(call.call, jobs=(self.cancel(call.job, now_ns),))
                case AcquireLease():
                    return self._clients.acquire(peer, call, now_ns)
                case RenewLease():
                    return self._clients.renew(peer, call, now_ns)
                case ReleaseLease():
                    return self._clients.release(peer, call, now_ns)
        except (RejectedError, ConfigError, StorageError) as error:
            return Response(call.call, refused=str(error))

    def robots(self) -> tuple[RobotState, ...]:
        """Every robot as it is now, by name."""
        return tuple(msgspec.structs.replace(robot, job=job_of(robot.job)) for robot in self.registry.robots())

    def jobs(self) -> tuple[JobState, ...]:
        """Jobs that wait or run, and the newest of those that ended."""
        episodes, successes = self._earlier_counts
        now = (
            msgspec.structs.replace(job, episodes=job.episodes + episodes, successes=job.successes + successes)
            if job.request.id == MAIN
            else job
            for job in self.scheduler.states()
        )
        return (*self._ended_jobs.values(), *now)

    def submit(self, request: JobRequest, now_ns: int) -> JobState:
        """Take a job: noted first, so that it outlives this process. Raises `ConfigError` or `StorageError`."""
        if request.id == MAIN:
            raise ConfigError(f"id: '{MAIN}' is the standing job, which the gateway hands in. Choose another name.")
        check_names(request)
        known = self.scheduler.job(request.id) or self._ended_jobs.get(request.id)
        if known is not None:
            return known
        request = self._fill_in(request)
        check_request(request)
        row = self._store.submit(request)
        if row is None:
            raise ConfigError(f"id: there was a job '{request.id}' before. Choose another name for the new one.")
        state = self.scheduler.submit(request, now_ns)
        self._submitted[request.id] = row
        self._open_jobs.add(request.id)
        self._view.add_event(
            "job", f"job '{request.id}' ({request.kind}) handed in by {request.submitter or 'somebody'}"
        )
        return state

    def cancel(self, job: str, now_ns: int) -> JobState:
        """End a job. Raises `RejectedError` for an unknown one and for the standing one, `StorageError`."""
        if job == MAIN:
            raise RejectedError(
                f"job '{MAIN}' is what the fleet does when nothing else is asked; it ends with the gateway. To keep a "
                "robot from it, lease the robot."
            )
        if len(job) > LONGEST_NAME:
            raise RejectedError(f"there is no job '{job[:64]}'. `jobs` lists them.")
        state = self.scheduler.cancel(job, now_ns)
        self._finish_jobs()
        return state

    # --- deciding -------------------------------------------------------------------------------------------------

    def poll(self, now_ns: int) -> None:
        """Send robots their jobs, note what must be kept, show what people should see."""
        changes = self.registry.poll(now_ns)
        for change in changes:
            if change.health is not None and change.reason and not change.joined:
                self._view.add_event("health", f"{change.health}: {change.reason}", change.robot)
        decisions = self.scheduler.step(now_ns, changes)
        self.operators.poll(now_ns)
        self._clients.poll(now_ns)
        self._keep_leases()
        self._store.poll()
        for decision in decisions:
            log.info("robot '%s': job '%s': %s", decision.robot, decision.job.id, decision.reason)
            self._notify(decision.robot, decision.job, now_ns)
        if now_ns >= self._next_view_ns:
            self._next_view_ns = now_ns + _VIEW_PERIOD_NS
            self._finish_jobs()
            self._view.update_fleet(self.robots(), self.jobs())

    def _notify(self, robot: str, job: Job, now_ns: int) -> None:
        pinned = self.pinned_version(robot)
        self._assigned[robot], self._assigned_ns[robot] = job, now_ns
        if self.pinned_version(robot) != pinned:
            self._announce(robot, self.pinned_version(robot) or None)
        self._send(robot, job)

    def _keep_leases(self) -> str:
        return self._store.keep_leases(lease for lease in self.leases.all() if not self._of_a_job(lease))

    def _of_a_job(self, lease: Lease) -> bool:
        return lease.purpose in KINDS and (lease.holder == MAIN or lease.holder in self._submitted)

    def _restore(self, lease: Lease, now_ns: int) -> None:
        # The clock may have started over: it has its whole time to live again.
        self.leases.restore(msgspec.structs.replace(lease, expires_ns=now_ns + lease.ttl_ns))
        if self.operators.restore(lease):
            self._dropped.add(lease.robot)
        elif lease.purpose != "estop" and not lease.holder.startswith(DROPPED):
            self._clients.restore(lease)

    def _finish_jobs(self) -> None:
        """Note the jobs that ended since the last look; an evaluation becomes a measurement, once."""
        for job in list(self._open_jobs) if self._store.all_counted else ():
            state = self.scheduler.job(job)
            if state is None or state.phase in ("waiting", "running"):
                continue
            try:
                if state.request.kind == "evaluation" and state.phase == "done":
                    evaluation = self._store.add_evaluation_result(self._submitted[job])
                    if evaluation is not None:
                        self._view.add_evaluation(evaluation)
                self._store.end(job, state.phase)
            except StorageError as error:
                log.error("the end of job '%s' cannot be noted now: %s", job, error)
                continue
            self._open_jobs.discard(job)
            self._view.add_event("job", f"job '{job}' is {state.phase} after {state.episodes} episodes")

    def _fill_in(self, request: JobRequest) -> JobRequest:
        """A request with what was left open filled in. Raises `ConfigError` that names the field."""
        if unknown := [task for task in request.tasks if task not in self._tasks]:
            raise ConfigError(
                f"tasks: this fleet does not know '{unknown[0]}'.{suggest(unknown[0], self._tasks)} "
                f"It knows {', '.join(self._tasks)}."
            )
        changes: dict[str, object] = {} if request.tasks else {"tasks": self._tasks}
        if request.kind == "evaluation":
            version = self._ledger.version(request.version) if request.version else self._ledger.newest_version()
            if version is None:
                what = f"there is no policy version {request.version}" if request.version else "there is none yet"
                raise ConfigError(f"version: {what}. The page shows the newest one.")
            changes["version"] = version.version.number
        elif request.version:
            raise ConfigError("version: only an evaluation asks for one; a rollout follows the newest.")
        return msgspec.structs.replace(request, **changes)
