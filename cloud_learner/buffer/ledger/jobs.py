"""Jobs, what counts for them, and who holds a robot: what the gateway must know again after it was killed.

Functions of one transaction; `Ledger` has them as methods. The gateway's clock starts over when its computer does, so
times that must outlive it are nanoseconds since 1970 (`wall_ns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import clock_base, read_meta, write_meta
from cloud_learner.buffer.ledger.rows import EpisodeRow, JobRow, LeaseKind, LeaseNote
from cloud_learner.buffer.ledger.segments import EPISODE_ROWS
from cloud_learner.buffer.ledger.tables import columns_of, insert_new, rows_of
from wire.messages.fleet import JobRequest
from wire.types import Lease

_jobs, _done, _leases, _e = tables.jobs.c, tables.job_episodes.c, tables.leases.c, tables.episodes.c
_history = tables.lease_history.c
_OPEN = "waiting"
_LEASE = "lease"

# --- jobs -----------------------------------------------------------------------------------------------------------


def add_job(connection: sa.Connection, request: JobRequest, wall_ns: int) -> bool:
    """Enter a job; False if one of its id was there, which stays as it is."""
    text = msgspec.json.encode(request).decode()
    return insert_new(connection, tables.jobs, id=request.id, request=text, phase=_OPEN, submitted_wall_ns=wall_ns)


def end_job(connection: sa.Connection, job: str, phase: str, wall_ns: int) -> bool:
    """Note that an open job is done or cancelled; False if it had ended before."""
    change = sa.update(tables.jobs).where(_jobs.id == job, _jobs.phase == _OPEN)
    return connection.execute(change.values(phase=phase, ended_wall_ns=wall_ns)).rowcount > 0


def jobs(connection: sa.Connection, ended: int = 100) -> tuple[JobRow, ...]:
    """All open jobs and the newest `ended` others, in the order they were submitted."""
    every = columns_of(JobRow, _jobs)
    still = every.where(_jobs.phase == _OPEN)
    past = every.where(_jobs.phase != _OPEN).order_by(_jobs.number.desc()).limit(ended)
    rows = [*connection.execute(still).mappings(), *connection.execute(past).mappings()]
    found = (JobRow(**{**row, "request": msgspec.json.decode(row["request"], type=JobRequest)}) for row in rows)
    return tuple(sorted(found, key=lambda row: row.number))


def count_for_job(connection: sa.Connection, job: str, episode: str, wall_ns: int) -> bool:
    """Count a stored episode for a job; False if it was counted before, for this job or another one."""
    number = connection.scalar(sa.select(_e.number).where(_e.id == episode))
    if number is None:
        return False
    return insert_new(connection, tables.job_episodes, episode=number, job=job, wall_ns=wall_ns)


def episodes_of_job(connection: sa.Connection, job: str) -> tuple[EpisodeRow, ...]:
    """What was counted for a job, oldest first."""
    query = EPISODE_ROWS.join(tables.job_episodes, _done.episode == _e.number)
    return rows_of(connection, EpisodeRow, query.where(_done.job == job).order_by(_e.number))


def task_counts(connection: sa.Connection, source: str) -> dict[str, tuple[int, int]]:
    """(finished, successful) episodes of one source by task, pruned ones included; aborted ones do not count."""
    success = sa.func.sum(sa.case((_e.outcome == "success", 1), else_=0))
    query = sa.select(_e.task, sa.func.count(), success).where(_e.source == source)
    rows = connection.execute(query.where(_e.outcome.in_(("success", "failure"))).group_by(_e.task))
    return {task: (count, int(won)) for task, count, won in rows}


# --- leases ---------------------------------------------------------------------------------------------------------


def keep_leases(connection: sa.Connection, leases: Mapping[str, Lease | None], wall_ns: int) -> None:
    """Note by robot who holds it now; None: nobody any more. All of it or nothing."""
    for robot, lease in leases.items():
        connection.execute(sa.delete(tables.leases).where(_leases.robot == robot))
        if lease is not None:
            text = msgspec.json.encode(lease).decode()
            row = sa.insert(tables.leases).values(robot=robot, number=lease.number, lease=text, wall_ns=wall_ns)
            connection.execute(row)
            # a number is never given twice, whatever happens to the lease
            write_meta(connection, _LEASE, str(max(lease.number, int(read_meta(connection, _LEASE) or 0))))


def kept_leases(connection: sa.Connection) -> tuple[tuple[Lease, ...], int]:
    """(the leases that stood, the largest number that a lease ever had)."""
    rows = connection.scalars(sa.select(_leases.lease).order_by(_leases.robot))
    number = int(read_meta(connection, _LEASE) or 0)
    return tuple(msgspec.json.decode(row, type=Lease) for row in rows), number


def reserve_leases(connection: sa.Connection, count: int) -> int:
    """Reserve the next `count` numbers of leases for the caller; the one before the first of them."""
    number = int(read_meta(connection, _LEASE) or 0)
    write_meta(connection, _LEASE, str(number + count))
    return number


def note_leases(connection: sa.Connection, notes: Sequence[LeaseNote]) -> None:
    """Enter in the history what began and what ended, in this order. All of it or nothing."""
    for note in notes:
        if note.ended:
            open_one = sa.update(tables.lease_history).where(_history.robot == note.robot, _history.to_ns == -1)
            connection.execute(open_one.where(_history.number == note.number).values(to_ns=note.at_ns))
            continue
        values = {name: getattr(note, name) for name in ("robot", "number", "holder", "kind")}
        base_ns = clock_base(connection, note.at_ns)
        connection.execute(sa.insert(tables.lease_history).values(from_ns=note.at_ns, base_ns=base_ns, **values))


def end_leases(connection: sa.Connection, now_ns: int, slack_ns: int) -> int:
    """End in the history what a gateway that was killed left open, when it last stored a segment and `slack_ns` later,
    or now if that is earlier; how many there were."""
    base_ns = clock_base(connection, now_ns)
    newest = sa.select(tables.segments.c.committed_ns).order_by(tables.segments.c.row.desc()).limit(1)
    alive_ns = connection.scalar(newest) or 0
    rows = connection.execute(sa.select(_history.id, _history.from_ns, _history.base_ns).where(_history.to_ns == -1))
    ended = [(row.id, row.from_ns, row.base_ns) for row in rows]
    for row_id, from_ns, began_base_ns in ended:
        # What was stored later may be of another boot's clock.
        to_ns = max(from_ns, alive_ns if began_base_ns == base_ns else 0) + slack_ns
        if began_base_ns == base_ns:
            to_ns = max(from_ns, min(to_ns, now_ns))
        connection.execute(sa.update(tables.lease_history).where(_history.id == row_id).values(to_ns=to_ns))
    return len(ended)


def lease_intervals(
    connection: sa.Connection, robot: str, kind: LeaseKind, first_ns: int, last_ns: int, now_ns: int
) -> np.ndarray:
    """int64[k, 3]: begin, end and base of the leases of that kind that the robot was held by from `first_ns` to
    `last_ns`, growing; times in nanoseconds since 1970. One that stands ends at `now_ns` of the gateway's clock."""
    begin = _history.from_ns + _history.base_ns
    end = sa.case((_history.to_ns == -1, now_ns), else_=_history.to_ns) + _history.base_ns
    query = sa.select(begin, end, _history.base_ns).order_by(begin)
    query = query.where(_history.robot == robot, _history.kind == kind, begin <= last_ns, end >= first_ns)
    return np.array([tuple(row) for row in connection.execute(query)], np.int64).reshape(-1, 3)


def ever_leased(connection: sa.Connection, robot: str, kind: LeaseKind) -> bool:
    """Whether the robot was ever held by a lease of that kind."""
    query = sa.select(_history.id).where(_history.robot == robot, _history.kind == kind).limit(1)
    return connection.scalar(query) is not None
