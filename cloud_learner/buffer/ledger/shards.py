"""Where segments lie, as they move from the journal into shards; what is held back, forgotten or found damaged.

Functions of one transaction; `Ledger` has them as methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.notes import count_up, read_meta, spec, write_meta
from cloud_learner.buffer.ledger.rows import HeldBy, HeldState, Journaled, ShardRow, Waiting, columns_of, rows_of
from wire.errors import InvalidDataError, StorageError
from wire.types import EpisodeSource

_h = tables.held_pictures.c
_s, _e, _g, _shards = tables.segments.c, tables.episodes.c, tables.gateways.c, tables.shards.c
_joined = tables.segments.join(tables.episodes, _s.episode == _e.number)
_GENERATION = "generation"
_PRUNING = "pruning"
_MOVE = sa.update(tables.segments).where(_s.row == sa.bindparam("_row"))
_MOVE = _MOVE.values(journal=None, shard=sa.bindparam("_shard"), offset=sa.bindparam("_offset"))


# --- sealing --------------------------------------------------------------------------------------------------------


def in_journal(connection: sa.Connection) -> Waiting:
    """How much lies in journals, damaged segments included."""
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (_s.steps, _s.bytes))
    row = connection.execute(sa.select(sa.func.count(), *sums).where(_s.journal.is_not(None))).one()
    return Waiting(*map(int, row))


def journals(connection: sa.Connection, gateway: int) -> set[int]:
    """Numbers of the files of a gateway's journal that some segment lies in, damaged ones included."""
    mine = sa.select(_s.journal).where(_s.journal.is_not(None), _s.gateway == gateway)
    return set(connection.scalars(mine.distinct()))


def reserve_shard(connection: sa.Connection, spec_hash: str, created_ns: int) -> int:
    """A number for a new shard, in state 'writing'; numbers grow from 0 and are never given twice.

    Raises `InvalidDataError` if the spec is unknown.
    """
    spec(connection, spec_hash)
    # not the largest there is: what a forgotten shard left in somebody's cache must not be taken for the new one
    number = count_up(connection, f"shards {spec_hash}") - 1
    values = {"spec_hash": spec_hash, "number": number, "state": "writing", "created_ns": created_ns}
    connection.execute(sa.insert(tables.shards).values(**values))
    return number


def commit_shard(
    connection: sa.Connection, spec_hash: str, number: int, record_bytes: int, bytes: int, sha256: str
) -> None:
    """Note that the object of a reserved shard is stored. Raises `StorageError` if it is not in state 'writing'."""
    _require_state(connection, spec_hash, number, "writing")
    _set_shard(connection, spec_hash, number, state="sealed", record_bytes=record_bytes, bytes=bytes, sha256=sha256)


def move_segments(connection: sa.Connection, number: int, places: Mapping[int, tuple[int, int]]) -> int:
    """Have segments lie in a sealed shard of their spec from now on, by row (offset, bytes); how many moved.

    Those that were pruned or marked as damaged meanwhile are left out; so are those whose pictures have come meanwhile:
    what was written is not their record any more, which is longer.
    """
    query = sa.select(_s.row, _s.bytes).where(_s.row.in_(list(places)), ~_s.damaged)
    rows = [row for row, size in connection.execute(query) if size == places[row][1]]
    if rows:
        _count_live(connection, rows, -1)
        connection.execute(_MOVE, [{"_row": row, "_shard": number, "_offset": places[row][0]} for row in rows])
        _count_live(connection, rows, +1)
    return len(rows)


def shards(
    connection: sa.Connection, spec_hash: str | None = None, below_bytes: int | None = None
) -> tuple[ShardRow, ...]:
    """All shards, in any state, by spec and number; of one spec, or only those with fewer live bytes."""
    query = columns_of(ShardRow, _shards)
    if spec_hash is not None:
        query = query.where(_shards.spec_hash == spec_hash)
    if below_bytes is not None:
        query = query.where(_shards.live_bytes < below_bytes)
    return rows_of(connection, ShardRow, query.order_by(_shards.spec_hash, _shards.number))


def _count_live(connection: sa.Connection, rows: Sequence[int], sign: int) -> None:
    """Add these segments to the counts of the shards they lie in, or with -1 take them out; a few hundred rows."""
    whole = sa.case((_s.damaged, 0), else_=1)
    counted = {
        "live_bytes": sa.func.sum(whole * _s.bytes),
        "live_steps": sa.func.sum(whole * _s.steps),
        "live_segments": sa.func.sum(whole),
        "damaged_segments": sa.func.sum(1 - whole),
    }
    query = sa.select(_e.spec_hash, _s.shard, *counted.values()).select_from(_joined)
    query = query.where(_s.row.in_(rows), _s.shard.is_not(None)).group_by(_e.spec_hash, _s.shard)
    for spec_hash, number, *sums in connection.execute(query).all():
        # PostgreSQL adds bigints up to a decimal
        more = {name: _shards[name] + sign * int(value) for name, value in zip(counted, sums, strict=True)}
        _set_shard(connection, spec_hash, number, **more)


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


