"""Segments and episodes as they are found in the ledger again: functions of one transaction, methods of `Ledger`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.rows import EpisodeFacts, EpisodeRow, KeptEpisode, Place, SegmentColumns, SegmentRow

_s, _e = tables.segments.c, tables.episodes.c
_joined = tables.segments.join(tables.episodes, _s.episode == _e.number)
_OUTCOMES = {"": -1, **{name: number for number, name in enumerate(OUTCOMES)}}
CHUNK = 1000
"""Values of one IN list: SQLite takes some ten thousand."""

_OF_EPISODE = {"episode": _e.id, **{name: _e[name] for name in ("robot", "spec_hash", "task", "source")}}


def _rows(kind: type[msgspec.Struct]) -> sa.Select[Any]:
    """All fields of `kind` from segments and their episodes."""
    columns = (_OF_EPISODE[name] if name in _OF_EPISODE else _s[name] for name in kind.__struct_fields__)
    return sa.select(*columns).select_from(_joined)


_SEGMENT_ROWS, _PLACES = _rows(SegmentRow), _rows(Place)
_EPISODE_ROWS = sa.select(*(_e[name] for name in EpisodeRow.__struct_fields__))


def segment(connection: sa.Connection, segment_id: str) -> SegmentRow | None:
    """The segment with this id, if it is there."""
    row = connection.execute(_SEGMENT_ROWS.where(_s.id == segment_id)).one_or_none()
    return SegmentRow(*row) if row else None


def segments_after(connection: sa.Connection, row: int, limit: int = 1000) -> tuple[SegmentRow, ...]:
    """Up to `limit` segments committed after ledger row `row` (0: from the first), in commit order."""
    query = _SEGMENT_ROWS.where(_s.row > row).order_by(_s.row).limit(limit)
    return tuple(SegmentRow(*found) for found in connection.execute(query))


def segments_of(connection: sa.Connection, episode: str) -> tuple[SegmentRow, ...]:
    """The committed segments of an episode by index."""
    query = _SEGMENT_ROWS.where(_e.id == episode).order_by(_s.index)
    return tuple(SegmentRow(*found) for found in connection.execute(query))


def row_before(connection: sa.Connection, count: int) -> int:
    """The ledger row after which the newest `count` segments lie."""
    row = connection.scalar(sa.select(_s.row).order_by(_s.row.desc()).offset(count).limit(1))
    return row if row is not None else 0


def newest_row(connection: sa.Connection) -> int:
    """The largest ledger row of a segment that is there, 0 if there is none."""
    return connection.scalar(sa.select(sa.func.max(_s.row))) or 0


def damaged_segments(connection: sa.Connection) -> int:
    """How many segments are marked as damaged."""
    # in the words of the partial index: SQLite finds it by no others
    return connection.scalar(sa.select(sa.func.count()).select_from(tables.segments).where(sa.text("damaged"))) or 0


def episode(connection: sa.Connection, episode_id: str) -> EpisodeRow | None:
    """The episode with this id, also a pruned one."""
    row = connection.execute(_EPISODE_ROWS.where(_e.id == episode_id)).one_or_none()
    return EpisodeRow(*row) if row else None


def episodes(
    connection: sa.Connection, robot: str | None = None, limit: int = 100, pruned: bool = False
) -> tuple[EpisodeRow, ...]:
    """The newest `limit` episodes, of one robot or of all, newest first. `pruned`: also those that were pruned."""
    query = _EPISODE_ROWS.order_by(_e.number.desc()).limit(limit)
    if robot is not None:
        query = query.where(_e.robot == robot)
    if not pruned:
        query = query.where(_e.pruned_ns == 0)
    return tuple(EpisodeRow(*row) for row in connection.execute(query))


def kept_episodes(connection: sa.Connection) -> tuple[KeptEpisode, ...]:
    """All episodes that have segments and were not pruned, oldest first."""
    query = sa.select(*(_e[name] for name in KeptEpisode.__struct_fields__)).order_by(_e.number)
    return tuple(KeptEpisode(*row) for row in fetch_plain(connection, query.where(_e.pruned_ns == 0, _e.segments > 0)))


def episodes_of_robot(connection: sa.Connection, robot: str) -> int:
    """How many episodes the robot ever brought, pruned ones included."""
    return connection.scalar(sa.select(sa.func.count()).where(_e.robot == robot)) or 0


def runs_of(connection: sa.Connection, episode_id: str) -> list[tuple[int, int, int]]:
    """(first tick, ticks, actor) of every run of an episode, in order; neighbours may have the same actor."""
    query = sa.select(_s.first_tick, _s.runs).select_from(_joined).where(_e.id == episode_id).order_by(_s.index)
    found = []
    for first_tick, runs in connection.execute(query):
        for first, count, actor, _ in np.frombuffer(runs, "<i4").reshape(-1, 4).tolist():
            found.append((first_tick + first, count, actor))
    return found


def places(connection: sa.Connection, rows: Sequence[int]) -> dict[int, Place]:
    """Where the segments of these ledger rows lie; rows that are gone are absent."""
    found = {}
    for some in chunks(rows):
        for row in connection.execute(_PLACES.where(_s.row.in_(some)).order_by(_s.row)):
            found[row.row] = Place(*row)
    return found


def places_in_shard(connection: sa.Connection, spec_hash: str, number: int) -> tuple[Place, ...]:
    """The segments that lie in a shard and are not damaged, in the shard's order."""
    query = _PLACES.where(_s.shard == number, _e.spec_hash == spec_hash, ~_s.damaged).order_by(_s.offset)
    return tuple(Place(*row) for row in connection.execute(query))


