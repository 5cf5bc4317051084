"""Segments and episodes as they are found in the ledger again, and their totals. Functions of one transaction."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from cloud_learner.buffer.check import OUTCOMES, SOURCES
from cloud_learner.buffer.control import HOLD, arrival_lag, by_human, is_recovery, rollout_steps
from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.rows import (
    EpisodeFacts,
    EpisodeRow,
    KeptEpisode,
    LagRow,
    PartTotals,
    SegmentColumns,
    SegmentRow,
    Totals,
    columns_of,
    row_of,
    rows_of,
)
from wire.types import EpisodeSource

_s, _e, _t = tables.segments.c, tables.episodes.c, tables.tallies.c
_joined = tables.segments.join(tables.episodes, _s.episode == _e.number)
_INDEXED = {
    "row": np.int64,
    "episode": np.int64,
    "index": np.int32,
    "first_tick": np.int64,
    "steps": np.int32,
    "frames": np.int32,
    "reward_sum": np.float64,
    "last": np.bool_,
    "newest_version": np.int32,
}
_OUTCOMES = {"": -1, **{name: number for number, name in enumerate(OUTCOMES)}}
CHUNK = 1000
"""Values of one IN list: SQLite takes some ten thousand."""
_FETCHED = 100_000
"""Rows that are in memory as Python's objects at once: ten times the size of what they become."""

_OF_EPISODE: dict[str, sa.ColumnElement[Any]] = {
    "episode": _e.id,
    **{name: _e[name] for name in ("robot", "spec_hash", "task", "source")},
    "finished": sa.cast(sa.and_(_e.last_index >= 0, _e.segments > _e.last_index), sa.Boolean),
}
_SEGMENT_ROWS = columns_of(SegmentRow, {**_s, **_OF_EPISODE}).select_from(_joined)
EPISODE_ROWS = columns_of(EpisodeRow, _e)


def segment(connection: sa.Connection, segment_id: str) -> SegmentRow | None:
    """The segment with this id, if it is there."""
    return row_of(connection, SegmentRow, _SEGMENT_ROWS.where(_s.id == segment_id))


def segments_after(connection: sa.Connection, row: int, limit: int = 1000) -> tuple[SegmentRow, ...]:
    """Up to `limit` segments committed after ledger row `row` (0: from the first), in commit order."""
    return rows_of(connection, SegmentRow, _SEGMENT_ROWS.where(_s.row > row).order_by(_s.row).limit(limit))


def segments_of(connection: sa.Connection, episode: str) -> tuple[SegmentRow, ...]:
    """The committed segments of an episode by index."""
    return rows_of(connection, SegmentRow, _SEGMENT_ROWS.where(_e.id == episode).order_by(_s.index))


def row_before(connection: sa.Connection, count: int) -> int:
    """The ledger row after which the newest `count` segments lie."""
    row = connection.scalar(sa.select(_s.row).order_by(_s.row.desc()).offset(count).limit(1))
    return row if row is not None else 0


def damaged_segments(connection: sa.Connection) -> int:
    """How many segments are marked as damaged."""
    # in the words of the partial index: SQLite finds it by no others
    return connection.scalar(sa.select(sa.func.count()).select_from(tables.segments).where(sa.text("damaged"))) or 0


def episode(connection: sa.Connection, episode_id: str) -> EpisodeRow | None:
    """The episode with this id, also a pruned one."""
    return row_of(connection, EpisodeRow, EPISODE_ROWS.where(_e.id == episode_id))


def episodes(connection: sa.Connection, robot: str | None = None, limit: int = 100) -> tuple[EpisodeRow, ...]:
    """The newest `limit` episodes that are not pruned, of one robot or of all, newest first."""
    query = EPISODE_ROWS.where(_e.pruned_ns == 0).order_by(_e.number.desc()).limit(limit)
    if robot is not None:
        query = query.where(_e.robot == robot)
    return rows_of(connection, EpisodeRow, query)


def kept_episodes(connection: sa.Connection) -> tuple[KeptEpisode, ...]:
    """All episodes that have segments and were not pruned, oldest first."""
    query = columns_of(KeptEpisode, _e).order_by(_e.number)
    pieces = _fetch_plain(connection, query.where(_e.pruned_ns == 0, _e.segments > 0))
    return tuple(KeptEpisode(*row) for rows in pieces for row in rows)


