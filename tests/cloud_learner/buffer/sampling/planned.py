"""A ledger's index made up on the spot, and a reader that holds a planner to its word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cloud_learner.buffer.ledger.rows import EpisodeFacts, SegmentColumns
from cloud_learner.buffer.sampling.sampler import BatchPlan, Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.shares import strata_shares

POLICY, HUMAN, SCRIPT, HOLD = range(4)
Run = tuple[int, int, int]
"""steps, actor, version"""


class Book:
    """Segments in the order of their rows, as a ledger would index them."""

    def __init__(self) -> None:
        self.row = 0
        self.newest_version = 0
        """of the fleet, when the next segment arrives"""
        self.newest: dict[int, int] = {}
        """the same by row"""
        self._segments: list[tuple[int, int, int, int, list[Run], float, bool, int]] = []
        self._facts: dict[int, EpisodeFacts] = {}
        self._next: dict[int, tuple[int, int]] = {}
        self._pruned: set[int] = set()
        self._damaged: set[int] = set()

    def episode(self, task: str = "a", source: str = "online", robot: str = "robot") -> int:
        """A new episode's number."""
        number = len(self._facts) + 1
        self._facts[number] = EpisodeFacts(f"episode-{number}", robot, task, source, number)
        self._next[number] = (0, 0)
        return number

    def segment(
        self,
        episode: int,
        runs: Sequence[Run],
        outcome: int = -1,
        reward: float = 0.0,
        at: tuple[int, int] | None = None,
    ) -> int:
        """Its row. An outcome makes it the last; `at`: (index, first tick) when it is not the next in turn."""
        index, tick = at or self._next[episode]
        self._next[episode] = (index + 1, tick + sum(run[0] for run in runs))
        self.row += 1
        self.newest[self.row] = self.newest_version
        self._segments.append((self.row, episode, index, tick, list(runs), reward, outcome >= 0, outcome))
        return self.row

    def record(self, lengths: Sequence[int], task: str = "a", source: str = "demonstration", actor: int = HUMAN) -> int:
        """A whole episode of one actor, by the steps of its segments."""
        number = self.episode(task, source)
        for position, steps in enumerate(lengths):
            self.segment(number, [(steps, actor, 1)], 0 if position == len(lengths) - 1 else -1)
        return number

    def record_some(
        self, rng: np.random.Generator, episodes: int, tasks: Sequence[str] = ("a", "b"), far: int = 60
    ) -> None:
        """Random ones of every kind: actors, versions, lengths and outcomes."""
        for _ in range(episodes):
            number = self.episode(str(rng.choice(tasks)), str(rng.choice(["online", "demonstration"])))
            count = int(rng.integers(1, 6))
            for position in range(count):
                runs = [
                    (int(rng.integers(1, far)), int(rng.integers(4)), int(rng.integers(1, 9)))
                    for _ in range(rng.integers(0 if position == count - 1 else 1, 4))
                ]
                self.segment(number, runs, int(rng.integers(3)) if position == count - 1 else -1, float(rng.random()))

    def prune(self, episodes: set[int]) -> None:
        self._pruned |= episodes & self._facts.keys()
        self._segments = [segment for segment in self._segments if segment[1] not in episodes]

    def damage(self, rows: set[int]) -> None:
        self._damaged |= rows
        self._segments = [segment for segment in self._segments if segment[0] not in rows]

    def index(self, after: int = 0, until: int = 2**62) -> SegmentColumns:
        chosen = [segment for segment in self._segments if after < segment[0] <= until]
        runs, offsets = [], [0]
        for segment in chosen:
            at = 0
            for steps, actor, version in segment[4]:
                runs.append((at, steps, actor, version))
                at += steps
            offsets.append(len(runs))
        steps = [sum(run[0] for run in segment[4]) for segment in chosen]
        columns = list(zip(*chosen, strict=True)) or [[]] * 8
        return SegmentColumns(
            row=np.array(columns[0], np.int64),
            episode=np.array(columns[1], np.int64),
            index=np.array(columns[2], np.int32),
            first_tick=np.array(columns[3], np.int64),
            steps=np.array(steps, np.int32),
            frames=np.array(steps, np.int32),
            reward_sum=np.array(columns[5], np.float64),
            last=np.array(columns[6], bool),
            newest_version=np.array([self.newest.get(row, 0) for row in columns[0]], np.int32),
            outcome=np.array(columns[7], np.int8),
            run_offsets=np.array(offsets, np.int64),
            runs=np.array(runs, np.int32).reshape(-1, 4),
            episodes={number: self._facts[number] for number in columns[1]},
        )

    def follow(self, universe: SegmentIndex) -> np.ndarray:
        """Tell what left and what came, as a dataset does; int64 segments that left."""
        gone = universe.forget(self._pruned, np.array(sorted(self._damaged), np.int64))
        universe.extend(self.index(universe.watermark))
        return gone

    def universe(self, tasks: tuple[str, ...] = ("a", "b")) -> SegmentIndex:
        universe = SegmentIndex(tasks)
        universe.extend(self.index())
        return universe


