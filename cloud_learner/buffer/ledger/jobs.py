"""Jobs, what counts for them, and who has or holds a robot: what the gateway must know again after it was killed.

Functions of one transaction; `Ledger` has them as methods. The gateway's clock starts over when its computer does, so
times that must outlive it are nanoseconds since 1970 (`wall_ns`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import read_meta, write_meta
from cloud_learner.buffer.ledger.rows import EpisodeRow, JobRow, TakenRobots
from cloud_learner.buffer.ledger.segments import EPISODE_ROWS
from cloud_learner.buffer.ledger.tables import columns_of, insert_into, insert_new, rows_of
from wire.messages.fleet import JobRequest
from wire.types import Lease

_jobs, _done, _leases, _e = tables.jobs.c, tables.job_episodes.c, tables.leases.c, tables.episodes.c
_g, _holds = tables.gateways.c, tables.robot_holds.c
_OPEN = "waiting"
_LEASE = "lease"

# --- jobs -----------------------------------------------------------------------------------------------------------


def add_job(connection: sa.Connection, gateway: int, request: JobRequest, wall_ns: int) -> bool:
    """Enter a job of a gateway; False if one of its id was there, of whichever gateway, which stays as it is."""
    text = msgspec.json.encode(request).decode()
    job = {"id": request.id, "gateway": gateway, "request": text, "phase": _OPEN, "submitted_wall_ns": wall_ns}
    return insert_new(connection, tables.jobs, **job)


def end_job(connection: sa.Connection, job: str, phase: str, wall_ns: int) -> bool:
    """Note that an open job is done or cancelled; False if it had ended before."""
    change = sa.update(tables.jobs).where(_jobs.id == job, _jobs.phase == _OPEN)
    return connection.execute(change.values(phase=phase, ended_wall_ns=wall_ns)).rowcount > 0


def jobs(connection: sa.Connection, gateway: int, ended: int = 100) -> tuple[JobRow, ...]:
    """All open jobs of a gateway and its newest `ended` others, in the order they were submitted."""
    every = columns_of(JobRow, _jobs).where(_jobs.gateway == gateway)
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


def keep_leases(connection: sa.Connection, gateway: int, leases: Mapping[str, Lease | None], wall_ns: int) -> None:
    """Note by robot who holds it now at a gateway; None: nobody any more. All of it or nothing."""
    for robot, lease in leases.items():
        held = sa.delete(tables.leases).where(_leases.robot == robot)
        # a robot that went to another gateway is held there
        connection.execute(held if lease is not None else held.where(_leases.gateway == gateway))
        if lease is not None:
            values = {"robot": robot, "gateway": gateway, "number": lease.number, "wall_ns": wall_ns}
            row = sa.insert(tables.leases).values(lease=msgspec.json.encode(lease).decode(), **values)
            connection.execute(row)


def kept_leases(connection: sa.Connection, gateway: int) -> tuple[Lease, ...]:
    """The leases that stood at a gateway."""
    rows = connection.scalars(sa.select(_leases.lease).where(_leases.gateway == gateway).order_by(_leases.robot))
    return tuple(msgspec.json.decode(row, type=Lease) for row in rows)


def reserve_leases(connection: sa.Connection, count: int) -> int:
    """Reserve the next `count` numbers of leases for the caller; the one before the first of them."""
    number = int(read_meta(connection, _LEASE) or 0)
    write_meta(connection, _LEASE, str(number + count))
    return number


# --- robots -----------------------------------------------------------------------------------------------------------


def take_robots(
    connection: sa.Connection, gateway: int, robots: Sequence[str], silent_s: float, leases: int
) -> TakenRobots:
    """Have these robots, which this gateway hears, but for those that another one has heard of within `silent_s`.

    `leases`: so many numbers are reserved when one comes from another gateway.
    """
    now_ns, elsewhere, moved = _now_ns(connection), dict[str, str](), False
    query = sa.select(_holds.robot, _holds.gateway, _holds.heard_ns, _g.name)
    query = query.join(tables.gateways, _g.number == _holds.gateway).where(_holds.robot.in_(list(robots)))
    for robot, other, heard_ns, name in connection.execute(query):
        if other != gateway and now_ns - heard_ns < silent_s * 1e9:
            elsewhere[robot] = name
        moved |= other != gateway and robot not in elsewhere
    change = {"gateway": gateway, "heard_ns": now_ns}
    if mine := [{"robot": robot, **change} for robot in robots if robot not in elsewhere]:
        row = insert_into(connection, tables.robot_holds)
        row = row.on_conflict_do_update(index_elements=["robot"], set_=change)
        connection.execute(row, mine)
    return TakenRobots(elsewhere, reserve_leases(connection, leases) if moved else 0)


def _now_ns(connection: sa.Connection) -> int:
    """By the database's clock: those of several gateways differ."""
    if connection.dialect.name != "postgresql":
        return time.time_ns()
    return int(connection.scalar(sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint")) or 0)
