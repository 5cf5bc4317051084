"""Which steps may be drawn at one moment and with what weight, which segments are held for it, and both ways to draw:
independently from many segments (`WeightedRuns`), without replacement from one while it is held (`SegmentVisit`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import Moment, SamplingDistribution, StepRuns
from wire.errors import ConfigError

Cost = Callable[[np.ndarray], np.ndarray]
"""int64[k] bytes of memory that each of the int64[k] segments takes at most. A pure function of the segment as the
ledger committed it: it must not change when neighbours arrive (always count the room for what follows)."""
_DRAWS = 1
"""what random numbers are for; see `sweep`"""


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

    def cut(self, run: int) -> tuple[np.ndarray, np.ndarray]:
        """Take all from `run` on out again: (runs, weights), in place, for use before `append`."""
        at = int(self.runs.searchsorted(run))
        runs, weight, _, _ = (column.cut(at) for column in (self._runs, self._weight, self._count, self._until))
        return runs, weight

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

    def chance(self, runs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """float64[k]: how probable each of the int64[k] steps is in one draw."""
        at = np.minimum(self.runs.searchsorted(runs), len(self.runs) - 1)
        begin = self._index.run_first[runs] + self._index.run_count[runs] - self._count.all[at]
        there = (self.runs[at] == runs) & (offsets >= begin)
        return np.where(there, self._weight.all[at] / self.mass, 0.0)


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
        self._counts = np.zeros((2 * len(index.tasks), index.world), np.int64)
        """runs that may be drawn, by stratum and the rank that they were dealt to"""
        self._kinds: dict[int, int] = {}
        """where weights change with the newest version, the first run by `version << 9 | actor << 1 | demonstration`"""

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

    def split(self, stratum: int) -> bool:
        """Whether each rank draws from its own episodes of it; while one has nothing there, all draw from all of it.

        So no rank is without data while others have some, and all agree, each from what it knows.
        """
        return self.index.world > 1 and bool((self._counts[stratum] > 0).all())

    def look(self, watermark: int, newest_version: int, anew: bool) -> tuple[np.ndarray, int]:
        """Move to a later moment: (int64 runs that came, the first run whose weight may have changed or that is new).

        `anew`: any may have, and segments may have left. Otherwise it costs what came, and, where a factor moves with
        the newest version or an outcome, what came since the first run that this changes.
        """
        index, known = self.index, len(self.weight)
        by_outcome = any(factor.by_outcome for factor in self.target.factors)
        first, before, earlier = 0 if anew else known, self.segments, self.newest_version
        self.watermark, self.newest_version = watermark, newest_version
        self.segments, runs = index.prefix(watermark)
        came = slice(before, self.segments)
        self._measure(np.arange(before, self.segments))
        self._in_epoch.append(np.zeros(self.segments - before, bool))
        ended = index.episode[came][index.last[came]]
        if by_outcome and len(ended):
            first = min(first, int(index.run_offsets[index.first_of(ended)]))
        if any(factor.by_version for factor in self.target.factors):
            if newest_version != earlier:
                first = 0 if by_outcome else min(first, self._first_moved(earlier))
            some = slice(known, runs)
            shown = index.demonstration[index.run_segment[some]]
            kinds = index.run_version[some].astype(np.int64) << 9 | index.run_actor[some].astype(np.int64) << 1 | shown
            for kind, at in zip(*map(np.ndarray.tolist, np.unique(kinds, return_index=True)), strict=True):
                self._kinds.setdefault(kind, known + at)
        self._count(first, self._weight.cut(first), -1)
        self._weight.append(self.weights_at(np.arange(first, runs), watermark, newest_version))
        self._count(first, self._weight.all[first:], 1)
        return np.arange(known, runs), first

    def _count(self, first: int, weight: np.ndarray, change: int) -> None:
        """Runs from `first` on have these weights, or had them."""
        if self.index.world > 1:
            runs = first + np.flatnonzero(weight)
            np.add.at(self._counts, (self.strata(runs), self.index.ranks(self.index.run_segment[runs])), change)

    def strata(self, runs: np.ndarray) -> np.ndarray:
        """int64[k] stratum of each of int64[k] `runs`: 2 * task + online."""
        segment = self.index.run_segment[runs]
        return 2 * self.index.task[segment] + self.index.online[segment]

    def _first_moved(self, earlier: int) -> int:
        """The first run, of the beginning of its segment, that had another weight with the `earlier` newest version."""
        kind = np.fromiter(self._kinds, np.int64)
        actor, version, shown = (
            (kind >> 1 & 255).astype(np.uint8),
            (kind >> 9).astype(np.int32),
            (kind & 1).astype(bool),
        )
        runs = StepRuns(actor, version, shown, np.full(len(kind), -1, np.int8))
        now, then = (self.target.weights(runs, Moment(newest)) for newest in (self.newest_version, earlier))
        moved = np.fromiter(self._kinds.values(), np.int64)[now != then]
        return int(self.index.run_offsets[self.index.run_segment[moved.min()]]) if len(moved) else len(self.weight)

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


class VisitState(msgspec.Struct):
    """A segment that is held; with the same data it makes the same draws."""

    epoch: int
    row: int
    """of the ledger"""
    watermark: int
    newest_version: int
    scale: float
    """draws per unit of weight"""
    begin: float
    """this visit has the part of the segment's draws that begins here, and ends at `end`"""
    end: float
    width: float
    """how large the part would be if it had not begun in the middle"""
    out: int = 0
    """of these that have come out"""
    weight: float = 1.0
    """the least that the segment was due since, of what it was due then: that part of its draws stays"""


