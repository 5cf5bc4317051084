"""Does the sampler draw what it says, from the first batch on, with less and less memory?

    python -m benchmarks.sampling [--quick] [--json FILE] [--write]

Episodes of some tasks are drawn from as a trainer would, without pictures, for three epochs of draws. At some moments
the deviation from what is due is the total variation between the draws of each episode and its share. Beside it: that
of independent draws, which no memory bounds, and of a cache that is filled in the order of arrival, drawn from evenly,
and whose oldest segment makes room for the next (as RLinf's trajectory cache, with one pass over the data as an epoch).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.table import Goal, Result, run
from cloud_learner.buffer.ledger.rows import EpisodeFacts, SegmentColumns
from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import imitation
from wire.messages.gateway import ACTORS

SEGMENT_STEPS = 80
STEP_BYTES = 10_000
RATIOS = (0.05, 0.1, 0.5, 1.0, 2.0)
"""of the memory that all would take"""
MOMENTS = (0.1, 0.5, 1.0, 3.0)
"""in epochs of draws"""
INDEPENDENT_RUNS = 20


@dataclass(frozen=True, slots=True)
class SamplingSize:
    """How much of everything."""

    tasks: int = 4
    episodes: int = 60
    """of each task"""
    segments: int = 4
    """of each episode"""
    batch: int = 64
    seeds: int = 3


FULL, QUICK = SamplingSize(), SamplingSize(tasks=2, episodes=20, batch=32, seeds=1)


def measure(quick: bool) -> Result:
    """All cache ratios, echo 1 and 8."""
    size = QUICK if quick else FULL
    independent = _independent(size)
    rows: list[dict[str, Any]] = []
    for ratio in RATIOS:
        for echo in (1.0, 8.0) if ratio < 1 else (1.0,):
            found = np.mean([_ours(size, ratio, echo, seed) for seed in range(size.seeds)], 0)
            rows += _rows(f"ours, echo {echo:.0f}", ratio, found, independent)
        if ratio < 1:
            found = np.mean([_first_in_first_out(size, ratio, seed) for seed in range(size.seeds)], 0)
            rows += _rows("first in, first out", ratio, found, independent)
    by_name = {(row["who"], row["cache ratio"], row["epochs of draws"]): row for row in rows}
    goals = []
    for ratio in (1.0, 2.0):
        worst = max(by_name["ours, echo 1", ratio, moment]["of independent"] for moment in MOMENTS)
        name = f"cache {ratio:g}: deviation at any moment, of independent draws"
        goals.append(Goal(name, worst, "at most 1.2", worst <= 1.2))
    never = by_name["ours, echo 1", 0.1, 1.0]["never drawn"]
    goals.append(Goal("cache 0.1, one epoch: episodes never drawn", never, "at most 0.05", never <= 0.05))
    notes = [
        f"{size.tasks} tasks of {size.episodes} episodes of {size.segments} segments of {SEGMENT_STEPS} steps, batches "
        f"of {size.batch}, means of {size.seeds} seeds. An epoch of draws is as many as there are steps. Independent "
        f"draws: mean of {INDEPENDENT_RUNS} runs.",
        "Loads: segments read and decoded by then, of all there are; an array in RAM would have 1.",
    ]
    return Result("Sampling: deviation from what is due", rows, goals, notes)


def _rows(who: str, ratio: float, found: np.ndarray, independent: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for moment, (deviation, never, loads), alone in zip(MOMENTS, found.tolist(), independent.tolist(), strict=True):
        rows.append(
            {
                "who": who,
                "cache ratio": ratio,
                "epochs of draws": moment,
                "total variation": deviation,
                "independent draws": alone,
                "of independent": deviation / alone,
                "never drawn": never,
                "loads": loads,
            }
        )
    return rows


def _ours(size: SamplingSize, ratio: float, echo: float, seed: int) -> np.ndarray:
    """float64[moments, 3]: total variation, share of episodes never drawn, loads."""
    index = SegmentIndex(tuple(f"task-{number}" for number in range(size.tasks)))
    index.extend(made_index(size))
    cost = index.steps.astype(np.int64) * STEP_BYTES
    sampler = Sampler(index, imitation(), lambda s: cost[s], int(cost.sum() * ratio), size.batch, seed, echo)

    def batches() -> Iterator[tuple[np.ndarray, int]]:
        while True:
            plan = sampler.next()
            yield plan.segments, len(plan.load)

    return _follow(size, batches())


def _first_in_first_out(size: SamplingSize, ratio: float, seed: int) -> np.ndarray:
    """The same of a cache that is drawn from evenly while segments pass through it in the order of arrival."""
    rng = np.random.default_rng(seed)
    segments = size.tasks * size.episodes * size.segments
    held = max(1, int(segments * ratio))

    def batches() -> Iterator[tuple[np.ndarray, int]]:
        drawn, first, before = 0, 0, 0
        while True:
            window = (first + np.arange(held)) % segments
            yield window[rng.integers(0, held, size.batch)], first + held - before
            before = first + held
            drawn += size.batch
            first = drawn // SEGMENT_STEPS

    return _follow(size, batches())


def _independent(size: SamplingSize) -> np.ndarray:
    """float64[moments]: mean total variation of independent draws of episodes."""
    rng = np.random.default_rng(0)
    episodes = size.tasks * size.episodes
    due = np.full(episodes, 1 / episodes)
    steps = episodes * size.segments * SEGMENT_STEPS
    draws = [int(np.ceil(moment * steps / size.batch)) * size.batch for moment in MOMENTS]
    runs = [[_deviation(rng.multinomial(n, due)) for n in draws] for _ in range(INDEPENDENT_RUNS)]
    return np.mean(runs, 0)


def _follow(size: SamplingSize, batches: Iterator[tuple[np.ndarray, int]]) -> np.ndarray:
    """float64[moments, 3] of batches: their segments int64[b], and how many were loaded for each."""
    episodes = size.tasks * size.episodes
    segments = episodes * size.segments
    counts, drawn, loads = np.zeros(episodes, np.int64), 0, 0
    found = []
    for moment in MOMENTS:
        while drawn < moment * segments * SEGMENT_STEPS:
            some, loaded = next(batches)
            counts += np.bincount(some // size.segments, minlength=episodes)
            drawn, loads = drawn + len(some), loads + loaded
        found.append((_deviation(counts), float((counts == 0).mean()), loads / segments))
    return np.array(found)


def _deviation(counts: np.ndarray) -> float:
    """Total variation between int64[episodes] draws and an equal share of each."""
    return float(np.abs(counts / counts.sum() - 1 / len(counts)).sum()) / 2


def made_index(size: SamplingSize) -> SegmentColumns:
    """Demonstrations as a ledger would index them, without pictures; tasks take turns."""
    count = size.tasks * size.episodes * size.segments
    number = np.arange(count)
    episode, at = number // size.segments + 1, number % size.segments
    last = at == size.segments - 1
    runs = np.zeros((count, 4), np.int32)
    runs[:, 1:] = SEGMENT_STEPS, ACTORS.index("human"), 1
    facts = {
        n: EpisodeFacts(f"episode-{n}", "robot", f"task-{n % size.tasks}", "demonstration", n)
        for n in np.unique(episode).tolist()
    }
    return SegmentColumns(
        row=number + 1,
        episode=episode,
        index=at.astype(np.int32),
        first_tick=at * SEGMENT_STEPS,
        steps=np.full(count, SEGMENT_STEPS, np.int32),
        frames=np.zeros(count, np.int32),
        reward_sum=np.zeros(count),
        last=last,
        newest_version=np.ones(count, np.int32),
        outcome=np.where(last, 0, -1).astype(np.int8),
        run_offsets=np.arange(count + 1),
        runs=runs,
        episodes=facts,
    )


if __name__ == "__main__":
    sys.exit(run("sampling", measure))