def by_step(universe: SegmentIndex, bytes_per_step: int = 1000):
    """A cost for the planner: int64[k] bytes of int64[k] segments."""
    return lambda segments: universe.steps[segments].astype(np.int64) * bytes_per_step


class Reader:
    """Carries plans out as the dataset does, and counts what was drawn."""

    def __init__(self, universe: SegmentIndex, cost, budget: int) -> None:
        self.universe, self.cost, self.budget = universe, cost, budget
        self.loaded: set[int] = set()
        self.drawn: Counter[tuple[int, int]] = Counter()
        self.loads = 0
        self.peak = 0

    def carry_out(self, plan: BatchPlan, batch: int) -> None:
        drop, load = set(plan.drop.tolist()), set(plan.load.tolist())
        assert drop <= self.loaded, f"{drop - self.loaded} leave but were never loaded"
        self.loaded -= drop
        assert not load & self.loaded, f"{load & self.loaded} are loaded again"
        self.loaded |= load
        self.loads += len(load)
        used = self.used
        self.peak = max(self.peak, used)
        assert used <= self.budget, f"plan {plan.number}: {used} bytes loaded of {self.budget}"
        assert plan.segments.shape == plan.offsets.shape == (batch,)
        assert (plan.offsets >= 0).all() and (plan.offsets < self.universe.steps[plan.segments]).all()
        for segment, offset in zip(plan.segments.tolist(), plan.offsets.tolist(), strict=True):
            assert segment in self.loaded, f"plan {plan.number}: segment {segment} is drawn but not in memory"
            self.drawn[segment, offset] += 1

    @property
    def used(self) -> int:
        """Bytes of what is loaded."""
        return int(self.cost(np.array(sorted(self.loaded), np.int64)).sum())

    def counts(self) -> np.ndarray:
        """int64 draws of each step of the universe, segment after segment."""
        first = np.concatenate([[0], np.cumsum(self.universe.steps, dtype=np.int64)])
        counts = np.zeros(first[-1], np.int64)
        for (segment, offset), count in self.drawn.items():
            counts[first[segment] + offset] = count
        return counts


def due_of(sampler: Sampler) -> np.ndarray:
    """float64[runs]: the due probability that a draw is one given eligible step of each run that is known.

    As of the last refresh; times `run_count` it sums to 1.
    """
    known, target = sampler._known, sampler._target
    index = known.index
    shares = strata_shares(target.mix, index.tasks, sampler._mass, sampler._losses)
    mass, task = known.weight * index.run_count[: len(known.weight)], index.task[index.run_segment[: len(known.weight)]]
    online = index.online[index.run_segment[: len(known.weight)]]
    found = np.zeros(len(known.weight))
    for number, share in enumerate(shares):
        parts = [(task == number) & (online == part) & (share[part] > 0) for part in (0, 1)]
        of_task = np.flatnonzero((parts[0] | parts[1]) & (mass > 0))
        if not len(of_task):
            continue
        # whole segments, from the one with the step that makes them enough
        above = np.cumsum(index.run_count[of_task][::-1])[::-1]
        oldest = of_task[max(0, int((above >= target.recent.newest).sum()) - 1)]
        newest = of_task[index.run_segment[of_task] >= index.run_segment[oldest]]
        recent = target.recent.share
        for part, here in enumerate(parts):
            found[here] += share[part] * (1 - recent) * known.weight[here] / max(mass[here].sum(), 1e-300)
        found[newest] += recent * share.sum() * known.weight[newest] / mass[newest].sum()
    return found


def per_step(universe: SegmentIndex, by_run: np.ndarray) -> np.ndarray:
    """A value of each run, for each step of the universe, segment after segment."""
    values = np.zeros(int(universe.steps.sum()))
    first = np.concatenate([[0], np.cumsum(universe.steps, dtype=np.int64)])
    for run, value in enumerate(by_run.tolist()):
        begin = first[universe.run_segment[run]] + universe.run_first[run]
        values[begin : begin + universe.run_count[run]] = value
    return values


def same(one: BatchPlan, other: BatchPlan) -> bool:
    """Whether two plans draw the same steps."""
    return (
        one.number == other.number
        and np.array_equal(one.segments, other.segments)
        and np.array_equal(one.offsets, other.offsets)
    )