def index(connection: sa.Connection, after: int, spec_hash: str, limit: int | None = None) -> SegmentColumns:
    """All segments of this robot spec after ledger row `after` that are not damaged; the first `limit` of them."""
    names = ("row", "episode", "index", "first_tick", "steps", "frames", "reward_sum", "last", "outcome", "runs")
    query = sa.select(*(_s[name] for name in names)).select_from(_joined)
    query = query.where(_s.row > after, _e.spec_hash == spec_hash, ~_s.damaged).order_by(_s.row).limit(limit)
    rows = fetch_plain(connection, query)
    columns = dict(zip(names, zip(*rows, strict=True) if rows else itertools.repeat(()), strict=False))
    blobs = columns["runs"]
    lengths = np.fromiter(map(len, blobs), np.int64, len(blobs))
    return SegmentColumns(
        row=np.array(columns["row"], np.int64),
        episode=np.array(columns["episode"], np.int64),
        index=np.array(columns["index"], np.int32),
        first_tick=np.array(columns["first_tick"], np.int64),
        steps=np.array(columns["steps"], np.int32),
        frames=np.array(columns["frames"], np.int32),
        reward_sum=np.array(columns["reward_sum"], np.float64),
        last=np.array(columns["last"], np.bool_),
        outcome=np.fromiter((_OUTCOMES.get(name, -1) for name in columns["outcome"]), np.int8, len(rows)),
        run_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths // 16)]),
        runs=np.frombuffer(b"".join(blobs), "<i4").reshape(-1, 4).astype(np.int32, copy=False),
        episodes=_facts(connection, set(columns["episode"])),
    )


def _facts(connection: sa.Connection, numbers: set[int]) -> dict[int, EpisodeFacts]:
    if not numbers:
        return {}
    # the episodes of new segments lie close together
    query = sa.select(_e.number, *(_e[name] for name in EpisodeFacts.__struct_fields__))
    query = query.where(_e.number.between(min(numbers), max(numbers)))
    return {number: EpisodeFacts(*facts) for number, *facts in connection.execute(query) if number in numbers}


def fetch_plain(connection: sa.Connection, query: sa.Select[Any]) -> list[tuple[Any, ...]]:
    """All rows as the database's driver gives them: for very many rows of plain values."""
    cursor = connection.execute(query).cursor
    assert cursor is not None
    return list(cursor.fetchall())


def chunks(values: Iterable[Any]) -> Iterator[list[Any]]:
    """The values in lists that are short enough for an IN list."""
    rest = iter(values)
    while some := list(itertools.islice(rest, CHUNK)):
        yield some
