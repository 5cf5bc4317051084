"""What does the buffer cost with very many segments? Ten million of them, made up in the ledger, beside one million.

The ledger has rows as a fleet's: episodes of 30 segments of 80 steps, three tasks, versions as time goes on, every
fourth episode a demonstration. No record lies on disk, so what is measured is all that is not reading and decoding.
What is done again and again, by a trainer five times a second or by the gateway every few seconds, has to be flat.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer.data import SEGMENT_STEPS, Scale
from benchmarks.buffer.ours import CLOCK, ROBOT
from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, run
from cloud_learner.buffer.ledger.ledger import EPISODES_AT_ONCE, Ledger
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset, open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.compact import compact_one
from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.maintenance.stats import collect
from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.target import by_outcome, max_lag, uniform
from cloud_learner.buffer.store.store import SegmentStore
from wire.messages.gateway import ACTORS
from wire.types import EpisodeSource

EPISODE_SEGMENTS = 30
TASKS = ("task-0", "task-1", "task-2")
VERSIONS = 200
SHARD_SEGMENTS = 200
SEGMENT_BYTES = 300_000
NEW = 100
"""segments that a refresh finds: one of each of so many robots"""
BATCH = 256
CACHE_BYTES = 2 << 30
SPEC = Scale(1, 1, 4).spec()
_FLAT = 1.5
_NOTHING_MS = 0.5
"""A difference that is no difference."""
_BYTES_PER_STEP = 1000
PERIODIC = "again and again"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Segments of the smaller and the larger buffer, and how often everything is done."""

    segments: tuple[int, int] = (1_000_000, 10_000_000)
    times: int = 9
    held: int = 20_000
    """segments that a cache has room for"""


FULL, QUICK = Sizes(), Sizes((50_000, 100_000), 3, 300)


def measure(quick: bool) -> Result:
    """One buffer after the other; each in processes of its own, for the peaks of their memory."""
    sizes, others = QUICK if quick else FULL, Others()
    columns = []
    for segments in sizes.segments:
        with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as name:
            place = BufferLocation(Path(name))
            began = time.monotonic()
            fill(place, segments)
            sys.stderr.write(f"{segments:,} segments made in {time.monotonic() - began:.0f} s\n")
            found: dict[str, float] = {}
            for part in (gateway, trainer, samplers):
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    found |= pool.submit(part, place, segments, sizes).result()
                sys.stderr.write(f"{part.__name__}: {time.monotonic() - began:.0f} s\n")
            columns.append(found)
    names = [f"{segments:,} segments" for segments in sizes.segments]
    rows: list[dict[str, Any]] = []
    goals = []
    for what, small in columns[0].items():
        large = columns[1][what]
        who, _, kind = what.partition(": ")
        rows.append({"who": who, "what": kind, names[0]: small, names[1]: large, "times as much": large / small})
        if who.startswith(PERIODIC):
            holds = large <= _FLAT * small or large - small < _NOTHING_MS
            goals.append(Goal(f"{kind}, of that with {names[0]}", large / small, f"at most {_FLAT}", holds))
    title = f"The buffer with {names[1]}"
    return Result(title, rows, goals, [*_notes(sizes), others.note()])


def _notes(sizes: Sizes) -> list[str]:
    return [
        f"Episodes of {EPISODE_SEGMENTS} segments of {SEGMENT_STEPS} steps, {len(TASKS)} tasks, {VERSIONS} versions, "
        f"every fourth a demonstration; {SHARD_SEGMENTS} segments a shard. What is done again and "
        f"again: processor time, means of {sizes.times} or more; once: by the clock. A goal also holds where the "
        f"difference is below {_NOTHING_MS} ms.",
        f"{NEW} new segments: one of each of so many robots. A batch has {BATCH} steps. `fits`: all data lie in "
        "memory. The trainer's cache has 2 GiB.",
    ]


