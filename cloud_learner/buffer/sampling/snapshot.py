"""What may be drawn at one moment: weights of all runs, and what follows from them. Shared by all strata."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cloud_learner.buffer.sampling.epoch import Population
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import Moment, SamplingDistribution
from wire.errors import ConfigError

Cost = Callable[[np.ndarray], np.ndarray]
"""int64[k] bytes of memory that each of the int64[k] segments takes at most. A pure function of the segment as the
ledger committed it: it must not change when neighbours arrive (always count the room for what follows)."""


class Choice:
    """Independent draws from runs by the weights of their steps."""

    def __init__(self, scope: SamplingSnapshot, runs: np.ndarray, skipped: int = 0) -> None:
        """`runs` grow; the first `skipped` steps of the first of them do not count."""
        self._scope, self._skipped = scope, skipped
        self.runs = runs
        self._until: np.ndarray = np.zeros(0)
        self._accumulate(0)

    def append(self, runs: np.ndarray) -> None:
        """More runs, after those that are there."""
        before, self.runs = len(self.runs), np.append(self.runs, runs)
        self._accumulate(before)

    def mass(self, among: int | None = None) -> float:
        """Sum of the weights of the steps of the first `among` runs."""
        until = self._until[:among]
        return float(until[-1]) if len(until) else 0.0

    def draw(self, count: int, rng: np.random.Generator, among: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of steps from the first `among` runs, with replacement."""
        until, universe = self._until[:among], self._scope.universe
        place = rng.random(count) * until[-1]
        at = np.minimum(until.searchsorted(place, "right"), len(until) - 1)
        runs = self.runs[at]
        # from the end of the run, for what lies before it may be nothing
        back = ((until[at] - place) / self._scope.weight[runs]).astype(np.int64)
        length = universe.run_count[runs] - np.where(at == 0, self._skipped, 0)
        last = universe.run_first[runs] + universe.run_count[runs] - 1
        return runs, last - np.minimum(back, length - 1)

    def _accumulate(self, begin: int) -> None:
        # one sum after the other, so that it does not matter when runs came
        masses = self._scope.mass(self.runs[begin:])
        if begin == 0 and self._skipped:
            masses[0] -= self._skipped * self._scope.weight[self.runs[0]]
        self._until = np.append(self._until, np.cumsum(np.append(self.mass(), masses))[1:])


class StratumView:
    """What may be drawn of one stratum now."""

    def __init__(self, scope: SamplingSnapshot, runs: np.ndarray) -> None:
        self._scope = scope
        self.choice = Choice(scope, runs)
        self.segments: np.ndarray = scope.segments_of(runs)
        """int64, growing"""
        self.bytes = int(scope.cost[self.segments].sum())
        self.largest = int(scope.cost[self.segments].max(initial=0))
        """bytes of the largest segment"""
        self.steps = int(scope.universe.run_count[runs].sum())

    @property
    def runs(self) -> np.ndarray:
        """int64, growing"""
        return self.choice.runs

    def append(self, runs: np.ndarray) -> None:
        """Runs of segments that came after all others."""
        if len(runs):
            new = StratumView(self._scope, runs)
            self.choice.append(runs)
            self.segments = np.append(self.segments, new.segments)
            self.bytes += new.bytes
            self.largest = max(self.largest, new.largest)
            self.steps += new.steps


