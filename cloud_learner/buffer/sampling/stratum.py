"""One stratum of the data in its part of the memory: held whole where it fits, else swept; `sampler` says how."""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps, HeldSegments, WeightedRuns
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.sweep import Sweep, SweepState

log = logging.getLogger(__name__)
_BESIDE = 4
"""such a part of a stratum's bytes is for what is held beside its sweep, before it joins the epoch"""


class StratumState(msgspec.Struct, frozen=True):
    """What a stratum must know to go on."""

    allotted: int
    epochs: int
    sweep: SweepState | None


class Stratum:
    """Draws from one task's online or offline steps."""

    def __init__(self, number: int, known: EligibleSteps, held: HeldSegments, seed: int) -> None:
        self.number, self._known, self._held, self._seed = number, known, held, seed
        self.name = f"{known.index.tasks[number // 2]} ({'online' if number % 2 else 'offline'})"
        self.epochs = 0
        """begun so far"""
        self.sweep: Sweep | None = None
        self.whole = WeightedRuns(known.index)
        """all that is eligible and not in the sweep's epoch: held, and drawn from independently"""
        self._whole_segments, self._whole_bytes = Growing(np.int64), 0
        self._allotted, self._echo = 0, 1.0
        self._runs = Growing(np.int64)
        self._split = self._told = False
        """whether this rank has its own part, and whether the log said that it has not"""
        self.eligible = WeightedRuns(known.index)
        self.bytes = self.largest = self.steps = 0
        """bytes of all eligible segments, and of the largest one; eligible steps"""
        self._moved, self._first = True, 0
        """whether weights changed or segments left since `refresh`, and the first run that is new or did so"""

    def look(self, runs: np.ndarray, first: int, anew: bool) -> None:
        """int64 `runs` came; weights may have changed from run `first` on, or with `anew` segments may have left."""
        known = self._known
        if self._split != (split := known.split(self.number)):
            self._split, first, anew = split, 0, True
            if self.sweep:
                self._stop_sweep()
        self._runs.append(runs)
        now = self._runs.all[self._runs.all.searchsorted(first) :]
        now = self._ours(now[known.weight[now] > 0])
        before, weight = self.eligible.cut(first)
        same = now[: len(before)]
        if anew or not (np.array_equal(same, before) and np.array_equal(known.weight[same], weight)):
            self._moved = True
        elif len(runs):
            first = int(runs[0])
        else:
            first = len(known.weight)
        self._first = min(self._first, first)
        gone, cost = (known.cost[known.segments_of(some)] for some in (before, now))
        self.bytes += int(cost.sum()) - int(gone.sum())
        self.steps += int(known.index.run_count[now].sum()) - int(known.index.run_count[before].sum())
        self.eligible.append(now, known.weight[now])
        largest = int(cost.max(initial=0))
        if largest < self.largest == gone.max(initial=0):
            largest = int(known.cost[known.segments_of(self.eligible.runs)].max(initial=0))
            self.largest = 0
        self.largest = max(self.largest, largest)
        if self.steps and known.index.world > 1 and not (split or self._told):
            self._told = True
            log.info("%s: all ranks draw from all of it until each has something to draw of its own.", self.name)

    def _ours(self, runs: np.ndarray) -> np.ndarray:
        """Those of int64[k] `runs` that this rank draws from."""
        index = self._known.index
        return runs[index.ranks(index.run_segment[runs]) == index.rank] if self._split else runs

    @property
    def mass(self) -> float:
        """Sum of the weights of this rank's steps; a rank's part of it where all ranks draw from all."""
        return self.eligible.mass / (1 if self._split else self._known.index.world)

    def masses(self) -> tuple[float, float]:
        """Sums of the weights of the steps drawn by `draw`, and of those in `whole`."""
        return max(0.0, self.eligible.mass - self.whole.mass) if self.sweep else 0.0, self.whole.mass

    # --- between batches ------------------------------------------------------------------------------------------

    def refresh(self, allotted: int, echo: float, anew: bool) -> None:
        """After `look`: `allotted` bytes may be used. `anew`: segments may have left."""
        self._allotted, self._echo = allotted, echo
        fits = allotted >= self.bytes
        if self.sweep:
            self.sweep.between_batches()
            self._set_scale(self.sweep)
        if self.sweep and fits:
            self._stop_sweep()
            self._hold_whole()
        elif not self.sweep and not fits:
            self.sweep = Sweep(self.number, self._known, self._held, self._seed, self._renew)
            self.sweep.epoch = self.epochs - 1
            self._begin()
        else:
            if self.sweep and self._moved:
                self.sweep.look_again()
            self._hold_whole(self._first)
            if self.sweep and anew:
                self._renew()
        if self.sweep:
            if self._whole_bytes > min(allotted // _BESIDE, allotted - self.largest):
                self._join()
            self.sweep.shrink()
        self._moved, self._first = False, len(self._known.weight)

    def clear(self) -> None:
        """Hold nothing; nothing is drawn from here."""
        if self.sweep:
            self._stop_sweep()
        self._held.release(self._whole_segments.all)
        self.whole, self._whole_segments, self._whole_bytes = WeightedRuns(self._known.index), Growing(np.int64), 0
        self._moved, self._first = True, 0

    def _stop_sweep(self) -> None:
        assert self.sweep
        self.sweep.end()
        self.sweep = None

    def _renew(self) -> None:
        """An epoch is over: what waits of it gets its part of what is late, and another begins."""
        self._join()
        self._begin()

    def _begin(self) -> None:
        assert self.sweep
        self.sweep.room = self._allotted
        self._set_scale(self.sweep)
        self.sweep.begin(self._ours(self._runs.all), self.bytes)
        self.epochs += 1
        self.sweep.note_left(self._hold_whole())

    def _join(self) -> None:
        assert self.sweep
        first = int(self.whole.runs[0]) if len(self.whole.runs) else len(self._known.weight)
        segments, out = self.sweep.join(self.whole.runs)
        left = self._hold_whole(first)
        self.sweep.hold(segments, out)
        self.sweep.note_left(left)

    def _hold_whole(self, first: int = 0) -> np.ndarray:
        """Hold what is eligible and not in the epoch; int64 the segments let go of.

        `first`: only runs from this one on are other ones than before.
        """
        known = self._known
        runs = self.eligible.runs[self.eligible.runs.searchsorted(first) :]
        runs = runs[~known.in_epoch[known.index.run_segment[runs]]]
        segment = int(known.index.run_segment[first]) if first < len(known.weight) else known.segments
        before = self._whole_segments.cut(int(self._whole_segments.all.searchsorted(segment))).copy()
        segments = known.segments_of(runs)
        leaving = np.setdiff1d(before, segments, assume_unique=True)
        self._held.release(leaving)
        self._held.hold(np.setdiff1d(segments, before, assume_unique=True))
        self._whole_segments.append(segments)
        self._whole_bytes += int(known.cost[segments].sum()) - int(known.cost[before].sum())
        self.whole.cut(first)
        self.whole.append(runs, known.weight[runs])
        if self.sweep:
            self.sweep.room = self._allotted - self._whole_bytes
        return leaving

    def _set_scale(self, sweep: Sweep) -> None:
        """For `echo` draws of a step on average."""
        sweep.usual = self.eligible.mass / self.steps if self.steps else 1.0
        sweep.scale = self._echo / sweep.usual

    # --- one batch ------------------------------------------------------------------------------------------------

    def start_batch(self, echo: float) -> None:
        """Once before the draws of a batch, also when it draws nothing here."""
        self._echo = echo
        if self.sweep:
            self.sweep.left_bytes = 0
            self._set_scale(self.sweep)

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of up to `count` draws of what does not fit."""
        assert self.sweep
        return self.sweep.draw(count, rng)

    # --- going on later -------------------------------------------------------------------------------------------

    def state(self) -> StratumState:
        """JSON-able through msgspec."""
        return StratumState(self._allotted, self.epochs, self.sweep.state() if self.sweep else None)

    def restore(self, state: StratumState, echo: float) -> None:
        """On a fresh stratum that looked at the moment of `state`: go on from it."""
        self._allotted, self.epochs, self._echo = state.allotted, state.epochs, echo
        if state.sweep:
            self.sweep = Sweep(self.number, self._known, self._held, self._seed, self._renew)
            self.sweep.restore(state.sweep, self._ours(self._runs.all))
        if self._allotted:
            self._hold_whole()
        self._moved, self._first = False, len(self._known.weight)