# --- whose journal it is ---------------------------------------------------------------------------------------------


def claim_journal(connection: sa.Connection, journal: str, name: str, renamed: bool) -> int:
    """The number of the gateway that has this `journal`, called `name`; a new one is entered, and `renamed` if it was
    called otherwise.

    Raises `StorageError` when another journal of that name holds segments that are not sealed: they are nowhere else.
    """
    known = connection.execute(sa.select(_g.number, _g.name).where(_g.journal == journal)).one_or_none()
    if known is not None and (known.name == name or not renamed):
        return int(known.number)
    other = connection.scalar(sa.select(_g.number).where(_g.name == name))
    if other is not None:
        if known is not None or connection.scalar(sa.select(_unsealed_of(other))):
            raise StorageError(
                f"another data directory writes to this ledger as gateway '{name}': its journal is not this one's. "
                "Give each gateway a name of its own (--gateway-name), or restore the journal that belongs here."
            )
        connection.execute(sa.update(tables.gateways).where(_g.number == other).values(journal=journal))
        return int(other)
    if known is not None:
        connection.execute(sa.update(tables.gateways).where(_g.number == known.number).values(name=name))
        return int(known.number)
    row = sa.insert(tables.gateways).values(name=name, journal=journal).returning(_g.number)
    return int(connection.execute(row).scalar_one())


def gateway_of(connection: sa.Connection, journal: str) -> int:
    """The number of the gateway that has this journal, 0 when none is known."""
    return connection.scalar(sa.select(_g.number).where(_g.journal == journal)) or 0


def gateway_names(connection: sa.Connection) -> dict[int, str]:
    """All gateways that ever wrote here, by number."""
    return dict(map(tuple, connection.execute(sa.select(_g.number, _g.name).order_by(_g.number))))


def unsealed_elsewhere(connection: sa.Connection, gateway: int) -> dict[str, int]:
    """How many segments lie in the journals of other gateways, by their names."""
    query = sa.select(_g.name, sa.func.count()).join(tables.gateways, _g.number == _s.gateway)
    query = query.where(_s.journal.is_not(None), _s.gateway != gateway, ~_s.damaged).group_by(_g.name)
    return dict(map(tuple, connection.execute(query)))


def _unsealed_of(gateway: int) -> sa.Exists:
    return sa.exists().where(_s.journal.is_not(None), _s.gateway == gateway)


# --- pictures that relays hold back ---------------------------------------------------------------------------------


def complete_segment(connection: sa.Connection, gateway: int, row: int, at: Journaled, now_ns: int) -> None:
    """A segment whose pictures were held back lies at `at` from now on, with them, in the journal of `gateway`.

    Raises `InvalidDataError` if it is gone.
    """
    of = (_s.bytes, _e.number, _e.robot)
    query = sa.select(*of).select_from(_joined).where(_s.row == row, _e.pruned_ns == 0)
    if (found := connection.execute(query).one_or_none()) is None:
        raise InvalidDataError(f"ledger row {row}: its episode was pruned; its pictures are not taken.")
    before, episode, robot = found
    _count_live(connection, [row], -1)
    place = {"journal": at.journal, "shard": None, "offset": at.offset, "bytes": at.bytes, "sha256": at.sha256}
    times = {"gateway": gateway, "received_ns": now_ns, "committed_ns": now_ns}
    connection.execute(sa.update(tables.segments).where(_s.row == row).values(**place, **times))
    for table, of_it in ((tables.episodes, _e.number == episode), (tables.tallies, tables.tallies.c.robot == robot)):
        connection.execute(sa.update(table).where(of_it).values(bytes=table.c.bytes + at.bytes - before))
    connection.execute(sa.delete(tables.held_pictures).where(_h.row == row))


def ask_pictures(connection: sa.Connection, segment_ids: Sequence[str]) -> int:
    """Pictures of some hundred segments are wanted; of how many they are held back and were not wanted before."""
    return _set_held(connection, _s.id.in_(segment_ids), HeldState.held, HeldState.wanted)


def ask_episodes(connection: sa.Connection, episode_ids: Sequence[str] | None, human: bool) -> int:
    """As `ask_pictures`, of some hundred episodes, None: of all; `human`: only where somebody taught."""
    chosen: list[sa.ColumnElement[bool]] = [] if episode_ids is None else [_e.id.in_(episode_ids)]
    if human:
        chosen.append((_s.human_steps > 0) | (_e.source == EpisodeSource.demonstration))
    return _set_held(connection, sa.and_(sa.true(), *chosen), HeldState.held, HeldState.wanted)


