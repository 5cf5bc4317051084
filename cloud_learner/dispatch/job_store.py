"""The gateway's jobs, and what the next gateway must know of them and of leases: it goes on when this one is killed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.requests import LONGEST_NAME, check_names, check_request
from cloud_learner.operator.view import FleetView
from hal.scheduler.episodes import HELD_OUT_SEEDS
from hal.scheduler.scheduler import Scheduler
from wire.errors import ConfigError, RejectedError, StorageError, suggest
from wire.messages.fleet import JobKind, JobPhase, JobRequest, JobState
from wire.messages.gateway import Evaluation
from wire.types import EpisodeOutcome, Lease

log = logging.getLogger(__name__)

MAIN = "main"
"""the standing job: practise the recipe's tasks"""
EVALUATION_LABEL = "canary"
"""of what an evaluation job has measured"""


class JobStore:
    """Jobs in the scheduler and in the ledger. A lease is noted before anybody is notified of it."""

    def __init__(
        self, ledger: Ledger, scheduler: Scheduler, view: FleetView, tasks: Sequence[str], wall_ns: Callable[[], int]
    ) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._view = view
        self._tasks = tuple(tasks)
        self._wall_ns = wall_ns
        self._open: dict[str, int] = {}
        """jobs whose end is not noted yet, and when they were submitted, nanoseconds since 1970"""
        self._ended: dict[str, JobState] = {}
        """jobs that ended under an earlier gateway"""
        self._uncounted: deque[tuple[str, str]] = deque()
        self._leases: dict[str, tuple[int, dict[str, str]]] = {}
        """what is noted, by robot"""
        self._fault = ""

    # --- jobs -----------------------------------------------------------------------------------------------------

    def restore(self, leases: Iterable[Lease], practised: tuple[int, int], now_ns: int) -> None:
        """Begin the standing job, and go on with those of the last gateway, whose `leases` are noted already.

        `practised`: (episodes, successes) of the standing job so far. Raises `StorageError`.
        """
        self._leases = {lease.robot: _kept(lease) for lease in leases}
        main = JobRequest(MAIN, JobKind.rollout, self._tasks, submitter="gateway")
        self._scheduler.submit(main, now_ns, counted=practised)
        for row in self._ledger.jobs():
            counted = self._ledger.episodes_of_job(row.id)
            done = [(one.task, one.seed, _success(one.outcome)) for one in counted]
            phase = row.phase
            if phase == JobPhase.waiting:
                try:
                    check_names(row.request)
                    check_request(row.request)
                    self._scheduler.submit(row.request, now_ns, done)
                    self._open[row.id] = row.submitted_wall_ns
                    continue
                except ConfigError as error:
                    # One job must not keep the fleet from starting.
                    log.error("job '%s' is cancelled, for it cannot be taken up again: %s", row.id, error)
                    phase = JobPhase.cancelled
                    self._ledger.end_job(row.id, phase, self._wall_ns())
            self._ended[row.id] = JobState(
                row.request,
                phase,
                episodes=len(done),
                successes=sum(won is True for *_, won in done),
                unjudged=sum(won is None for *_, won in done),
            )
        self.poll()

    def states(self) -> tuple[JobState, ...]:
        """Jobs that wait or run, and the newest of those that ended."""
        return (*self._ended.values(), *self._scheduler.states())

    def submit(self, request: JobRequest, now_ns: int) -> JobState:
        """Take a job: noted first, so that it outlives this process. Raises `ConfigError` or `StorageError`."""
        if request.id == MAIN:
            raise ConfigError(f"id: '{MAIN}' is the standing job, which the gateway hands in. Choose another name.")
        check_names(request)
        known = self._scheduler.job(request.id) or self._ended.get(request.id)
        if known is not None:
            return known
        request = self._fill_in(request)
        check_request(request)
        wall_ns = self._wall_ns()
        if not self._ledger.add_job(request, wall_ns):
            raise ConfigError(f"id: there was a job '{request.id}' before. Choose another name for the new one.")
        self._open[request.id] = wall_ns
        who = request.submitter or "somebody"
        self._view.add_event("job", f"job '{request.id}' ({request.kind}) handed in by {who}")
        return self._scheduler.submit(request, now_ns)

    def cancel(self, job: str, now_ns: int) -> JobState:
        """End a job. Raises `RejectedError` for an unknown one and for the standing one, `StorageError`."""
        if job == MAIN:
            raise RejectedError(
                f"job '{MAIN}' is what the fleet does when nothing else is asked; it ends with the gateway. To keep a "
                "robot from it, lease the robot."
            )
        if len(job) > LONGEST_NAME:
            raise RejectedError(f"there is no job '{job[:64]}'. `jobs` lists them.")
        state = self._scheduler.cancel(job, now_ns)
        self.poll()
        return state

    def count(self, job: str, episode: str) -> None:
        """Count a stored episode for a job, once; when it cannot be noted now, `poll` tries it again."""
        if job in self._open:
            self._uncounted.append((job, episode))
            self._note_counts()

    def poll(self) -> None:
        """Note what could not be counted before, and the jobs that ended since; an evaluation becomes a measurement."""
        self._note_counts()
        for job in () if self._uncounted else list(self._open):
            state = self._scheduler.job(job)
            if state is None or state.phase in (JobPhase.waiting, JobPhase.running):
                continue
            try:
                if state.request.kind == JobKind.evaluation and state.phase == JobPhase.done:
                    self._note_measurement(state.request, self._open[job])
                self._ledger.end_job(job, state.phase, self._wall_ns())
            except StorageError as error:
                log.error("the end of job '%s' cannot be noted now: %s", job, error)
                continue
            del self._open[job]
            self._view.add_event("job", f"job '{job}' is {state.phase} after {state.episodes} episodes")

    def _note_counts(self) -> None:
        while self._uncounted:
            job, episode = self._uncounted[0]
            try:
                self._ledger.count_for_job(job, episode, self._wall_ns())
            except StorageError as error:
                log.error("an episode of job '%s' cannot be counted now: %s", job, error)
                return
            self._uncounted.popleft()

    def _note_measurement(self, request: JobRequest, submitted_wall_ns: int) -> None:
        """What an evaluation that is done has measured: the same seeds of every task, each once.

        The same job gives the same result each time, so it is noted once. Raises `StorageError`.
        """
        found: dict[str, dict[int, bool]] = {}
        for episode in self._ledger.episodes_of_job(request.id):
            found.setdefault(episode.task, {}).setdefault(episode.seed, episode.outcome == EpisodeOutcome.success)
        evaluation = Evaluation(
            number=request.version,
            success={task: sum(seeds.values()) / len(seeds) for task, seeds in found.items()},
            episodes=request.episodes,
            first_seed=request.first_seed or HELD_OUT_SEEDS.start,
            label=EVALUATION_LABEL,
            started_ns=submitted_wall_ns,
            duration_s=max(0.0, (self._wall_ns() - submitted_wall_ns) / 1e9),
        )
        if evaluation.success and self._ledger.add_evaluation(evaluation, self._wall_ns()):
            self._view.add_evaluation(evaluation)

    def _fill_in(self, request: JobRequest) -> JobRequest:
        """A request with what was left open filled in. Raises `ConfigError` that names the field."""
        if unknown := [task for task in request.tasks if task not in self._tasks]:
            raise ConfigError(
                f"tasks: this fleet does not know '{unknown[0]}'.{suggest(unknown[0], self._tasks)} "
                f"It knows {', '.join(self._tasks)}."
            )
        changes: dict[str, object] = {} if request.tasks else {"tasks": self._tasks}
        if request.kind == JobKind.evaluation:
            version = self._ledger.version(request.version) if request.version else self._ledger.newest_version()
            if version is None:
                what = f"there is no policy version {request.version}" if request.version else "there is none yet"
                raise ConfigError(f"version: {what}. The page shows the newest one.")
            changes["version"] = version.version.number
        elif request.version:
            raise ConfigError("version: only an evaluation asks for one; a rollout follows the newest.")
        return msgspec.structs.replace(request, **changes)

    # --- leases ---------------------------------------------------------------------------------------------------

    def keep_leases(self, leases: Iterable[Lease]) -> str:
        """Note who holds what now, but for jobs; why it could not be noted, '' when it was.

        A heartbeat changes nothing here: only who holds a robot is kept, not until when.
        """
        now = {lease.robot: lease for lease in leases if not self._scheduler.is_job(lease.holder)}
        changed: dict[str, Lease | None] = dict.fromkeys(self._leases.keys() - now.keys())
        changed |= {robot: lease for robot, lease in now.items() if _kept(lease) != self._leases.get(robot)}
        try:
            if changed:
                self._ledger.keep_leases(changed, self._wall_ns())
        except StorageError as error:
            # Robots work on: a full disk must not stop them. It is tried again with the next poll.
            if str(error) != self._fault:
                log.error("leases cannot be noted: %s", error)
            self._fault = str(error)
            return self._fault
        self._fault, self._leases = "", {robot: _kept(lease) for robot, lease in now.items()}
        return ""


def _kept(lease: Lease) -> tuple[int, dict[str, str]]:
    """What must be noted again when it changes."""
    return lease.number, lease.stops


def _success(outcome: str) -> bool | None:
    """None: nobody has said."""
    return None if outcome == EpisodeOutcome.unjudged else outcome == EpisodeOutcome.success
