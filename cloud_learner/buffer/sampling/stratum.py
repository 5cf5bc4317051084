"""One stratum of the data in its part of the memory: held whole where it fits, else swept; `sampler` says how."""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.memory import LoadedSegments
from cloud_learner.buffer.sampling.sweep import Sweep, SweepState
from cloud_learner.buffer.sampling.tree import Tree

_BESIDE = 4
"""such a part of a stratum's bytes is for what is held beside its sweep, before it joins the epoch"""
_BELOW_ALL = 1 - 1e-12
"""of a sum: rounding must not lead to what lies before the first that counts"""


class StratumState(msgspec.Struct, frozen=True):
    """What a stratum must know to go on."""

    allotted: int
    epochs: int
    joined: int
    """ledger row: segments up to it are in the epoch"""
    sweep: SweepState | None


class Stratum:
    """Draws from one task's online or offline steps."""

    def __init__(self, number: int, known: EligibleSteps, memory: LoadedSegments, seed: int) -> None:
        self.number, self._known, self._memory, self._seed = number, known, memory, seed
        self.name = f"{known.index.tasks[number // 2]} ({'online' if number % 2 else 'offline'})"
        self.epochs = 0
        """begun so far"""
        self.sweep: Sweep | None = None
        self.recent = 0
        """segments from this number on count as recent, and are held and drawn from independently"""
        self._joined_row = 0
        """segments up to this ledger row are in the sweep's epoch"""
        self._allotted = 0
        self._runs = Growing(np.int64)
        self._mass = Tree()
        """of each of these runs: weight times steps"""
        self._cost = Tree(np.maximum)
        """at the first run of each segment that may be drawn from, its bytes"""
        self.bytes = self.steps = 0
        """bytes of all eligible segments; eligible steps"""
        self._changed: list[np.ndarray] = []
        """int64 segments whose weights changed since `refresh`"""
        self._appeared: list[np.ndarray] = []
        """those of them that could not be drawn from before"""

    @property
    def joined(self) -> int:
        """Segments from this number on are in no epoch, but held and drawn from independently."""
        return self._known.index.prefix(self._joined_row)[0]

    @property
    def mass(self) -> float:
        """Sum of the weights of its steps."""
        return self._mass.total

    @property
    def largest(self) -> int:
        """Bytes of the largest eligible segment."""
        return int(self._cost.total)

    def masses(self) -> tuple[float, float, float]:
        """Sums of the weights of the steps that are drawn by the sweep, from `joined` on, and from `recent` on."""
        beside, recent = self._first_run(self.joined), self._first_run(self.recent)
        return self._mass.before(beside) if self.sweep else 0.0, self._mass.since(beside), self._mass.since(recent)

    def prefer(self, recent: int) -> int:
        """Segments from this number on count as recent now; bytes of them."""
        self._memory.let_leave(self._segments(self._first_run(self.recent), self._first_run(recent)))
        self.recent = recent
        return self._bytes_since(recent)

    def newest(self, steps: int) -> np.ndarray:
        """int64 the last eligible runs, growing, that have at least so many steps, or all."""
        looked = 64
        while True:
            runs = self._runs.all[-looked:]
            runs = runs[self._known.weight[runs] > 0]
            if looked >= len(self._runs.all) or self._known.index.run_count[runs].sum() >= steps:
                return runs
            looked *= 4

    def look(self, came: np.ndarray, changed: np.ndarray) -> None:
        """int64 runs that came, and int64 growing runs that have another weight than before."""
        self._runs.append(came)
        self._mass.grow(len(self._runs.all))
        self._cost.grow(len(self._runs.all))
        known, index = self._known, self._known.index
        segments = _different(index.run_segment[changed])
        runs = index.runs_of(segments)
        of = segments.searchsorted(index.run_segment[runs])
        weight, count = known.weight[runs], index.run_count[runs].astype(np.int64)
        at = self._runs.all.searchsorted(runs)
        before = self._mass.values[at] > 0
        was, is_now = (np.bincount(of, drawn, len(segments)) > 0 for drawn in (before, weight > 0))
        self._mass.put(at, weight * count)
        first = np.flatnonzero(np.diff(of, prepend=-1))
        self._cost.put(at[first], known.cost[segments] * is_now)
        self.steps += int(count[weight > 0].sum()) - int(count[before].sum())
        self.bytes += int(known.cost[segments[is_now]].sum()) - int(known.cost[segments[was]].sum())
        self._changed.append(segments)
        self._appeared.append(segments[is_now & ~was])

    # --- between batches ------------------------------------------------------------------------------------------

    def refresh(self, allotted: int, echo: float) -> None:
        """After `look`: `allotted` bytes may be used."""
        changed, appeared = self._pending()
        self._allotted = allotted
        if allotted >= self.bytes:
            self._stop_sweep()
            self._joined_row = 0
        elif not self.sweep:
            self._memory.let_leave(self._segments())
            self.sweep = self._new_sweep()
            self.start_batch(echo)
            self._begin()
        else:
            self.start_batch(echo)
            self.sweep.look_again(changed[changed < self.joined])
            beside = self._bytes_since(self.joined)
            self.sweep.room = allotted - beside
            self._enter(appeared[appeared < self.joined])
            if beside > min(allotted // _BESIDE, allotted - self.largest):
                self._join()
            self.sweep.shrink()

    def clear(self) -> None:
        """Hold nothing; nothing is drawn from here."""
        self._pending()
        self._stop_sweep()
        if self._allotted:
            self._memory.let_leave(self._segments())
        self._allotted, self._joined_row = 0, self._known.watermark

    def _pending(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 growing segments that changed and that appeared since."""
        changed, appeared = (
            np.unique(np.concatenate([self._runs.all[:0], *some])) for some in (self._changed, self._appeared)
        )
        self._changed, self._appeared = [], []
        self._memory.let_leave(changed)
        return changed, appeared

    def _new_sweep(self) -> Sweep:
        return Sweep(self.number, self._known, self._memory, self._seed, self._renew)

    def _stop_sweep(self) -> None:
        if self.sweep:
            self.sweep.end()
            self.sweep = None

    def _renew(self) -> None:
        """An epoch is over: what waits of it gets its part of what is late, and another begins."""
        self._join()
        self._begin()

    def _begin(self) -> None:
        assert self.sweep
        self.sweep.begin(self.epochs)
        self.epochs += 1
        self._joined_row = self._known.watermark
        self.sweep.room = self._allotted
        self._enter(self._segments())

    def _join(self) -> None:
        """What is beside the epoch takes part in what is left of it."""
        assert self.sweep
        beside = self._segments(self._first_run(self.joined))
        self._joined_row = self._known.watermark
        self.sweep.room = self._allotted
        self._enter(beside)
        self.sweep.note_left(beside)

    def _enter(self, segments: np.ndarray) -> None:
        """Growing int64 eligible segments take part in the epoch."""
        assert self.sweep
        if not len(segments):
            return
        known, index = self._known, self._known.index
        runs = index.runs_of(segments)
        weight, count = known.weight[runs], index.run_count[runs]
        of = segments.searchsorted(index.run_segment[runs])
        mass, steps = (np.bincount(of, each, len(segments)) for each in (weight * count, count * (weight > 0)))
        self.sweep.join(segments, mass, steps, self._mass.before(self._first_run(self.joined)), self.bytes)

    def _first_run(self, segment: int) -> int:
        """At which of `_runs` the segments from this number on begin."""
        return int(self._runs.all.searchsorted(self._known.index.run_offsets[segment]))

    def _bytes_since(self, segment: int) -> int:
        return int(self._cost.values[self._first_run(segment) : len(self._runs.all)].sum())

    def _segments(self, first: int = 0, until: int | None = None) -> np.ndarray:
        """int64 growing, those of `_runs` that are eligible."""
        runs = self._runs.all[first:until]
        return _different(self._known.index.run_segment[runs[self._known.weight[runs] > 0]])

    # --- one batch ------------------------------------------------------------------------------------------------

    def start_batch(self, echo: float) -> None:
        """Once before the draws of a batch, also when it draws nothing here."""
        if self.sweep:
            self.sweep.leaving_bytes = 0
            self.sweep.echo, self.sweep.scale = echo, echo * self.steps / (self._mass.total or 1.0)

    def draw_since(self, segment: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of independent draws, by weight, from the segments from this number on."""
        known, index = self._known, self._known.index
        at, into = self._mass.find(rng.random(count) * (self._mass.since(self._first_run(segment)) * _BELOW_ALL))
        runs = self._runs.all[at]
        steps = index.run_count[runs].astype(np.int64)
        back = (into / known.weight[runs]).astype(np.int64)
        return runs, index.run_first[runs] + steps - 1 - np.minimum(back, steps - 1)

    # --- going on later -------------------------------------------------------------------------------------------

    def state(self) -> StratumState:
        """JSON-able through msgspec."""
        return StratumState(self._allotted, self.epochs, self._joined_row, self.sweep.state() if self.sweep else None)

    def restore(self, state: StratumState) -> None:
        """On a fresh stratum that looked at the moment of `state`: go on from it."""
        self._pending()
        self._allotted, self.epochs, self._joined_row = state.allotted, state.epochs, state.joined
        if state.sweep:
            self.sweep = self._new_sweep()
            self.sweep.room = self._allotted - self._bytes_since(self.joined)
            self.sweep.restore(state.sweep, self._segments(until=self._first_run(self.joined)))


def _different(growing: np.ndarray) -> np.ndarray:
    """Each once."""
    return growing[np.flatnonzero(np.diff(growing, prepend=-1))]
