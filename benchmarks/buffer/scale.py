"""What does the buffer cost with very many segments? Ten million of them, made up in the ledger, beside one million.

The ledger has rows as a fleet's: episodes of 30 segments of 80 steps, three tasks, versions as time goes on, every
fourth episode a demonstration. No record lies on disk, so what is measured is all that is not reading and decoding.
What is done again and again, by a trainer five times a second or by the gateway every few seconds, has to be flat.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer.data import SEGMENT_STEPS
from benchmarks.buffer.made_ledger import (
    EPISODE_SEGMENTS,
    NEW,
    SEGMENT_BYTES,
    SHARD_SEGMENTS,
    SPEC,
    TASKS,
    VERSIONS,
    add_new,
    fill,
    publish,
)
from benchmarks.common.cpu import Others
from benchmarks.common.table import Goal, Result, run
from cloud_learner.buffer.ledger.ledger import EPISODES_AT_ONCE, Ledger
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset, open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.compact import compact_one
from cloud_learner.buffer.maintenance.prune import prune
from cloud_learner.buffer.maintenance.retention import Retention
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.maintenance.stats import collect
from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.target import by_outcome, max_lag, uniform
from cloud_learner.buffer.store.store import SegmentStore
from wire.types import EpisodeSource

BATCH = 256
CACHE_BYTES = 2 << 30
_FLAT = 1.5
_NOTHING_MS = 0.5
"""A difference that is no difference."""
_BYTES_PER_STEP = 1000
PERIODIC = "again and again"
SELDOM = "now and then"
_SELDOM_FLAT = 3.0
_BOUNDS_MS = {
    # every episode is looked at, once a minute at most, on a thread of its own
    "what retention forgets, above its size": 1000.0,
    # sampling waits for these
    "refresh that finds episodes gone": 200.0,
    "fits, max_lag 20: take in a version": 200.0,
}
"""What grows with the buffer may cost so much."""
LONGEST = "longest write transaction"
_LONGEST_MS = 50.0
"""Whoever commits segments waits behind it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Segments of the smaller and the larger buffer, and how often everything is done."""

    segments: tuple[int, int] = (1_000_000, 10_000_000)
    times: int = 9
    held: int = 20_000
    """segments that a cache has room for"""


FULL, QUICK = Sizes(), Sizes((20_000, 40_000), 3, 300)


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
        rows.append(
            {
                "who": who,
                "what": kind,
                names[0]: small,
                names[1]: large,
                "times as much": large / small if small else None,
            }
        )
        if (goal := _goal(who, kind, names[0], small, large)) is not None:
            goals.append(goal)
    title = f"The buffer with {names[1]}"
    return Result(title, rows, goals, [*_notes(sizes), others.note()])


def _goal(who: str, kind: str, small_name: str, small: float, large: float) -> Goal | None:
    """What a row has to hold: as much as in the smaller buffer, or no more than a bound in milliseconds."""
    if who == LONGEST:
        return Goal(f"{who}: {kind}", large, f"at most {_LONGEST_MS:g} ms", large <= _LONGEST_MS)
    if (bound := _BOUNDS_MS.get(kind.removesuffix(", ms"))) is not None:
        return Goal(kind, large, f"at most {bound:g} ms", large <= bound)
    if (flat := {PERIODIC: _FLAT, SELDOM: _SELDOM_FLAT}.get(who)) is None:
        return None
    holds = large <= flat * small or large - small < _NOTHING_MS
    return Goal(f"{kind}, of that with {small_name}", large / small, f"at most {flat:g}", holds)


def _notes(sizes: Sizes) -> list[str]:
    return [
        f"Episodes of {EPISODE_SEGMENTS} segments of {SEGMENT_STEPS} steps, {len(TASKS)} tasks, {VERSIONS} versions, "
        f"every fourth a demonstration; {SHARD_SEGMENTS} segments a shard. What is done again and "
        f"again: processor time, means of {sizes.times} or more; once: by the clock. A goal also holds where the "
        f"difference is below {_NOTHING_MS} ms.",
        f"{NEW} new segments: one of each of so many robots. A batch has {BATCH} steps. `fits`: all data lie in "
        "memory. The trainer's cache has 2 GiB.",
    ]


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
    longest = LongestTransactions(ledger, found)
    with longest.of("a round of maintenance"):
        found[f"{SELDOM}: a round of maintenance that finds nothing to do, ms"] = _ms(
            lambda: (seal(store, 1), compact_one(store, 1, set(), few=8)), times
        )
    names = itertools.count()
    with longest.of("a snapshot"):
        found[f"{SELDOM}: a snapshot, ms"] = _ms(lambda: ledger.take_snapshot(f"s{next(names)}"), times)
    found[f"{PERIODIC}: totals of all robots, ms"] = _ms(ledger.robot_totals, times)
    found[f"{PERIODIC}: newest version, generation, newest episodes, ms"] = _ms(
        lambda: (ledger.newest_version(), ledger.generation(), ledger.episodes()), times
    )
    found[f"{PERIODIC}: where {BATCH} segments lie, ms"] = _ms(
        lambda: ledger.places(np.random.default_rng(0).integers(1, segments, BATCH).tolist()), times
    )
    for where, share in (("within", 1.01), ("above", 0.99)):
        retention = Retention(max_bytes=share * segments * SEGMENT_BYTES)
        found[f"{SELDOM}: what retention forgets, {where} its size, ms"] = _ms(
            functools.partial(prune, ledger, retention, 1, dry_run=True), min(3, times)
        )
    oldest = [one.id for one in ledger.kept_episodes()[: 3 * EPISODES_AT_ONCE]]
    pieces = iter([oldest[n::3] for n in range(3)])
    with longest.of(f"{EPISODES_AT_ONCE} episodes forgotten"):
        found[f"{PERIODIC}: forget {EPISODES_AT_ONCE} episodes, ms"] = _ms(
            lambda: ledger.prune(next(pieces), time.time_ns()), 3
        )
    found["once: statistics, ms"] = _ms(lambda: collect(store))
    found["once: verify's walk over the ledger, of 100 shards, ms"] = _ms(
        lambda: [ledger.places_in_shard(shard.spec_hash, shard.number) for shard in ledger.shards()[-100:]]
    )
    found["once: peak memory of the gateway's process, MB"] = _peak_mb()
    store.close()
    ledger.close()
    return found


class LongestTransactions:
    """How long others have to wait at most to write, by what is done meanwhile."""

    def __init__(self, ledger: Ledger, found: dict[str, float]) -> None:
        """found: gets a row for each `of`, in milliseconds; 0 where nothing is written"""
        self._found, self._took_s, writing = found, [0.0], ledger.writing

        @contextlib.contextmanager
        def timed() -> Iterator[Any]:
            began = time.perf_counter()
            with writing() as connection:
                yield connection
            self._took_s.append(time.perf_counter() - began)

        ledger.writing = timed  # type: ignore[method-assign]

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        self._took_s = [0.0]
        yield
        self._found[f"{LONGEST}: {what}, ms"] = max(self._took_s) * 1e3


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
    found[f"{PERIODIC}: refresh that finds {NEW} segments, ms"] = _ms(dataset.refresh, times, lambda: add_new(place))
    found[f"{PERIODIC}: refresh that finds a version, ms"] = _ms(dataset.refresh, times, lambda: publish(place))
    found[f"{PERIODIC}: plan a batch, ms"] = _ms(dataset.sampler.next, 5 * times)
    found[f"{PERIODIC}: finished demonstrations, ms"] = _ms(
        lambda: dataset.finished(EpisodeSource.demonstration), times
    )
    found[f"{PERIODIC}: the state of a checkpoint, ms"] = _ms(dataset.state, times)

    def forget() -> None:
        with contextlib.closing(Ledger.open(place.ledger_location)) as ledger:
            ledger.prune([one.id for one in ledger.kept_episodes()[:EPISODES_AT_ONCE]], time.time_ns())

    found[f"{SELDOM}: refresh that finds episodes gone, ms"] = _ms(dataset.refresh, min(3, times), forget)
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
            add_new(place)
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
    kind = SELDOM if "max_lag" in name else PERIODIC
    found[f"{kind}: {name}: take in a version, ms"] = _ms(lambda: sampler.refresh(next(versions)), min(5, times))


if __name__ == "__main__":
    sys.exit(run("buffer.scale", measure))