# --- made rows --------------------------------------------------------------------------------------------------------

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
    outcome, reward_sum, frames, runs, bytes, sha256, shard, "offset", damaged, closed_ns, received_ns, committed_ns)
{_NUMBERS}, k(j) AS (SELECT 0 UNION ALL SELECT j + 1 FROM k WHERE j + 1 < :count)
SELECT printf('episode-%08d/%d', i, j), i, j, j * {SEGMENT_STEPS}, {SEGMENT_STEPS}, 0, 0, 0, 0, j = :whole - 1,
    CASE WHEN j = :whole - 1 THEN 'success' ELSE '' END, 1.0, 40,
    runs(i % 4 = 0, :version + i / :per_version, j % 10 = 9), {SEGMENT_BYTES}, :sha256,
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


def _new(place: BufferLocation) -> None:
    with _rows(place) as connection:
        _add(connection, NEW, 1, per_version=10**9)


def _publish(place: BufferLocation) -> None:
    with _rows(place) as connection:
        connection.execute(_VERSION, _WORDS)


# --- what is measured: milliseconds, or MB, by name -------------------------------------------------------------------


def _ms(function: Callable[[], object], times: int = 1, before: Callable[[], object] = lambda: None) -> float:
    """What is done once, by the clock; what is done more often, a mean of the processor time of this thread, which
    others on the machine change little. `before` each time is not counted."""
    clock, took = time.perf_counter if times == 1 else time.thread_time, 0.0
    for _ in range(times):
        before()
        began = clock()
        function()
        took += clock() - began
    return 1e3 * took / times


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def gateway(place: BufferLocation, segments: int, sizes: Sizes) -> dict[str, float]:
    """What the gateway's process does, and `vla-fleet buffer`."""
    found: dict[str, float] = {}
    times = sizes.times
    opened: list[tuple[Ledger, SegmentStore]] = []
    found["once: open to write, ms"] = _ms(lambda: opened.append(place.open_writer()))
    ledger, store = opened[0]
    found[f"{PERIODIC}: a round of maintenance that finds nothing to do, ms"] = _ms(
        lambda: (seal(store, 1), compact_one(store, 1, set(), few=8)), times
    )
    found[f"{PERIODIC}: totals of all robots, ms"] = _ms(ledger.robot_totals, times)
    found[f"{PERIODIC}: newest version, generation, newest episodes, ms"] = _ms(
        lambda: (ledger.newest_version(), ledger.generation(), ledger.episodes()), times
    )
    found[f"{PERIODIC}: where {BATCH} segments lie, ms"] = _ms(
        lambda: ledger.places(np.random.default_rng(0).integers(1, segments, BATCH).tolist()), times
    )
    retention = Retention(max_bytes=0.99 * segments * SEGMENT_BYTES)
    found["each minute: choose what retention forgets, ms"] = _ms(
        lambda: retention.choose(ledger.kept_episodes(), 1), min(3, times)
    )
    longest = _note_transactions(ledger)
    oldest = [one.id for one in ledger.kept_episodes()[: 3 * EPISODES_AT_ONCE]]
    pieces = iter([oldest[n::3] for n in range(3)])
    found[f"{PERIODIC}: forget {EPISODES_AT_ONCE} episodes, ms"] = _ms(
        lambda: ledger.prune(next(pieces), time.time_ns()), 3
    )
    found[f"{PERIODIC}: its longest transaction, ms"] = max(longest) * 1e3
    found["once: statistics, ms"] = _ms(lambda: collect(store))
    found["once: verify's walk over the ledger, of 100 shards, ms"] = _ms(
        lambda: [ledger.places_in_shard(shard.spec_hash, shard.number) for shard in ledger.shards()[-100:]]
    )
    found["once: peak memory of the gateway's process, MB"] = _peak_mb()
    store.close()
    ledger.close()
    return found


def _note_transactions(ledger: Ledger) -> list[float]:
    """Seconds of every transaction that writes, from now on."""
    took: list[float] = []
    writing = ledger.writing

    @contextlib.contextmanager
    def timed() -> Iterator[Any]:
        began = time.perf_counter()
        with writing() as connection:
            yield connection
        took.append(time.perf_counter() - began)

    ledger.writing = timed  # type: ignore[method-assign]
    return took


