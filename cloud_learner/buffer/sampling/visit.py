"""A segment's visit in an epoch of `sweep`: how often each of its steps is drawn, and in which order."""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps, generator

_DRAWS = 1
"""what random numbers are for; see `sweep`"""


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