def demonstrated_tasks(connection: sa.Connection) -> tuple[str, ...]:
    """Tasks of which there are demonstrations, by name."""
    there = (_e.source == EpisodeSource.demonstration) & (_e.pruned_ns == 0)
    return tuple(connection.scalars(sa.select(_e.task).where(there).distinct().order_by(_e.task)))


def episodes_of_robot(connection: sa.Connection, robot: str) -> int:
    """How many episodes the robot ever brought, pruned ones included."""
    return connection.scalar(sa.select(sa.func.count()).where(_e.robot == robot)) or 0


def places(connection: sa.Connection, rows: Sequence[int]) -> dict[int, SegmentRow]:
    """Where the segments of these ledger rows lie; rows that are gone are absent."""
    queries = (_SEGMENT_ROWS.where(_s.row.in_(some)).order_by(_s.row) for some in chunks(rows))
    return {found.row: found for query in queries for found in rows_of(connection, SegmentRow, query)}


def places_in_shard(connection: sa.Connection, spec_hash: str, number: int) -> tuple[SegmentRow, ...]:
    """The segments that lie in a shard and are not damaged, in the shard's order."""
    query = _SEGMENT_ROWS.where(_s.shard == number, _e.spec_hash == spec_hash, ~_s.damaged).order_by(_s.offset)
    return rows_of(connection, SegmentRow, query)


def unsealed(connection: sa.Connection, gateway: int) -> tuple[SegmentRow, ...]:
    """The segments in the journal of a gateway that are not damaged, episode by episode as they began, and by index."""
    query = _SEGMENT_ROWS.where(_s.journal.is_not(None), _s.gateway == gateway, ~_s.damaged)
    query = query.order_by(_e.number, _s.index)
    return rows_of(connection, SegmentRow, query)


def index(connection: sa.Connection, after: int, data_hash: str, limit: int | None = None) -> SegmentColumns:
    """All segments of robot specs of this `data_hash` after ledger row `after` that are neither pruned nor damaged.

    The first `limit` of them.
    """
    query = sa.select(*(_s[name] for name in (*_INDEXED, "outcome", "runs"))).select_from(_joined)
    alike = sa.select(tables.specs.c.hash).where(tables.specs.c.data_hash == data_hash)
    query = query.where(_s.row > after, _e.spec_hash.in_(alike), _e.pruned_ns == 0, ~_s.damaged)
    pieces = list(map(_columns, _fetch_plain(connection, query.order_by(_s.row).limit(limit)))) or [_columns([])]
    columns = {name: np.concatenate([piece.pop(name) for piece in pieces]) for name in list(pieces[0])}
    return SegmentColumns(
        run_offsets=np.append(0, np.cumsum(columns.pop("run_count"))),
        episodes=_facts(connection, np.unique(columns["episode"]).tolist()),
        **columns,
    )


def _columns(rows: Sequence[Any]) -> dict[str, np.ndarray]:
    """Arrays of some rows of `index`."""
    values = list(zip(*rows, strict=True)) or [()] * (len(_INDEXED) + 2)
    outcomes, blobs = values[-2:]
    return {
        **{name: np.array(some, dtype) for (name, dtype), some in zip(_INDEXED.items(), values, strict=False)},
        "outcome": np.fromiter((_OUTCOMES.get(name, -1) for name in outcomes), np.int8, len(rows)),
        "runs": np.frombuffer(b"".join(blobs), "<i4").reshape(-1, 4).astype(np.int32, copy=False),
        "run_count": np.fromiter(map(len, blobs), np.int64, len(rows)) // 16,
    }


def _facts(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, EpisodeFacts]:
    query = sa.select(_e.number, *(_e[name] for name in EpisodeFacts.__struct_fields__))
    return {
        number: EpisodeFacts(*facts)
        for some in chunks(numbers)
        for number, *facts in connection.execute(query.where(_e.number.in_(some)))
    }


def gone_since(connection: sa.Connection, generation: int) -> tuple[tuple[int, ...], np.ndarray]:
    """(numbers of the episodes that were pruned since the ledger had that `generation`, int64 damaged rows)."""
    # in the words of the partial indices: SQLite finds them by no others
    pruned = sa.select(_e.number).where(_e.pruned_at > generation, sa.text("pruned_at != 0"))
    damaged = sa.select(_s.row).where(sa.text("damaged")).order_by(_s.row)
    return tuple(connection.scalars(pruned.order_by(_e.number))), np.array(list(connection.scalars(damaged)), np.int64)


