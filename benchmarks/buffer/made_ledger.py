"""A ledger with as many segments as is wanted, whose records are nowhere: rows as a fleet's, made up in SQL."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator

import numpy as np

from benchmarks.buffer.data import SEGMENT_STEPS, Scale
from benchmarks.buffer.ours import CLOCK, ROBOT
from cloud_learner.buffer.location import BufferLocation
from wire.messages.gateway import ACTORS

EPISODE_SEGMENTS = 30
TASKS = ("task-0", "task-1", "task-2")
VERSIONS = 200
SHARD_SEGMENTS = 200
SEGMENT_BYTES = 300_000
NEW = 100
"""segments that a refresh finds: one of each of so many robots"""
SPEC = Scale(1, 1, 4).spec()

_NUMBERS = "WITH RECURSIVE n(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :end)"
_EPISODES = f"""
INSERT INTO episodes (number, id, robot, spec_hash, task, seed, source, started_ns, outcome, steps, human_steps,
    interventions, segments, bytes, ticks, end_tick, last_index, newest_row, committed_ns, wall_ns,
    pruned_ns, pruned_at)
{_NUMBERS} SELECT i, printf('episode-%08d', i), 'robot-' || (i % 10), :spec, 'task-' || (i % 3), i,
    CASE WHEN i % 4 THEN 'online' ELSE 'demonstration' END, 0, CASE WHEN :count = :whole THEN 'success' ELSE '' END,
    {SEGMENT_STEPS} * :count, 0, 0, :count, {SEGMENT_BYTES} * :count, {SEGMENT_STEPS} * :count,
    {SEGMENT_STEPS} * :count, CASE WHEN :count = :whole THEN :whole - 1 ELSE -1 END, :row + (i + 1 - :first) * :count,
    1, 1, 0, 0 FROM n"""
_SEGMENTS = f"""
INSERT INTO segments (id, episode, "index", first_tick, steps, human_steps, entry_actor, exit_actor, takeovers, last,
    outcome, reward_sum, frames, runs, newest_version, lag, bytes, sha256, gateway, shard, "offset", damaged,
    closed_ns, received_ns, committed_ns)
{_NUMBERS}, k(j) AS (SELECT 0 UNION ALL SELECT j + 1 FROM k WHERE j + 1 < :count)
SELECT printf('episode-%08d/%d', i, j), i, j, j * {SEGMENT_STEPS}, {SEGMENT_STEPS}, 0, 0, 0, 0, j = :whole - 1,
    CASE WHEN j = :whole - 1 THEN 'success' ELSE '' END, 1.0, 40,
    runs(i % 4 = 0, :version + i / :per_version, j % 10 = 9), 0, 0, {SEGMENT_BYTES}, :sha256, 1,
    (:row + (i - :first) * :count + j) / {SHARD_SEGMENTS},
    (:row + (i - :first) * :count + j) % {SHARD_SEGMENTS} * {SEGMENT_BYTES}, 0, 1, 1, 1
FROM n CROSS JOIN k"""
_SHARDS = f"""
INSERT INTO shards (spec_hash, number, state, record_bytes, bytes, sha256, created_ns, live_bytes, live_steps,
    live_segments, damaged_segments)
{_NUMBERS} SELECT :spec, i, 'sealed', {SHARD_SEGMENTS * SEGMENT_BYTES}, {SHARD_SEGMENTS * SEGMENT_BYTES}, :sha256, 1,
    {SHARD_SEGMENTS * SEGMENT_BYTES}, {SHARD_SEGMENTS * SEGMENT_STEPS}, {SHARD_SEGMENTS}, 0 FROM n"""
_TALLIES = """
INSERT INTO tallies SELECT robot, count(*), sum(segments), sum(steps), 0, 0, sum(bytes), sum(ticks), sum(end_tick),
    max(newest_row) FROM episodes GROUP BY robot"""
_VERSION = "INSERT INTO versions SELECT coalesce(max(number), 0) + 1, :sha256, 1, 0, 1, 1, 1, 1, 'none' FROM versions"
_WORDS = {"spec": SPEC.hash, "sha256": "0" * 64, "whole": EPISODE_SEGMENTS}


def fill(place: BufferLocation, segments: int) -> None:
    """A ledger with so many segments, whose records are nowhere."""
    ledger, store = place.open_writer()
    ledger.see_robot(ROBOT, SPEC, CLOCK, 1)
    store.close()
    ledger.close()
    episodes = segments // EPISODE_SEGMENTS
    with _rows(place) as connection:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        for _ in range(VERSIONS):
            connection.execute(_VERSION, _WORDS)
        _add(connection, episodes, EPISODE_SEGMENTS, per_version=max(1, episodes // VERSIONS))
        connection.execute(_SHARDS, {**_WORDS, "first": 0, "end": segments // SHARD_SEGMENTS})
        connection.execute(_TALLIES)


@contextlib.contextmanager
def _rows(place: BufferLocation) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(place.ledger_location, isolation_level=None)) as connection:
        connection.create_function("runs", 3, _runs, deterministic=True)
        yield connection


def _add(connection: sqlite3.Connection, episodes: int, count: int, per_version: int) -> None:
    """New episodes of `count` segments each, after those that are there."""
    first, row = (
        connection.execute(f"SELECT coalesce(max({key}), 0) FROM {table}").fetchone()[0]
        for key, table in (("number", "episodes"), ("row", "segments"))
    )
    values = {"first": first + 1, "end": first + 1 + episodes, "count": count, "row": row}
    version = {"per_version": per_version, "version": 1 if not first else VERSIONS}
    connection.execute("BEGIN")
    connection.execute(_EPISODES, _WORDS | values)
    connection.execute(_SEGMENTS, _WORDS | values | version)
    connection.execute("COMMIT")


@functools.cache
def _runs(demonstration: int, version: int, corrected: int) -> bytes:
    """Who acted in a segment, as the ledger keeps it: int32[k, 4]."""
    policy, human = ACTORS.index("policy"), ACTORS.index("human")
    if demonstration:
        return np.array([[0, SEGMENT_STEPS, human, 0]], "<i4").tobytes()
    if not corrected:
        return np.array([[0, SEGMENT_STEPS, policy, version]], "<i4").tobytes()
    half = SEGMENT_STEPS // 2
    return np.array([[0, half, policy, version], [half, half, human, version]], "<i4").tobytes()


def add_new(place: BufferLocation) -> None:
    with _rows(place) as connection:
        _add(connection, NEW, 1, per_version=10**9)


def publish(place: BufferLocation) -> None:
    with _rows(place) as connection:
        connection.execute(_VERSION, _WORDS)