def _opened(place: BufferLocation) -> ReplayDataset:
    config = DatasetConfig(
        tasks=dict.fromkeys(TASKS, ""), target=uniform(), batch=BATCH, cache_bytes=CACHE_BYTES, prefetch=0
    )
    dataset = open_dataset(place, SPEC, config)
    dataset.refresh()
    return dataset


def trainer(place: BufferLocation, segments: int, sizes: Sizes) -> dict[str, float]:
    """A trainer's process, with a cache that holds next to nothing of it all."""
    found: dict[str, float] = {}
    times = sizes.times
    opened: list[ReplayDataset] = []

    def start() -> None:
        opened.append(_opened(place))
        opened[0].sampler.next()

    found["once: open to read: index, strata, first plan, ms"] = _ms(start)
    (dataset,) = opened
    assert len(dataset.universe) > segments // 2, "segments are missing"
    found["once: its peak memory, MB"] = _peak_mb()
    found[f"{PERIODIC}: refresh that finds nothing, ms"] = _ms(dataset.refresh, times)
    found[f"{PERIODIC}: refresh that finds {NEW} segments, ms"] = _ms(dataset.refresh, times, lambda: _new(place))
    found[f"{PERIODIC}: refresh that finds a version, ms"] = _ms(dataset.refresh, times, lambda: _publish(place))
    found[f"{PERIODIC}: plan a batch, ms"] = _ms(dataset.sampler.next, 5 * times)
    found[f"{PERIODIC}: finished demonstrations, ms"] = _ms(
        lambda: dataset.finished(EpisodeSource.demonstration), times
    )
    found[f"{PERIODIC}: the state of a checkpoint, ms"] = _ms(dataset.state, times)

    def forget() -> None:
        with contextlib.closing(Ledger.open(place.ledger_location)) as ledger:
            ledger.prune([one.id for one in ledger.kept_episodes()[:EPISODES_AT_ONCE]], time.time_ns())

    found[f"after forgetting: refresh that finds {EPISODES_AT_ONCE} episodes gone, ms"] = _ms(
        dataset.refresh, min(3, times), forget
    )
    dataset.close()
    return found


def samplers(place: BufferLocation, segments: int, sizes: Sizes) -> dict[str, float]:
    """Samplers of more or less memory and of other targets, over one index."""
    found: dict[str, float] = {}
    with _opened(place) as dataset:
        index, ledger = dataset.universe, dataset._ledger
        del dataset.sampler

        def cost(chosen: np.ndarray) -> np.ndarray:
            return index.steps[chosen].astype(np.int64) * _BYTES_PER_STEP

        def more() -> None:
            _new(place)
            index.extend(ledger.index(index.watermark, SPEC.data_hash))

        total = int(index.steps.sum(dtype=np.int64)) * _BYTES_PER_STEP
        for name, target, budget in (
            ("fits", uniform(), 2 * total),
            (f"cache of {sizes.held:,} segments", uniform(), sizes.held * SEGMENT_STEPS * _BYTES_PER_STEP),
            ("fits, by outcome", uniform(factors=(by_outcome({"success": 2.0}),)), 2 * total),
            ("fits, max_lag 20", uniform(factors=(max_lag(20),)), 2 * total),
        ):
            _measure_sampler(found, name, Sampler(index, target, cost, budget, BATCH, 0, 1.0, VERSIONS), more, sizes)
    return found


def _measure_sampler(
    found: dict[str, float], name: str, sampler: Sampler, more: Callable[[], None], sizes: Sizes
) -> None:
    """Add what one sampler costs."""
    times = sizes.times
    sampler.next()
    found[f"{PERIODIC}: {name}: plan a batch, ms"] = _ms(sampler.next, 5 * times)
    found[f"{PERIODIC}: {name}: take in {NEW} segments, ms"] = _ms(lambda: sampler.refresh(VERSIONS), times, more)
    versions = iter(range(VERSIONS + 1, VERSIONS + 100))
    kind = "with the version" if "max_lag" in name else PERIODIC
    found[f"{kind}: {name}: take in a version, ms"] = _ms(lambda: sampler.refresh(next(versions)), min(5, times))


if __name__ == "__main__":
    sys.exit(run("buffer.scale", measure))