def totals(connection: sa.Connection) -> Totals:
    """What is stored of all robots."""
    robots = robot_totals(connection).values()
    sums = {name: sum(getattr(one, name) for one in robots) for name in Totals.__struct_fields__}
    return Totals(**{**sums, "newest_row": max((one.newest_row for one in robots), default=0)})


def robot_totals(connection: sa.Connection) -> dict[str, Totals]:
    """What is stored, by robot."""
    names = ("segments", "episodes", "steps", "human_steps", "interventions", "bytes", "newest_row")
    query = sa.select(
        _t.robot,
        *(_t[name] for name in names),
        (_t.steps - _t.ticks).label("duplicated_steps"),
        (_t.end_tick - _t.ticks).label("missing_steps"),
    )
    rows = (dict(row) for row in connection.execute(query.where(_t.episodes > 0)).mappings())
    return {row.pop("robot"): Totals(**row) for row in rows}


def shares(connection: sa.Connection) -> tuple[tuple[str, str, str, int, int, int, int], ...]:
    """(task, source, outcome, episodes, steps, human steps, interventions) of what is stored; '': unfinished."""
    kinds = (_e.task, _e.source, _e.outcome)
    sums = (sa.func.sum(column) for column in (_e.steps, _e.human_steps, _e.interventions))
    query = sa.select(*kinds, sa.func.count(), *sums).where(_e.pruned_ns == 0).group_by(*kinds)
    rows = connection.execute(query)
    # PostgreSQL adds bigints up to a decimal
    return tuple(sorted((task, source, end, n, int(a), int(b), int(c)) for task, source, end, n, a, b, c in rows))


def lags(connection: sa.Connection, episodes: int = 0) -> tuple[LagRow, ...]:
    """With what lag rollouts arrived from robots that practise, by robot.

    Of the newest `episodes` alone, 0: of all that is not pruned.
    """
    query = sa.select(_e.robot, _s.newest_version, _s.runs).select_from(_joined)
    query = query.where(_e.source == SOURCES[0], _e.pruned_ns == 0)
    if episodes:
        newest = sa.select(_e.number).where(_e.source == SOURCES[0], _e.pruned_ns == 0)
        query = query.where(_s.episode.in_(newest.order_by(_e.number.desc()).limit(episodes)))
    found: dict[str, Counter[int]] = {}
    for rows in _fetch_plain(connection, query):
        for robot, newest_version, blob in rows:
            runs = np.frombuffer(blob, "<i4").reshape(-1, 4)
            runs = runs[rollout_steps(runs[:, 2], False)]
            counts = found.setdefault(robot, Counter())
            for lag, steps in zip(arrival_lag(runs[:, 3], newest_version).tolist(), runs[:, 1].tolist(), strict=True):
                counts[lag] += steps
    return tuple(LagRow(robot, counts.total(), dict(sorted(counts.items()))) for robot, counts in sorted(found.items()))


def parts(connection: sa.Connection) -> PartTotals:
    """Of the episodes that robots practised in, of what is not pruned."""
    query = sa.select(_s.episode, _s.runs).select_from(_joined).order_by(_s.episode, _s.index)
    query = query.where(_e.source == SOURCES[0], _e.pruned_ns == 0, _e.human_steps > 0)
    recoveries = recovery_steps = steps = 0
    episode, before = -1, False
    for rows in _fetch_plain(connection, query):
        for number, blob in rows:
            runs = np.frombuffer(blob, "<i4").reshape(-1, 4)
            # whoever holds for a moment goes on with what they did
            runs = runs[runs[:, 2] != HOLD]
            recovers = np.append(before and number == episode, is_recovery(runs[:, 2]))
            recoveries += int((recovers[1:] > recovers[:-1]).sum())
            recovery_steps += int(runs[recovers[1:], 1].sum())
            steps += int(runs[by_human(runs[:, 2]), 1].sum())
            episode, before = number, bool(recovers[-1])
    return PartTotals(recoveries, recovery_steps, steps - recovery_steps)


def _fetch_plain(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Sequence[Any]]:
    """All rows as the database's driver gives them, many at a time: for very many rows of plain values."""
    cursor = connection.execute(query).cursor
    assert cursor is not None
    while rows := cursor.fetchmany(_FETCHED):
        yield rows


def chunks(values: Iterable[Any], size: int = CHUNK) -> Iterator[list[Any]]:
    """The values in lists that are, by default, short enough for an IN list."""
    rest = iter(values)
    while some := list(itertools.islice(rest, size)):
        yield some