def note_pictures_gone(connection: sa.Connection, relay: str, segment_ids: Sequence[str]) -> int:
    """A relay has pictures of some hundred segments no more; of how many it had them."""
    gone = sa.and_(_h.relay == relay, _s.id.in_(segment_ids))
    return _set_held(connection, gone, HeldState.wanted, HeldState.gone)


def wanted_pictures(connection: sa.Connection, relay: str, limit: int) -> tuple[str, ...]:
    """Ids of the first segments whose pictures are wanted of a relay."""
    query = sa.select(_s.id).join(tables.held_pictures, _h.row == _s.row)
    query = query.where(_h.relay.in_((relay, "")), _h.state == HeldState.wanted)
    # those of its own first: of the others nobody knows whether it has them
    return tuple(connection.scalars(query.order_by(_h.relay.desc(), _s.row).limit(limit)))


def held_segment(connection: sa.Connection, row: int) -> HeldBy | None:
    """Who holds back pictures of the segment in a ledger row, None: nobody does."""
    found = connection.execute(sa.select(_h.relay, _h.body).where(_h.row == row)).one_or_none()
    return None if found is None else HeldBy(*found)


def held_rows(connection: sa.Connection, rows: Sequence[int]) -> dict[int, HeldState]:
    """Of which of some hundred ledger rows pictures are held back, and how far they are asked for."""
    found = connection.execute(sa.select(_h.row, _h.state).where(_h.row.in_(rows)))
    return {row: HeldState(state) for row, state in found}


def held_counts(connection: sa.Connection) -> dict[HeldState, int]:
    """Of how many segments pictures are held back."""
    found = connection.execute(sa.select(_h.state, sa.func.count()).group_by(_h.state))
    return {HeldState(state): count for state, count in found}


def _set_held(connection: sa.Connection, chosen: sa.ColumnElement[bool], before: HeldState, after: HeldState) -> int:
    joined = _joined.join(tables.held_pictures, _h.row == _s.row)
    rows = sa.select(_s.row).select_from(joined).where(_h.state == before, chosen)
    change = sa.update(tables.held_pictures).where(_h.row.in_(rows)).values(state=after)
    return int(connection.execute(change).rowcount)


# --- forgetting -----------------------------------------------------------------------------------------------------


def generation(connection: sa.Connection) -> int:
    """Grows whenever segments that were there are pruned or marked: whoever keeps an index asks for `gone_since`."""
    return int(read_meta(connection, _GENERATION) or 0)


def prune(
    connection: sa.Connection, episode_ids: Sequence[str], now_ns: int, newest_row: int | None
) -> tuple[int, int, int]:
    """Note some hundred episodes as forgotten: how many, their segments and bytes. `delete_pruned` deletes those.

    The episodes stay, so that lineage can name them. Those that are unknown or pruned already, or got a segment after
    ledger row `newest_row`, are skipped.
    """
    chosen = sa.select(_e.number).where(_e.id.in_(episode_ids), _e.pruned_ns == 0)
    if newest_row is not None:
        chosen = chosen.where(_e.newest_row <= newest_row)
    numbers = list(connection.scalars(chosen))
    if not numbers:
        return 0, 0, 0
    sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (_e.segments, _e.bytes))
    segments, size = connection.execute(sa.select(*sums).where(_e.number.in_(numbers))).one()
    _subtract(connection, numbers)
    # 0 would say that they are there
    gone = {"pruned_ns": now_ns or 1, "pruned_at": count_up(connection, _GENERATION)}
    connection.execute(sa.update(tables.episodes).where(_e.number.in_(numbers)).values(gone))
    write_meta(connection, _PRUNING, msgspec.json.encode(numbers).decode())
    return len(numbers), int(segments), int(size)


def delete_pruned(connection: sa.Connection, limit: int) -> bool:
    """Delete up to `limit` segments of episodes that `prune` noted as forgotten; whether there may be more."""
    numbers = msgspec.json.decode(read_meta(connection, _PRUNING) or "[]")
    if not numbers:
        return False
    rows = list(connection.scalars(sa.select(_s.row).where(_s.episode.in_(numbers)).limit(limit)))
    if rows:
        _count_live(connection, rows, -1)
        connection.execute(sa.delete(tables.segments).where(_s.row.in_(rows)))
    if len(rows) < limit:
        write_meta(connection, _PRUNING, "[]")
    return len(rows) == limit


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
    """Note that the segments of some hundred ledger rows cannot be read; how many were not marked yet."""
    fresh = list(connection.scalars(sa.select(_s.row).where(_s.row.in_(rows), ~_s.damaged)))
    if fresh:
        _count_live(connection, fresh, -1)
        connection.execute(sa.update(tables.segments).where(_s.row.in_(fresh)).values(damaged=True))
        _count_live(connection, fresh, +1)
        count_up(connection, _GENERATION)
    return len(fresh)
