"""Where segments lie, as they move from the journal into shards, and what is forgotten or found damaged.

Functions of one transaction; `Ledger` has them as methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.commit import require_spec
from cloud_learner.buffer.ledger.rows import ObjectRow, Placed, ShardRow, Unsealed, Waiting
from cloud_learner.buffer.ledger.segments import chunks
from wire.errors import StorageError

_s, _e, _shards, _objects = tables.segments.c, tables.episodes.c, tables.shards.c, tables.objects.c
_joined = tables.segments.join(tables.episodes, _s.episode == _e.number)
_GENERATION = "generation"
_JOURNAL = "journal"


# --- sealing --------------------------------------------------------------------------------------------------------


def unsealed(connection: sa.Connection, spec_hash: str | None = None) -> tuple[Unsealed, ...]:
    """The segments in the journal that are not damaged, by episode number and index."""
    finished = sa.and_(_e.last_index >= 0, _e.segments > _e.last_index)
    computed: dict[str, sa.ColumnElement[Any]] = {
        "episode": _e.id,
        "episode_number": _e.number,
        "spec_hash": _e.spec_hash,
        "finished": sa.cast(finished, sa.Boolean),
    }
    names = Unsealed.__struct_fields__
    query = sa.select(*(computed[name] if name in computed else _s[name] for name in names)).select_from(_joined)
    query = query.where(_s.journal.is_not(None), ~_s.damaged).order_by(_e.number, _s.index)
    if spec_hash is not None:
        query = query.where(_e.spec_hash == spec_hash)
    return tuple(Unsealed(*row) for row in connection.execute(query))


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
    objects: Sequence[ObjectRow],
    placed: Sequence[Placed],
    bytes: int,
) -> int:
    """Move the segments in `placed` to a reserved shard whose objects are stored; how many were moved.

    Those that were pruned or marked as damaged meanwhile are left out. Raises `StorageError` if it is not in state
    'writing'.
    """
    _require_state(connection, spec_hash, number, "writing")
    live: dict[int, int] = {}
    for some in chunks(place.row for place in placed):
        query = sa.select(_s.row, _s.steps).where(_s.row.in_(some), ~_s.damaged)
        live.update((row, steps) for row, steps in connection.execute(query))
    moves = [
        {
            "_row": place.row,
            "_first_row": place.first_row,
            "_placed": np.ascontiguousarray(place.placed, "<i8").tobytes(),
        }
        for place in placed
        if place.row in live
    ]
    if moves:
        move = sa.update(tables.segments).where(_s.row == sa.bindparam("_row"))
        move = move.values(first_row=sa.bindparam("_first_row"), placed=sa.bindparam("_placed"))
        connection.execute(move.values(journal=None, offset=0, shard=number), moves)
    if objects:
        facts = [
            {"key": row.key, "spec_hash": spec_hash, "number": number, "bytes": row.bytes, "sha256": row.sha256}
            for row in objects
        ]
        connection.execute(sa.insert(tables.objects), facts)
    # rows of the shard, those of segments that were left out included, but for the last ones
    rows = max((place.first_row + live[place.row] for place in placed if place.row in live), default=0)
    _set_shard(connection, spec_hash, number, state="sealed", rows=rows, bytes=bytes)
    return len(moves)


def shards(connection: sa.Connection, spec_hash: str | None = None) -> tuple[ShardRow, ...]:
    """All shards, in any state, by spec and number."""
    live = (
        sa.select(
            _e.spec_hash,
            _s.shard,
            sa.func.sum(sa.case((_s.damaged, 0), else_=_s.steps)).label("live_rows"),
            sa.func.sum(sa.case((_s.damaged, 0), else_=1)).label("live_segments"),
            sa.func.count().label("segments"),
        )
        .select_from(_joined)
        .where(_s.shard.is_not(None))
        .group_by(_e.spec_hash, _s.shard)
    )
    query = sa.select(tables.shards).order_by(_shards.spec_hash, _shards.number)
    if spec_hash is not None:
        live, query = live.where(_e.spec_hash == spec_hash), query.where(_shards.spec_hash == spec_hash)
    counts = {
        (row.spec_hash, row.shard): (int(row.live_rows), int(row.live_segments), row.segments)
        for row in connection.execute(live)
    }
    found = []
    for row in connection.execute(query).mappings():
        rows, live_segments, segments = counts.get((row["spec_hash"], row["number"]), (0, 0, 0))
        damaged = segments - live_segments
        found.append(ShardRow(**row, live_rows=rows, live_segments=live_segments, damaged_segments=damaged))
    return tuple(found)


def objects_of(connection: sa.Connection, spec_hash: str, number: int) -> tuple[ObjectRow, ...]:
    """The objects of a sealed shard, by key."""
    query = sa.select(*(_objects[name] for name in ObjectRow.__struct_fields__))
    rows = connection.execute(query.where(_objects.spec_hash == spec_hash, _objects.number == number))
    # sorted here: how a database sorts text depends on its locale
    return tuple(sorted((ObjectRow(*row) for row in rows), key=lambda row: row.key))


def mark_dropping(connection: sa.Connection, spec_hash: str, number: int) -> None:
    """Note that the shard's objects are about to be deleted. Raises `StorageError` if a live segment lies in it."""
    _require_state(connection, spec_hash, number, "sealed", "dropping")
    _require_empty(connection, spec_hash, number)
    _set_shard(connection, spec_hash, number, state="dropping")


def forget_shard(connection: sa.Connection, spec_hash: str, number: int) -> None:
    """Remove the rows of a shard whose objects were deleted. Raises `StorageError` if it is sealed or unknown."""
    _require_state(connection, spec_hash, number, "writing", "dropping")
    _require_empty(connection, spec_hash, number)
    connection.execute(sa.delete(tables.objects).where(_objects.spec_hash == spec_hash, _objects.number == number))
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


def _require_empty(connection: sa.Connection, spec_hash: str, number: int) -> None:
    query = sa.select(_s.id).select_from(_joined).where(_s.shard == number, _e.spec_hash == spec_hash, ~_s.damaged)
    found = connection.scalar(query.limit(1))
    if found is not None:
        raise StorageError(f"ledger: shard {number} of robot spec {spec_hash} is still needed, by segment {found}.")


# --- forgetting -----------------------------------------------------------------------------------------------------


def claim_journal(connection: sa.Connection, owner: str) -> None:
    """Note whose journal the ledger refers to. Raises `StorageError` if that is another one's.

    Journal files are known by number: two machines that wrote to one ledger would take each other's for damaged.
    """
    known = journal_owner(connection)
    if not known:
        connection.execute(sa.insert(tables.meta).values(key=_JOURNAL, value=owner))
    elif known != owner:
        raise StorageError(
            "another data directory writes to this ledger already: its journal is not this one's. Send segments and "
            "imports through that machine's gateway, or use a ledger of its own."
        )


def journal_owner(connection: sa.Connection) -> str:
    """Whose journal the ledger refers to, '' before the first writer."""
    return connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.key == _JOURNAL)) or ""


def generation(connection: sa.Connection) -> int:
    """Grows whenever segments that were there are pruned or marked: whoever keeps an index must build it again."""
    return int(connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.key == _GENERATION)) or 0)


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
    meta = tables.meta
    value = connection.scalar(sa.select(meta.c.value).where(meta.c.key == key))
    if value is None:
        connection.execute(sa.insert(meta).values(key=key, value="1"))
        return 1
    connection.execute(sa.update(meta).where(meta.c.key == key).values(value=str(int(value) + 1)))
    return int(value) + 1
