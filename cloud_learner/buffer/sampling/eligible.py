"""Which steps may be drawn at one moment and with what weight, and which segments are held for it: shared by strata."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cloud_learner.buffer.sampling.segment_index import Growing, SegmentIndex
from cloud_learner.buffer.sampling.target import Moment, SamplingDistribution
from wire.errors import ConfigError

Cost = Callable[[np.ndarray], np.ndarray]
"""int64[k] bytes of memory that each of the int64[k] segments takes at most. A pure function of the segment as the
ledger committed it: it must not change when neighbours arrive (always count the room for what follows)."""


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but `key`, integers of 0 or more."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class WeightedRuns:
    """Independent draws of steps by weight, from runs that are appended in the order of the ledger."""

    def __init__(self, index: SegmentIndex) -> None:
        self._index = index
        self._runs, self._count = Growing(np.int64), Growing(np.int64)
        self._weight, self._until = Growing(np.float64), Growing(np.float64)

    @property
    def runs(self) -> np.ndarray:
        """int64[k], growing"""
        return self._runs.all

    @property
    def mass(self) -> float:
        """Sum of the weights of all steps."""
        return float(self._until.all[-1]) if len(self._until.all) else 0.0

    def append(self, runs: np.ndarray, weight: np.ndarray, skipped: int = 0) -> None:
        """`weight` float64[k] of each step; the first `skipped` steps of the first run do not count."""
        count = self._index.run_count[runs].astype(np.int64)
        count[:1] -= skipped
        # one sum after the other, so that it does not matter when runs came
        self._until.append(np.cumsum(np.append(self.mass, weight * count))[1:])
        for column, values in ((self._runs, runs), (self._count, count), (self._weight, weight)):
            column.append(values)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of steps, with replacement. The mass must be above 0."""
        until = self._until.all
        point = rng.random(count) * until[-1]
        at = np.minimum(until.searchsorted(point, "right"), len(until) - 1)
        # from the end of the run, for what lies before it may be nothing
        back = ((until[at] - point) / self._weight.all[at]).astype(np.int64)
        runs = self._runs.all[at]
        last = self._index.run_first[runs] + self._index.run_count[runs] - 1
        return runs, last - np.minimum(back, self._count.all[at] - 1)


class EligibleSteps:
    """The index as it was when `watermark` was its newest row, seen with `newest_version`."""

    def __init__(self, index: SegmentIndex, target: SamplingDistribution, cost: Cost) -> None:
        self.index, self.target = index, target
        self.watermark = self.newest_version = 0
        self.segments = 0
        """how many of the index's, the first ones, are known"""
        self._weight = Growing(np.float64)
        self._cost_of, self._cost = cost, Growing(np.int64)
        self._in_epoch = Growing(np.bool_)

    @property
    def weight(self) -> np.ndarray:
        """float64[runs known] of each step, 0 where none may be drawn"""
        return self._weight.all

    @property
    def cost(self) -> np.ndarray:
        """int64[segments known] bytes"""
        return self._cost.all

    @property
    def in_epoch(self) -> np.ndarray:
        """bool[segments known]: drawn block by block, not independently; to be written"""
        return self._in_epoch.all

    def look(self, watermark: int, newest_version: int, anew: bool) -> tuple[np.ndarray, bool]:
        """Move to a later moment: (int64 runs that came, whether weights of others changed or segments left).

        Costs what came, unless a factor moves with the newest version or an outcome, or `anew`.
        """
        index, before, known = self.index, self.segments, len(self.weight)
        factors = self.target.factors
        again = anew or (newest_version != self.newest_version and any(factor.by_version for factor in factors))
        self.watermark, self.newest_version = watermark, newest_version
        self.segments, runs = index.prefix(watermark)
        self._measure(np.arange(before, self.segments))
        self._in_epoch.append(np.zeros(self.segments - before, bool))
        ended = index.last[before : self.segments].any()
        if again or (ended and any(factor.by_outcome for factor in factors)):
            weight = self.weights_at(np.arange(runs), watermark, newest_version)
            again = anew or not np.array_equal(weight[:known], self.weight)
            self.weight[:] = weight[:known]
            self._weight.append(weight[known:])
        else:
            self._weight.append(self.weights_at(np.arange(known, runs), watermark, newest_version))
        return np.arange(known, runs), again

    def weights_at(self, runs: np.ndarray, watermark: int, newest_version: int) -> np.ndarray:
        """float64[k] of each step of int64[k] `runs` as they were at a moment; 0 for what has left since."""
        index = self.index
        weights = self.target.weights(index.runs(runs, watermark), Moment(newest_version))
        weights[index.gone[index.run_segment[runs]] | (index.run_count[runs] == 0)] = 0.0
        return weights

    def segments_of(self, runs: np.ndarray) -> np.ndarray:
        """int64 the segments of growing runs, each once, growing."""
        segments = self.index.run_segment[runs]
        return segments[np.flatnonzero(np.diff(segments, prepend=-1))]

    def _measure(self, segments: np.ndarray) -> None:
        if len(segments):
            cost = np.asarray(self._cost_of(segments), np.int64)
            if cost.shape != segments.shape or (cost < 0).any():
                raise ConfigError("sampler: `cost` must answer with one number of bytes, 0 or more, for each segment.")
            self._cost.append(cost)


class HeldSegments:
    """Which segments may stay in memory, because somebody draws from them, and which of them are there."""

    def __init__(self) -> None:
        self._holders, self._loaded = Growing(np.int32), Growing(np.bool_)
        self._left: list[np.ndarray] = []
        self._leaving: np.ndarray = np.zeros(0, np.int64)
        self.loaded_bytes = 0

    def grow(self, segments: int) -> None:
        """There are so many segments now."""
        more = segments - len(self._holders.all)
        self._holders.append(np.zeros(more, np.int32))
        self._loaded.append(np.zeros(more, bool))

    def hold(self, segments: np.ndarray) -> None:
        """int64[k], each once: one holder more."""
        self._holders.all[segments] += 1

    def release(self, segments: np.ndarray) -> None:
        """One holder less; what nobody holds leaves with the next batch, for it may be drawn by this one."""
        self._holders.all[segments] -= 1
        self._left.append(segments)

    def start_batch(self) -> None:
        """What left until now may leave memory with this batch."""
        self._leaving = np.concatenate(self._left) if self._left else self._leaving[:0]
        self._left.clear()

    def settle(self, drawn: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(drop, load) int64 segments of this batch, which draws from int64[b] `drawn`; growing."""
        loaded = self._loaded.all
        drop = np.zeros(0, np.int64)
        if len(self._leaving):
            drop = np.unique(self._leaving[loaded[self._leaving] & (self._holders.all[self._leaving] == 0)])
            again = np.isin(drop, drawn)
            self._left.append(drop[again])
            drop = drop[~again]
        load = drawn[~loaded[drawn]]
        if len(load) or len(drop):
            load = np.unique(load)
            loaded[drop], loaded[load] = False, True
            self.loaded_bytes += int(cost[load].sum()) - int(cost[drop].sum())
        return drop, load
