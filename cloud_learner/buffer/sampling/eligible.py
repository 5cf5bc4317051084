"""Which steps may be drawn at one moment, and with what weight."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec
import numpy as np

from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import rollout_steps
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.robot_bound import RobotBound
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import VERDICT, Moment, SamplingDistribution, StepRuns
from wire.errors import ConfigError

Cost = Callable[[np.ndarray], np.ndarray]
"""int64[k] bytes of memory that each of the int64[k] segments takes at most. A pure function of the segment as the
ledger committed it: it must not change when neighbours arrive (always count the room for what follows)."""


class EligibleSteps:
    """The index as it was when `watermark` was its newest row, seen with `newest_version`."""

    def __init__(self, index: SegmentIndex, target: SamplingDistribution, cost: Cost) -> None:
        self.index, self.target = index, target
        self.watermark = self.newest_version = 0
        self.segments = 0
        """how many of the index's, the first ones, are known"""
        self.content = 0
        """checksum of the ledger rows that are known and there"""
        self.rollouts = self.stale = 0
        """steps that are there: what the policy did by itself, and of that what is stale by the
        target's `staleness`"""
        self._by_version = any(factor.by_version for factor in target.factors)
        self._label = Growing(np.float32)
        """of the segments known, the labels that their weights were taken with; empty if the target goes by none"""
        self._weight, self._target_weight = Growing(np.float64), Growing(np.float64)
        self._bound = RobotBound(2 * len(index.tasks))
        self._cost_of, self._cost = cost, Growing(np.int64)
        self._forgotten = 0
        """how many of `index.forgotten` are known"""
        self._kinds: dict[int, Growing] = {}
        """where weights change with the newest version: runs by `version << 9 | actor << 1 | demonstration`"""

    @property
    def weight(self) -> np.ndarray:
        """float64[runs known] of each step, 0 where none may be drawn"""
        return self._weight.all

    @property
    def labels(self) -> int:
        """Checksum of the labels that weights were taken with, of what is there; 0 if there are none."""
        said = np.flatnonzero(~np.isnan(self._label.all))
        said = said[~self.index.gone[said]]
        return zlib.crc32(self._label.all[said].tobytes(), zlib.crc32(self.index.row[said].tobytes()))

    @property
    def cost(self) -> np.ndarray:
        """int64[segments known] bytes"""
        return self._cost.all

    def look(self, watermark: int, newest_version: int) -> tuple[np.ndarray, np.ndarray]:
        """Move to a later moment: int64 runs that came, and int64 growing runs that have another weight than before.

        Costs what came, left, or may have changed; a run that came had weight 0 before.
        """
        index, before, known = self.index, self.segments, len(self.weight)
        self.watermark, earlier, self.newest_version = watermark, self.newest_version, newest_version
        self.segments, runs = index.prefix(watermark)
        came, runs_came = np.arange(before, self.segments), np.arange(known, runs)
        left = index.forgotten[self._forgotten :]
        left, self._forgotten = left[left < before], len(index.forgotten)
        self._measure(came)
        for sign, segments in ((1, came[~index.gone[came]]), (-1, left)):
            self.content = (self.content + sign * int(_mixed(index.row[segments]).sum())) % 2**62
            self._count_rollouts(sign, index.runs_of(segments))
        self._weight.append(np.zeros(runs - known))
        self._target_weight.append(np.zeros(runs - known))
        may_differ = [runs_came, index.runs_of(np.sort(left))]
        # what a person discarded is drawn no more, whatever the target says of outcomes
        ends = np.concatenate([came, left])
        of_ended = index.members(np.unique(index.episode[ends[index.last[ends]]]))
        may_differ.append(index.runs_of(of_ended[of_ended < before]))
        if self._by_version:
            may_differ += self._moved(earlier) if newest_version != earlier else []
            self._note_kinds(runs_came)
        if self.target.label:
            may_differ.append(index.runs_of(self._relabelled()))
        some = np.concatenate(may_differ)
        if len(some) > len(runs_came):
            some = np.unique(some)
        some = self._weigh(some, self.weights_at(some, watermark, newest_version))
        weight = self._bounded(some)
        differs = weight != self.weight[some]
        self.weight[some[differs]] = weight[differs]
        return runs_came, some[differs]

    def weights_at(
        self, runs: np.ndarray, watermark: int, newest_version: int, label: np.ndarray | None = None
    ) -> np.ndarray:
        """float64[k] of each step of int64[k] `runs` as they were at a moment, by the target: not bounded by robot, and
        0 if gone.

        `label`: float32[k] that they had then, without it the index's.
        """
        index = self.index
        seen = index.runs(runs, watermark)
        if label is not None:
            seen = msgspec.structs.replace(seen, label=label)
        weights = self.target.weights(seen, Moment(newest_version))
        weights[index.gone[index.run_segment[runs]] | (index.run_count[runs] == 0)] = 0.0
        return weights

    def bound(self, segment: int) -> float:
        """What the weights of a segment are multiplied with, since its robot has brought so much more than others."""
        one = np.array([segment])
        return float(self._bound.factor[self.strata(one), self.index.robots(one)][0])

    def _weigh(self, runs: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Growing int64 `runs` have float64 `weight` by the target; those, and the others whose bound changed by it."""
        index, before = self.index, self._target_weight.all[runs]
        differs = np.flatnonzero(weight != before)
        runs_differ, count = runs[differs], index.run_count[runs[differs]].astype(np.int64)
        segment = index.run_segment[runs_differ]
        more = (weight[differs] > 0).astype(np.int64) - (before[differs] > 0)
        mass = (weight[differs] - before[differs]) * count
        robots = index.robots(segment)
        changed = self._bound.add(len(index.robot_names), self.strata(segment), robots, mass, more * count)
        self._target_weight.all[runs_differ] = weight[differs]
        if not changed.any():
            return runs
        # seldom: one robot has come to bring far more than the others, or does so no more
        every = index.run_segment[: len(self.weight)]
        return np.union1d(runs, np.flatnonzero(changed[self.strata(every), index.robots(every)]))

    def _bounded(self, runs: np.ndarray) -> np.ndarray:
        """float64[k]: the weights by the target, bounded by robot."""
        segment = self.index.run_segment[runs]
        factor = self._bound.factor[self.strata(segment), self.index.robots(segment)]
        return self._target_weight.all[runs] * factor

    def _count_rollouts(self, sign: int, runs: np.ndarray) -> None:
        seen, count, bound = self.index.runs(runs, self.watermark), self.index.run_count[runs], self.target.staleness
        self.rollouts += sign * int(count[rollout_steps(seen.actor, seen.demonstration)].sum())
        if bound is not None:
            self.stale += sign * int(count[bound.is_stale(seen.actor, seen.demonstration, seen.arrival_lag)].sum())

    def strata(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] stratum of each of int64[k] segments: 2 * task + online."""
        return 2 * self.index.task[segments].astype(np.int64) + self.index.online[segments]

    def may_be_drawn(self, segments: np.ndarray) -> np.ndarray:
        """bool[k]: whether any step of each of int64[k] growing segments may be."""
        runs = self.index.runs_of(segments)
        return np.isin(segments, self.index.run_segment[runs[self.weight[runs] > 0]])

    def _relabelled(self) -> np.ndarray:
        """int64 growing segments that were known with another label; from now on with the index's."""
        before, label = len(self._label.all), self.index.label[: self.segments]
        # as bits, for nan is nan
        changed = np.flatnonzero(label[:before].view(np.uint32) != self._label.all.view(np.uint32))
        self._label.all[changed] = label[changed]
        self._label.append(label[before:])
        return changed

    def _moved(self, earlier: int) -> list[np.ndarray]:
        """The runs that had another weight with the `earlier` newest version, whatever the outcome."""
        kind, outcomes = np.fromiter(self._kinds, np.int64), np.arange(-1, len(OUTCOMES), dtype=np.int8)
        each = np.repeat(kind, len(outcomes))
        runs = StepRuns(
            actor=(each >> 1 & 255).astype(np.uint8),
            version=(each >> 9).astype(np.int32),
            demonstration=(each & 1).astype(bool),
            outcome=np.tile(outcomes, len(kind)),
            # any that has a weight: a label counts alike at any version, and without a verdict each outcome is itself
            label=np.full(len(each), np.nan if self.target.label == VERDICT else 1.0, np.float32),
            # and so does the lag that it arrived with
            arrival_lag=np.zeros(len(each), np.int64),
        )
        now, then = (self.target.weights(runs, Moment(newest)) for newest in (self.newest_version, earlier))
        moved = (now != then).reshape(-1, len(outcomes)).any(1)
        return [self._kinds[one].all for one in kind[moved].tolist()]

    def _note_kinds(self, runs: np.ndarray) -> None:
        index, version = self.index, self.index.run_version[runs].astype(np.int64)
        kinds = version << 9 | index.run_actor[runs].astype(np.int64) << 1
        kinds |= index.demonstration[index.run_segment[runs]]
        order = np.argsort(kinds, kind="stable")
        different, first = np.unique(kinds[order], return_index=True)
        bounds = np.append(first, len(runs)).tolist()
        for kind, begin, end in zip(different.tolist(), bounds[:-1], bounds[1:], strict=True):
            self._kinds.setdefault(kind, Growing(np.int64)).append(runs[order[begin:end]])

    def _measure(self, segments: np.ndarray) -> None:
        if len(segments):
            cost = np.asarray(self._cost_of(segments), np.int64)
            if cost.shape != segments.shape or (cost < 0).any():
                raise ConfigError("sampler: `cost` must answer with one number of bytes, 0 or more, for each segment.")
            self._cost.append(cost)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """uint64[k] of int64[k]: other sets of numbers come to other sums (SplitMix64's, Steele et al. 2014)."""
    bits = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    return bits ^ bits >> np.uint64(31)