class SamplingSnapshot:
    """The universe as it was when `watermark` was its newest row, seen with `newest_version`."""

    def __init__(
        self, universe: SegmentIndex, target: SamplingDistribution, cost: Cost, batch: int, echo: float, seed: int
    ) -> None:
        self.universe, self.target = universe, target
        self.batch, self.echo, self.seed = batch, echo, seed
        self.watermark = self.newest_version = 0
        self.segments = 0
        """how many of the universe's, the first ones, are in scope"""
        self.weight: np.ndarray = np.zeros(0)
        """float64[runs in scope] of each step, 0 where none may be drawn"""
        self.alive: np.ndarray = np.zeros(0, bool)
        """bool[runs in scope]: weight above 0"""
        self.cost: np.ndarray = np.zeros(0, np.int64)
        """int64[segments in scope] bytes"""
        self.strata = 2 * len(universe.tasks)
        """number 2 * task + online"""
        self.only_grew = False
        """whether the last look changed nothing about what was in scope before"""
        self._cost = cost
        self._runs: list[np.ndarray] = [np.zeros(0, np.int64)] * self.strata
        self.views = [StratumView(self, runs) for runs in self._runs]
        """what may be drawn, by stratum"""
        self.added = list(self._runs)
        """int64 runs in the views since the last look, by stratum; all of them unless it only grew"""

    def look(self, watermark: int, newest_version: int) -> None:
        """Move to a later moment."""
        universe, before = self.universe, len(self.weight)
        self.watermark, self.newest_version = watermark, newest_version
        self.segments, runs = universe.prefix(watermark)
        self._measure(np.arange(len(self.cost), self.segments))
        new = np.arange(before, runs)
        stratum = self._stratum(universe.run_segment[new])
        mine = [new[stratum == number] for number in range(self.strata)] if len(new) else [new] * self.strata
        weight = self._weights(slice(0, runs), watermark, newest_version)
        self.only_grew = before > 0 and np.array_equal(weight[:before], self.weight)
        self.weight, self.alive = weight, weight > 0
        self._runs = [np.append(old, more) for old, more in zip(self._runs, mine, strict=True)]
        if self.only_grew:
            self.added = [more[self.alive[more]] for more in mine]
            for view, more in zip(self.views, self.added, strict=True):
                view.append(more)
        else:
            self.added = [all_runs[self.alive[all_runs]] for all_runs in self._runs]
            self.views = [StratumView(self, alive) for alive in self.added]

    def row_of(self, segment: int) -> int:
        """Ledger row of a segment number; that after the watermark for the number after the last."""
        return int(self.universe.row[segment]) if segment < self.segments else self.watermark + 1

    def mass(self, runs: np.ndarray) -> np.ndarray:
        """float64 sum of the weights now of the steps of each run."""
        return self.weight[runs] * self.universe.run_count[runs]

    def segments_of(self, runs: np.ndarray) -> np.ndarray:
        """int64 the segments of growing runs, each once, growing."""
        segments = self.universe.run_segment[runs]
        different = np.ones(len(segments), bool)
        np.not_equal(segments[1:], segments[:-1], out=different[1:])
        return segments[different]

    def population(self, stratum: int, watermark: int, newest_version: int, but: np.ndarray | None) -> Population:
        """What could be drawn of a stratum at another moment, but for the runs marked in bool[runs].

        In the order of episodes by their first ledger row, and in it of ticks: the same for any universe that holds
        what this one held then.
        """
        universe = self.universe
        runs: np.ndarray = self._runs[stratum]
        runs = runs[: np.searchsorted(runs, universe.prefix(watermark)[1])]
        if but is not None:
            runs = runs[~but[runs]]
        weight = self._weights(runs, watermark, newest_version)
        runs, weight = runs[weight > 0], weight[weight > 0]
        segment = universe.run_segment[runs]
        order = np.lexsort((universe.index[segment], universe.episode_first_row[universe.episode[segment]]))
        runs, segment = runs[order], segment[order]
        return Population(
            run=runs,
            segment=segment,
            first=universe.run_first[runs].astype(np.int64),
            count=universe.run_count[runs].astype(np.int64),
            weight=weight[order],
            cost=self.cost[segment],
        )

    def why_nothing(self) -> str:
        """Why no step may be drawn, and what to do about it."""
        tasks = self.universe.tasks
        here = int((~self.universe.gone[: self.segments]).sum())
        if not here:
            return (
                f"no segment of {tasks} is in the buffer. Record a demonstration, or let a robot work on one of these "
                "tasks."
            )
        if not self.alive.any():
            return (
                f"the target gives no weight to any of {here} segments at policy version {self.newest_version}. "
                "Record a demonstration, take a robot over, or allow data of older versions."
            )
        parts = [f"{task} ({part})" for task in tasks for part in ("offline", "online")]
        some = ", ".join(part for part, view in zip(parts, self.views, strict=True) if len(view.runs))
        return f"the mix gives no share to {some}, the only data there is. Change the shares, or record other data."

    def _measure(self, segments: np.ndarray) -> None:
        if not len(segments):
            return
        cost = np.asarray(self._cost(segments), np.int64)
        if cost.shape != segments.shape or (cost < 0).any():
            raise ConfigError("planner: `cost` must answer with one number of bytes, 0 or more, for each segment.")
        self.cost = np.append(self.cost, cost)

    def _stratum(self, segments: np.ndarray) -> np.ndarray:
        return 2 * self.universe.task[segments] + self.universe.online[segments]

    def _weights(self, runs: slice | np.ndarray, watermark: int, newest_version: int) -> np.ndarray:
        universe = self.universe
        weights = self.target.weights(universe.runs(runs, watermark), Moment(newest_version))
        weights[universe.gone[universe.run_segment[runs]] | (universe.run_count[runs] == 0)] = 0.0
        return weights
