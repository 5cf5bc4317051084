"""What the scheduler must know again after the gateway was killed: jobs, what was counted for them, and leases."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import JobEpisodeRow, JobRow
from hal.scheduler import TaskCount
from wire.errors import StorageError
from wire.messages.fleet import JobRequest
from wire.types import Lease

log = logging.getLogger(__name__)


class JobStore:
    """The ledger's pages about work. A lease is in it before anybody hears of it."""

    def __init__(self, ledger: Ledger, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._ledger = ledger
        self._wall_ns = wall_ns
        self._kept: dict[str, Lease] = {}
        self._trouble = ""

    def open(self) -> tuple[tuple[Lease, ...], int]:
        """(leases that stood when the last gateway ended, the largest number that a lease ever had)."""
        leases, number = self._ledger.kept_leases()
        self._kept = {lease.robot: lease for lease in leases}
        return leases, number

    def keep(self, leases: Iterable[Lease]) -> str:
        """Note who holds what now, if that is not what was noted last; why it could not be noted, '' when it was.

        A heartbeat changes nothing here: only who holds a robot is kept, not until when.
        """
        now = {lease.robot: lease for lease in leases}
        changed: dict[str, Lease | None] = {
            robot: now.get(robot)
            for robot in now.keys() | self._kept.keys()
            if (now[robot].number if robot in now else 0) != (self._kept[robot].number if robot in self._kept else 0)
        }
        if not changed:
            return ""
        try:
            self._ledger.keep_leases(changed, self._wall_ns())
        except StorageError as error:
            # Robots work on: a full disk must not stop them. It is tried again with the next turn.
            if str(error) != self._trouble:
                log.error("leases cannot be noted: %s", error)
            self._trouble = str(error)
            return self._trouble
        self._trouble = ""
        self._kept = now
        return ""

    def submitted(self, request: JobRequest) -> bool:
        """Note a job; False if one of its id is there. Raises `StorageError`."""
        return self._ledger.add_job(request, self._wall_ns())

    def ended(self, job: str, phase: str) -> bool:
        """Note that a job is done or cancelled; False if that was noted before. Raises `StorageError`."""
        return self._ledger.end_job(job, phase, self._wall_ns())

    def jobs(self) -> tuple[JobRow, ...]:
        """Open jobs and the newest of those that ended, in the order they came."""
        return self._ledger.jobs()

    def count(self, job: str, episode: str) -> bool:
        """Count a stored episode for a job; False if it counts already. Raises `StorageError`."""
        return self._ledger.count_for_job(job, episode, self._wall_ns())

    def counted(self, job: str) -> tuple[JobEpisodeRow, ...]:
        """What counts for a job."""
        return self._ledger.episodes_of_job(job)

    def task_counts(self) -> dict[str, TaskCount]:
        """Finished episodes of practice, by task."""
        return {row.task: TaskCount(row.episodes, row.successes) for row in self._ledger.task_counts("online")}
