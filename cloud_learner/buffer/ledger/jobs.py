"""Jobs, what counts for them, and who has or holds a robot: what the gateway must know again after it was killed.

Functions of one transaction; `Ledger` has them as methods. The gateway's clock starts over when its computer does, so
times that must outlive it are nanoseconds since 1970 (`wall_ns`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import clock_base, read_meta, write_meta
from cloud_learner.buffer.ledger.rows import (
    EpisodeRow,
    JobRow,
    LeaseKind,
    LeaseNote,
    TakenRobots,
    columns_of,
    insert_into,
    insert_new,
    rows_of,
)
from cloud_learner.buffer.ledger.segments import EPISODE_ROWS
from wire.messages.fleet import JobRequest
from wire.types import Lease

_jobs, _done, _leases, _e = tables.jobs.c, tables.job_episodes.c, tables.leases.c, tables.episodes.c
_history = tables.lease_history.c
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


def note_leases(connection: sa.Connection, gateway: int, notes: Sequence[LeaseNote]) -> None:
    """Enter in the history what began and what ended at a gateway, in this order, but for what is there already. All
    of it or nothing."""
    for note in notes:
        one = sa.and_(_history.robot == note.robot, _history.number == note.number)
        if note.ended:
            began = sa.and_(_history.to_ns == -1, _history.from_ns <= note.at_ns)
            connection.execute(sa.update(tables.lease_history).where(one, began).values(to_ns=note.at_ns))
            continue
        same = sa.and_(one, _history.kind == note.kind, _history.from_ns == note.at_ns, _history.gateway == gateway)
        if connection.scalar(sa.select(_history.id).where(same)) is not None:
            continue
        values = {name: getattr(note, name) for name in ("robot", "number", "holder", "kind")} | {"gateway": gateway}
        base_ns = clock_base(connection, note.at_ns)
        connection.execute(sa.insert(tables.lease_history).values(from_ns=note.at_ns, base_ns=base_ns, **values))


def end_leases(connection: sa.Connection, gateway: int, now_ns: int, slack_ns: int) -> int:
    """End in the history what a gateway left open when it was killed: when it last stored a segment and `slack_ns`
    later, or now if that is earlier; how many there were."""
    open_now = sa.and_(_history.gateway == gateway, _history.to_ns == -1)
    base_ns, alive_ns = clock_base(connection, now_ns), _stored_ns(connection, gateway)
    rows = connection.execute(sa.select(_history.id, _history.from_ns, _history.base_ns).where(open_now))
    ended = [(row.id, row.from_ns, row.base_ns) for row in rows]
    for row_id, from_ns, began_base_ns in ended:
        # What was stored later may be of another boot's clock.
        to_ns = max(from_ns, alive_ns if began_base_ns == base_ns else 0) + slack_ns
        if began_base_ns == base_ns:
            to_ns = max(from_ns, min(to_ns, now_ns))
        connection.execute(sa.update(tables.lease_history).where(_history.id == row_id).values(to_ns=to_ns))
    return len(ended)


def _end_taken(connection: sa.Connection, gateway: int, robots: Sequence[str], slack_ns: int) -> None:
    """End in the history what stands at another gateway, from which these robots were taken: when that last stored a
    segment, and `slack_ns` later. Of its boots nothing is known here."""
    open_now = sa.and_(_history.gateway == gateway, _history.to_ns == -1, _history.robot.in_(robots))
    alive_ns = _stored_ns(connection, gateway)
    until = sa.case((_history.from_ns > alive_ns, _history.from_ns), else_=alive_ns) + slack_ns
    connection.execute(sa.update(tables.lease_history).where(open_now).values(to_ns=until))


def _stored_ns(connection: sa.Connection, gateway: int) -> int:
    """When a gateway stored its newest segment, by its clock; 0 for never."""
    newest = sa.select(tables.segments.c.committed_ns).where(tables.segments.c.gateway == gateway)
    return connection.scalar(newest.order_by(tables.segments.c.row.desc()).limit(1)) or 0


def lease_intervals(
    connection: sa.Connection, robot: str, kind: LeaseKind, spans: Iterable[tuple[int, int]], now_ns: int
) -> np.ndarray:
    """int64[k, 3]: begin, end and base of the leases of that kind that the robot was held by within any of `spans`,
    (first, last) each, growing; times in nanoseconds since 1970. One that stands ends at `now_ns` of the gateway's
    clock."""
    begin = _history.from_ns + _history.base_ns
    end = sa.case((_history.to_ns == -1, now_ns), else_=_history.to_ns) + _history.base_ns
    query = sa.select(begin, end, _history.base_ns).order_by(begin)
    then = sa.or_(*(sa.and_(begin <= last_ns, end >= first_ns) for first_ns, last_ns in spans))
    query = query.where(_history.robot == robot, _history.kind == kind, then)
    return np.array([tuple(row) for row in connection.execute(query)], np.int64).reshape(-1, 3)


def ever_leased(connection: sa.Connection, robot: str, kind: LeaseKind) -> bool:
    """Whether the robot was ever held by a lease of that kind."""
    query = sa.select(_history.id).where(_history.robot == robot, _history.kind == kind).limit(1)
    return connection.scalar(query) is not None


# --- robots -----------------------------------------------------------------------------------------------------------


def take_robots(
    connection: sa.Connection, gateway: int, robots: Sequence[str], silent_s: float, leases: int
) -> TakenRobots:
    """Have these robots, which this gateway hears, but for those that another one has heard of within `silent_s`.

    `leases`: so many numbers are reserved when one comes from another gateway, at which nobody has it any more.
    """
    now_ns, elsewhere, moved = _now_ns(connection), dict[str, str](), dict[int, list[str]]()
    query = sa.select(_holds.robot, _holds.gateway, _holds.heard_ns, _g.name)
    query = query.join(tables.gateways, _g.number == _holds.gateway).where(_holds.robot.in_(list(robots)))
    for robot, other, heard_ns, name in connection.execute(query):
        if other != gateway and now_ns - heard_ns < silent_s * 1e9:
            elsewhere[robot] = name
        elif other != gateway:
            moved.setdefault(other, []).append(robot)
    for other, of_it in moved.items():
        _end_taken(connection, other, of_it, int(silent_s * 1e9))
    change = {"gateway": gateway, "heard_ns": now_ns}
    if mine := [{"robot": robot, **change} for robot in robots if robot not in elsewhere]:
        row = insert_into(connection, tables.robot_holds)
        row = row.on_conflict_do_update(index_elements=["robot"], set_=change)
        connection.execute(row, mine)
    come = tuple(robot for of_it in moved.values() for robot in of_it)
    return TakenRobots(elsewhere, come, reserve_leases(connection, leases) if moved else 0)


def _now_ns(connection: sa.Connection) -> int:
    """By the database's clock: those of several gateways differ."""
    if connection.dialect.name != "postgresql":
        return time.time_ns()
    return int(connection.scalar(sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1e9)::bigint")) or 0)
