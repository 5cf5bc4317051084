"""What the scheduler must know again after the gateway was killed: jobs, what was counted for them, and leases."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import JobRow
from hal.scheduler import HELD_OUT_SEEDS
from wire.errors import StorageError
from wire.messages.fleet import JobRequest
from wire.messages.gateway import Evaluation
from wire.types import Lease

log = logging.getLogger(__name__)

EVALUATION_LABEL = "canary"
"""of what an evaluation job has measured"""


class JobStore:
    """The ledger's pages about work. A lease is in it before anybody is notified of it."""

    def __init__(self, ledger: Ledger, wall_ns: Callable[[], int]) -> None:
        self._ledger = ledger
        self._wall_ns = wall_ns
        self._leases: dict[str, Lease] = {}
        self._uncounted: deque[tuple[str, str]] = deque()
        self._fault = ""

    def open(self) -> tuple[tuple[Lease, ...], int]:
        """(leases that stood when the last gateway ended, the largest number that a lease ever had)."""
        leases, number = self._ledger.kept_leases()
        self._leases = {lease.robot: lease for lease in leases}
        return leases, number

    def keep_leases(self, leases: Iterable[Lease]) -> str:
        """Note who holds what now, if that is not what was noted last; why it could not be noted, '' when it was.

        A heartbeat changes nothing here: only who holds a robot is kept, not until when.
        """
        now = {lease.robot: lease for lease in leases}
        changed: dict[str, Lease | None] = {
            robot: now.get(robot)
            for robot in now.keys() | self._leases.keys()
            if _number(now.get(robot)) != _number(self._leases.get(robot))
        }
        if not changed:
            return ""
        try:
            self._ledger.keep_leases(changed, self._wall_ns())
        except StorageError as error:
            # Robots work on: a full disk must not stop them. It is tried again with the next poll.
            if str(error) != self._fault:
                log.error("leases cannot be noted: %s", error)
            self._fault = str(error)
            return self._fault
        self._fault = ""
        self._leases = now
        return ""

    def submit(self, request: JobRequest) -> JobRow | None:
        """Note a job; None if there was one of its id. Raises `StorageError`."""
        if not self._ledger.add_job(request, self._wall_ns()):
            return None
        return next(row for row in self._ledger.jobs() if row.id == request.id)

    def end(self, job: str, phase: str) -> None:
        """Note that a job is done or cancelled. Raises `StorageError`."""
        self._ledger.end_job(job, phase, self._wall_ns())

    def count(self, job: str, episode: str) -> None:
        """Count a stored episode for a job, once; when it cannot be noted now, `poll` tries it again."""
        self._uncounted.append((job, episode))
        self.poll()

    @property
    def all_counted(self) -> bool:
        """Whether every episode given to `count` is noted."""
        return not self._uncounted

    def poll(self) -> None:
        """Note what could not be counted before."""
        while self._uncounted:
            job, episode = self._uncounted[0]
            try:
                self._ledger.count_for_job(job, episode, self._wall_ns())
            except StorageError as error:
                log.error("an episode of job '%s' cannot be counted now: %s", job, error)
                return
            self._uncounted.popleft()

    def add_evaluation_result(self, row: JobRow) -> Evaluation | None:
        """Note what an evaluation job that is done has measured: the same seeds of every task, each once.

        None when no episode counts or it was noted before: the same job gives the same result each time. Raises
        `StorageError`.
        """
        request = row.request
        first: dict[tuple[str, int], bool] = {}
        for episode in self._ledger.episodes_of_job(row.id):
            first.setdefault((episode.task, episode.seed), episode.outcome == "success")
        by_task: dict[str, list[bool]] = {task: [] for task in request.tasks}
        for (task, _), succeeded in first.items():
            by_task.setdefault(task, []).append(succeeded)
        success = {task: sum(found) / len(found) for task, found in by_task.items() if found}
        evaluation = Evaluation(
            number=request.version,
            success=success,
            episodes=request.episodes,
            first_seed=request.first_seed or HELD_OUT_SEEDS.start,
            label=EVALUATION_LABEL,
            started_ns=row.submitted_wall_ns,
            duration_s=max(0.0, (self._wall_ns() - row.submitted_wall_ns) / 1e9),
        )
        return evaluation if success and self._ledger.add_evaluation(evaluation, self._wall_ns()) else None


def _number(lease: Lease | None) -> int:
    return lease.number if lease is not None else 0
