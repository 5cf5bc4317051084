"""The gateway's jobs, and what the next gateway must know of them: it goes on when this one is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.dispatch.requests import LONGEST_NAME, check_names, check_request
from cloud_learner.operator.view import FleetView
from hal.resource.admitted_robots import AdmittedRobots
from hal.scheduler.episodes import HELD_OUT_SEEDS
from hal.scheduler.scheduler import Scheduler
from wire.errors import ConfigError, RejectedError, StorageError
from wire.messages.fleet import JobKind, JobPhase, JobRequest, JobState
from wire.messages.gateway import Evaluation
from wire.types import EpisodeOutcome

log = logging.getLogger(__name__)

MAIN = "main"
"""the standing job: practise the recipe's tasks"""
EVALUATION_LABEL = "canary"
"""of what an evaluation job has measured"""


class JobStore:
    """Jobs in the scheduler and in the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        notes: Notes,
        scheduler: Scheduler,
        view: FleetView,
        robots: AdmittedRobots,
        wall_ns: Callable[[], int],
    ) -> None:
        """`ledger`: asked at the start, and by `notes`."""
        self._ledger = ledger
        self._notes = notes
        self._scheduler = scheduler
        self._view = view
        self._admitted = robots
        self._wall_ns = wall_ns
        self._open: dict[str, int] = {}
        """jobs whose end is not noted yet, and when they were submitted, nanoseconds since 1970"""
        self._ending: set[str] = set()
        """those of them whose end is being noted"""
        self._ended: dict[str, JobState] = {}
        """jobs that ended under an earlier gateway"""

    # --- jobs -----------------------------------------------------------------------------------------------------

    def restore(self, practised: tuple[int, int], now_ns: int) -> None:
        """Begin the standing job, and go on with those of the last gateway.

        `practised`: (episodes, successes) of the standing job so far. Raises `StorageError`.
        """
        main = JobRequest(MAIN, JobKind.rollout, self._admitted.tasks, submitter="gateway")
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

    def submit(self, request: JobRequest, now_ns: int, answer: Callable[[JobState | Exception], None]) -> None:
        """Take a job: noted first, so that it outlives this process. `answer` gets its state, or the `ConfigError` or
        `StorageError` that kept it from being taken; at once or later."""
        if request.id == MAIN:
            raise ConfigError(f"id: '{MAIN}' is the standing job, which the gateway hands in. Choose another name.")
        check_names(request)
        if (known := self._known(request.id)) is not None:
            answer(known)
            return
        if fault := self._notes.fault:
            raise StorageError(f"job '{request.id}' cannot be noted now: {fault}")
        there = ((robot.name, robot.capabilities) for robot in self._scheduler.robots(now_ns))
        asked = msgspec.structs.replace(request, tasks=self._admitted.job_tasks(request, there))
        wall_ns = self._wall_ns()

        def add() -> JobRequest | None:
            complete = self._fill_in(asked)
            check_request(complete)
            return complete if self._ledger.add_job(complete, wall_ns) else None

        def added(complete: JobRequest | None) -> None:
            if complete is None:
                # it may have been asked for twice
                text = f"id: there was a job '{request.id}' before. Choose another name for the new one."
                answer(self._known(request.id) or ConfigError(text))
                return
            self._open[request.id] = wall_ns
            who = request.submitter or "somebody"
            self._view.add_event("job", f"job '{request.id}' ({request.kind}) handed in by {who}")
            answer(self._scheduler.submit(complete, now_ns))

        self._notes.submit(Note(add, added, answer, lasting=False))

    def cancel(self, job: str, now_ns: int, answer: Callable[[JobState], None]) -> None:
        """End a job; `answer` gets its state when that is noted, or cannot be now. Raises `RejectedError` for an
        unknown one and for the standing one."""
        if job == MAIN:
            raise RejectedError(
                f"job '{MAIN}' is what the fleet does when nothing else is asked; it ends with the gateway. To keep a "
                "robot from it, lease the robot."
            )
        if len(job) > LONGEST_NAME:
            raise RejectedError(f"there is no job '{job[:64]}'. `jobs` lists them.")
        state = self._scheduler.cancel(job, now_ns)
        self.poll()
        self._notes.submit(Note(_nothing, lambda _: answer(state), lambda _: answer(state), lasting=False))

    def count(self, job: str, episode: str, then: Callable[[], None]) -> None:
        """Count a stored episode for a job, once; `then` when that is noted, or at once if there is nothing to note."""
        if job not in self._open:
            then()
            return
        run = partial(self._ledger.count_for_job, job, episode, self._wall_ns())
        self._notes.submit(Note(run, lambda _: then(), key=f"count {job} {episode}"))

    def poll(self) -> None:
        """Note the jobs that ended since; an evaluation becomes a measurement."""
        for job, submitted_wall_ns in list(self._open.items()):
            state = self._scheduler.job(job)
            if job in self._ending or state is None or state.phase in (JobPhase.waiting, JobPhase.running):
                continue
            self._ending.add(job)
            run = partial(self._end, state, submitted_wall_ns, self._wall_ns())
            self._notes.submit(Note(run, partial(self._on_ended, state)))

    def _end(self, state: JobState, submitted_wall_ns: int, wall_ns: int) -> Evaluation | None:
        """Note the end of a job, after all that was counted for it; what it has measured, if that is news."""
        measured = None
        if state.request.kind == JobKind.evaluation and state.phase == JobPhase.done:
            measured = self._note_measurement(state.request, submitted_wall_ns, wall_ns)
        self._ledger.end_job(state.request.id, state.phase, wall_ns)
        return measured

    def _on_ended(self, state: JobState, measured: Evaluation | None) -> None:
        job = state.request.id
        self._ending.discard(job)
        del self._open[job]
        if measured is not None:
            self._view.add_evaluation(measured)
        self._view.add_event("job", f"job '{job}' is {state.phase} after {state.episodes} episodes")

    def _known(self, job: str) -> JobState | None:
        return self._scheduler.job(job) or self._ended.get(job)

    def _note_measurement(self, request: JobRequest, submitted_wall_ns: int, wall_ns: int) -> Evaluation | None:
        """What an evaluation that is done has measured: the same seeds of every task, each once.

        The same job gives the same result each time, so it is noted once; None if it was before. Raises `StorageError`.
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
            duration_s=max(0.0, (wall_ns - submitted_wall_ns) / 1e9),
        )
        return evaluation if evaluation.success and self._ledger.add_evaluation(evaluation, wall_ns) else None

    def _fill_in(self, request: JobRequest) -> JobRequest:
        """A request with the version filled in that was left open. Raises `ConfigError` that names the field,
        `StorageError`."""
        if request.kind != JobKind.evaluation:
            if request.version:
                raise ConfigError("version: only an evaluation asks for one; a rollout follows the newest.")
            return request
        version = self._ledger.version(request.version) if request.version else self._ledger.newest_version()
        if version is None:
            what = f"there is no policy version {request.version}" if request.version else "there is none yet"
            raise ConfigError(f"version: {what}. The page shows the newest one.")
        return msgspec.structs.replace(request, version=version.version.number)


def _nothing() -> None:
    """Something to wait behind."""


def _success(outcome: str) -> bool | None:
    """None: nobody has said."""
    return None if outcome == EpisodeOutcome.unjudged else outcome == EpisodeOutcome.success
