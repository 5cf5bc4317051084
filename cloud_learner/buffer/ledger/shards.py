"""Where segments lie, as they move from the journal into shards, and what is forgotten or found damaged.

Functions of one transaction; `Ledger` has them as methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.commit import require_spec
from cloud_learner.buffer.ledger.notes import read_meta, write_meta
from cloud_learner.buffer.ledger.rows import ShardRow, Waiting
from cloud_learner.buffer.ledger.segments import chunks
from wire.errors import StorageError

_s, _e, _shards = tables.segments.c, tables.episodes.c, tables.shards.c
_joined = tables.segments.join(tables.episodes, _s.episode == _e.number)
_GENERATION = "generation"
_JOURNAL = "journal"


# --- sealing --------------------------------------------------------------------------------------------------------


def in_journal(connection: sa.Connection) -> Waiting:
    """How much lies in the journal, damaged segments included."""
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (_s.steps, _s.bytes))
    row = connection.execute(sa.select(sa.func.count(), *sums).where(_s.journal.is_not(None))).one()
    return Waiting(*map(int, row))


def journals(connection: sa.Connection) -> set[int]:
    """Numbers of the journal files that some segment lies in, damaged ones included."""
    return set(connection.scalars(sa.select(_s.journal).where(_s.journal.is_not(None)).distinct()))


def reserve_shard(connection: sa.Connection, spec_hash: str, created_ns: int) -> int:
    """A number for a new shard, in state 'writing'; numbers grow from 0 and are never given twice.

    Raises `InvalidDataError` if the spec is unknown.
    """
    require_spec(connection, spec_hash)
    # not the largest there is: what a forgotten shard left in somebody's cache must not be taken for the new one
    number = _next(connection, f"shards {spec_hash}") - 1
    values = {"spec_hash": spec_hash, "number": number, "state": "writing", "created_ns": created_ns}
    connection.execute(sa.insert(tables.shards).values(**values))
    return number


def commit_shard(
    connection: sa.Connection,
    spec_hash: str,
    number: int,
    offsets: Mapping[int, int],
    record_bytes: int,
    bytes: int,
    sha256: str,
) -> int:
    """Move segments to a reserved shard whose object is stored, to these offsets by row; how many were moved.

    Those that were pruned or marked as damaged meanwhile are left out. Raises `StorageError` if it is not in state
    'writing'.
    """
    _require_state(connection, spec_hash, number, "writing")
    move = sa.update(tables.segments).where(_s.row == sa.bindparam("_row"), ~_s.damaged)
    move = move.values(journal=None, shard=number, offset=sa.bindparam("_offset"))
    moved = 0
    if offsets:
        found = connection.execute(move, [{"_row": row, "_offset": offset} for row, offset in offsets.items()])
        moved = found.rowcount
    _set_shard(connection, spec_hash, number, state="sealed", record_bytes=record_bytes, bytes=bytes, sha256=sha256)
    return moved


def shards(connection: sa.Connection, spec_hash: str | None = None) -> tuple[ShardRow, ...]:
    """All shards, in any state, by spec and number."""
    counted = {
        "live_bytes": sa.func.sum(sa.case((_s.damaged, 0), else_=_s.bytes)),
        "live_steps": sa.func.sum(sa.case((_s.damaged, 0), else_=_s.steps)),
        "live_segments": sa.func.sum(sa.case((_s.damaged, 0), else_=1)),
        "damaged_segments": sa.func.sum(sa.case((_s.damaged, 1), else_=0)),
    }
    columns = (column.label(name) for name, column in counted.items())
    live = sa.select(_e.spec_hash, _s.shard, *columns).select_from(_joined).where(_s.shard.is_not(None))
    live = live.group_by(_e.spec_hash, _s.shard)
    kept = ShardRow.__struct_fields__[: -len(counted)]
    query = sa.select(*(_shards[name] for name in kept)).order_by(_shards.spec_hash, _shards.number)
    if spec_hash is not None:
        live, query = live.where(_e.spec_hash == spec_hash), query.where(_shards.spec_hash == spec_hash)
    # PostgreSQL adds bigints up to a decimal
    counts = {(found, number): tuple(map(int, sums)) for found, number, *sums in connection.execute(live)}
    rows = connection.execute(query)
    return tuple(ShardRow(*row, *counts.get((row.spec_hash, row.number), (0, 0, 0, 0))) for row in rows)


def mark_dropping(connection: sa.Connection, spec_hash: str, number: int) -> None:
    """Note that the shard's object is about to be deleted. Raises `StorageError` if a live segment lies in it."""
    _require_state(connection, spec_hash, number, "sealed", "dropping")
    query = sa.select(_s.id).select_from(_joined).where(_s.shard == number, _e.spec_hash == spec_hash, ~_s.damaged)
    found = connection.scalar(query.limit(1))
    if found is not None:
        raise StorageError(f"ledger: shard {number} of robot spec {spec_hash} is still needed, by segment {found}.")
    _set_shard(connection, spec_hash, number, state="dropping")