class SegmentVisit:
    """A segment that is held, with the draws that are left."""

    def __init__(self, state: VisitState, segment: int, known: EligibleSteps, key: tuple[int, ...]) -> None:
        self.state, self.segment = state, segment
        index = known.index
        runs = np.arange(index.run_offsets[segment], index.run_offsets[segment + 1])
        each = known.weights_at(runs, state.watermark, state.newest_version) * state.scale
        runs, each = runs[each > 0], each[each > 0]
        count = index.run_count[runs].astype(np.int64)
        ends = np.cumsum(each * count)
        self._due = float(ends[-1]) if len(ends) else 0.0
        rng = generator(*key, state.epoch, _DRAWS, state.row)
        # systematic sampling: draw k lies where k + 1 - shift draws are expected
        shift = rng.random()
        until = np.floor(ends + shift).astype(np.int64)
        self.planned = int(until[-1]) if len(until) else 0
        """of a whole visit"""
        at = np.repeat(np.arange(len(runs)), np.diff(until, prepend=0))
        into = np.arange(self.planned) + 1 - shift - (ends - each * count)[at]
        offset = index.run_first[runs][at] + np.clip(np.ceil(into / each[at]).astype(np.int64) - 1, 0, count[at] - 1)
        order = rng.permutation(self.planned)[int(state.begin * self.planned) : int(state.end * self.planned)]
        self._length = len(order)
        self._runs, self._offsets, self._number = runs[at[order]], offset[order], np.arange(self._length)
        self._chance = rng.random(self.planned)[order]
        self._next = min(state.out, self._length)
        self._keep(known.weight)

    @property
    def left(self) -> int:
        """Draws to come."""
        return len(self._runs) - self._next

    @property
    def rate(self) -> float:
        """How often it is chosen, in proportion to others."""
        return self.planned * self.state.width * self.state.weight

    def look_again(self, known: EligibleSteps, scale: float) -> None:
        """Weights changed: forget draws of steps that may not be drawn any more, or are due less."""
        runs = np.arange(known.index.run_offsets[self.segment], known.index.run_offsets[self.segment + 1])
        due = float(known.weight[runs] @ known.index.run_count[runs]) * scale
        self.state.weight = min(self.state.weight, due / max(self._due, 1e-300))
        self._keep(known.weight)

    def _keep(self, weight: np.ndarray) -> None:
        some = slice(self._next, None)
        stays = (weight[self._runs[some]] > 0) & (self._chance[some] < self.state.weight)
        if not stays.all():
            for name in ("_runs", "_offsets", "_number", "_chance"):
                setattr(self, name, getattr(self, name)[some][stays])
            self._next = 0

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) of the next draws, fewer if there are no more."""
        some = slice(self._next, self._next + count)
        self._next = min(some.stop, len(self._runs))
        self.state.out = int(self._number[self._next]) if self.left else self._length
        return self._runs[some], self._offsets[some]


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
