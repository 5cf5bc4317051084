"""Named moments of the ledger. Functions of one transaction; `Ledger` has them as methods."""

from __future__ import annotations

import time
from collections.abc import Iterable

import sqlalchemy as sa

from cloud_learner.buffer.files import checked_name
from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.rows import SnapshotRow
from cloud_learner.buffer.ledger.segments import chunks
from wire.errors import InvalidDataError, suggest

_n, _s, _e, _t = tables.snapshots.c, tables.segments.c, tables.episodes.c, tables.tallies.c


def take_snapshot(connection: sa.Connection, name: str) -> SnapshotRow:
    """Note what is stored now as `name`.

    Raises `InvalidDataError` for a name that was given before or cannot be one, and while nothing is stored.
    """
    checked_name(name, "snapshot")
    if name in _names(connection):
        raise InvalidDataError(f"there is a snapshot '{name}' already, and it stays what it is: choose another name.")
    # all but the damaged ones, without looking at each: whoever commits segments waits meanwhile
    every = sa.select(sa.func.max(_t.newest_row), sa.func.sum(_t.segments), sa.func.sum(_t.steps))
    damaged = sa.select(sa.func.count(), sa.func.sum(_s.steps)).join_from(tables.segments, tables.episodes)
    row, segments, steps = connection.execute(every).one()
    bad, bad_steps = connection.execute(damaged.where(sa.text("damaged"), _e.pruned_ns == 0)).one()
    if not segments or segments == bad:
        raise InvalidDataError(f"snapshot '{name}' would be empty: nothing is stored yet.")
    # PostgreSQL adds bigints up to a decimal
    segments, steps = int(segments) - bad, int(steps) - int(bad_steps or 0)
    values = {"name": name, "row": row, "segments": segments, "steps": steps, "wall_ns": time.time_ns()}
    connection.execute(sa.insert(tables.snapshots).values(**values))
    return SnapshotRow(**values, there=segments)


def snapshots(connection: sa.Connection) -> tuple[SnapshotRow, ...]:
    """All snapshots, oldest first."""
    there = sa.select(sa.func.count()).where(_s.row <= _n.row, ~_s.damaged).scalar_subquery()
    query = sa.select(_n.name, _n.row, _n.segments, _n.steps, _n.wall_ns, there).order_by(_n.wall_ns, _n.name)
    return tuple(SnapshotRow(*row) for row in connection.execute(query))


def snapshot_row(connection: sa.Connection, name: str) -> int:
    """The newest ledger row of a snapshot. Raises `InvalidDataError` if there is none of this name."""
    row = connection.scalar(sa.select(_n.row).where(_n.name == name))
    if row is None:
        known = _names(connection)
        there = f"there are {', '.join(known)}" if known else "none was taken; `vla-fleet buffer snapshot` does"
        raise InvalidDataError(f"there is no snapshot '{name}': {there}.{suggest(name, known)}")
    return row


def newest_row(connection: sa.Connection) -> int:
    """Of all segments that are stored, 0 for none."""
    return connection.scalar(sa.select(sa.func.max(_t.newest_row))) or 0


def snapshots_of(connection: sa.Connection, episode_ids: Iterable[str]) -> tuple[str, ...]:
    """Names of the snapshots that hold a segment of these episodes, by name."""
    if not _names(connection):
        return ()
    first = min(first_rows(connection, episode_ids).values(), default=2**63 - 1)
    return tuple(connection.scalars(sa.select(_n.name).where(_n.row >= first).order_by(_n.name)))


def first_rows(connection: sa.Connection, episode_ids: Iterable[str]) -> dict[str, int]:
    """The ledger row of the segment that was committed first, by episode; those without one are absent."""
    found: dict[str, int] = {}
    joined = sa.select(_e.id, sa.func.min(_s.row)).join_from(tables.episodes, tables.segments, _s.episode == _e.number)
    for some in chunks(episode_ids):
        found.update(map(tuple, connection.execute(joined.where(_e.id.in_(some)).group_by(_e.id))))
    return found


def _names(connection: sa.Connection) -> list[str]:
    return sorted(connection.scalars(sa.select(_n.name)))