def forget_shard(connection: sa.Connection, spec_hash: str, number: int) -> None:
    """Remove the rows of a shard whose object was deleted. Raises `StorageError` if it is sealed or unknown."""
    _require_state(connection, spec_hash, number, "writing", "dropping")
    connection.execute(sa.delete(tables.shards).where(_shards.spec_hash == spec_hash, _shards.number == number))


def _set_shard(connection: sa.Connection, spec_hash: str, number: int, **values: Any) -> None:
    where = (_shards.spec_hash == spec_hash, _shards.number == number)
    connection.execute(sa.update(tables.shards).where(*where).values(**values))


def _require_state(connection: sa.Connection, spec_hash: str, number: int, *allowed: str) -> None:
    query = sa.select(_shards.state).where(_shards.spec_hash == spec_hash, _shards.number == number)
    state = connection.scalar(query)
    if state not in allowed:
        raise StorageError(
            f"ledger: shard {number} of robot spec {spec_hash} is {state or 'unknown'}, not {' or '.join(allowed)}. "
            "Does another process seal or compact without holding `exclusive`?"
        )


# --- forgetting -----------------------------------------------------------------------------------------------------


def claim_journal(connection: sa.Connection, owner: str) -> None:
    """Note whose journal the ledger refers to. Raises `StorageError` if that is another one's.

    Journal files are known by number: two machines that wrote to one ledger would take each other's for damaged.
    """
    known = journal_owner(connection)
    if not known:
        write_meta(connection, _JOURNAL, owner)
    elif known != owner:
        raise StorageError(
            "another data directory writes to this ledger already: its journal is not this one's. Send segments and "
            "imports through that machine's gateway, or use a ledger of its own."
        )


def journal_owner(connection: sa.Connection) -> str:
    """Whose journal the ledger refers to, '' before the first writer."""
    return read_meta(connection, _JOURNAL)


def generation(connection: sa.Connection) -> int:
    """Grows whenever segments that were there are pruned or marked: whoever keeps an index must build it again."""
    return int(read_meta(connection, _GENERATION) or 0)


def prune(connection: sa.Connection, episode_ids: Sequence[str], now_ns: int) -> tuple[int, int]:
    """Delete the segments of these episodes; how many that were, and their bytes.

    The episodes stay, so that lineage can name them. Those that are unknown or pruned already are skipped.
    """
    numbers: list[int] = []
    for some in chunks(episode_ids):
        numbers += connection.scalars(sa.select(_e.number).where(_e.id.in_(some), _e.pruned_ns == 0))
    segments = size = 0
    for some in chunks(numbers):
        sums = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(_s.bytes), 0)).where(_s.episode.in_(some))
        found = connection.execute(sums).one()
        segments, size = segments + found[0], size + int(found[1])
        connection.execute(sa.delete(tables.segments).where(_s.episode.in_(some)))
        _subtract(connection, some)
        # 0 would say that they are there
        pruned = sa.update(tables.episodes).where(_e.number.in_(some))
        connection.execute(pruned.values(pruned_ns=now_ns or 1))
    if numbers:
        _next(connection, _GENERATION)
    return segments, size


def _subtract(connection: sa.Connection, numbers: Sequence[int]) -> None:
    """Take these episodes out of the tallies of their robots."""
    names = ("segments", "steps", "human_steps", "interventions", "bytes", "ticks", "end_tick")
    sums = (sa.func.sum(_e[name]).label(name) for name in names)
    query = sa.select(_e.robot, sa.func.count().label("episodes"), *sums).where(_e.number.in_(numbers))
    for row in connection.execute(query.group_by(_e.robot)).mappings():
        less = {name: tables.tallies.c[name] - int(row[name]) for name in ("episodes", *names)}
        connection.execute(sa.update(tables.tallies).where(tables.tallies.c.robot == row["robot"]).values(**less))


def pruned_episodes(connection: sa.Connection) -> int:
    """How many episodes were pruned."""
    return connection.scalar(sa.select(sa.func.count()).where(_e.pruned_ns != 0)) or 0


def mark_damaged(connection: sa.Connection, rows: Sequence[int]) -> int:
    """Note that the segments of these ledger rows cannot be read; how many were not marked yet."""
    marked = 0
    for some in chunks(rows):
        mark = sa.update(tables.segments).where(_s.row.in_(some), ~_s.damaged).values(damaged=True)
        marked += connection.execute(mark).rowcount
    if marked:
        _next(connection, _GENERATION)
    return marked


def _next(connection: sa.Connection, key: str) -> int:
    """Count a number in `meta` one up; its new value, 1 the first time."""
    number = int(read_meta(connection, key) or 0) + 1
    write_meta(connection, key, str(number))
    return number
