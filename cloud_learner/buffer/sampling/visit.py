"""A segment that is drawn from without replacement while it is held, and the random numbers of all draws."""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps

_DRAWS = 1
"""what random numbers are for; see `sweep`"""


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on nothing but `key`, integers of 0 or more."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class VisitState(msgspec.Struct):
    """A segment that is held; with the same data it makes the same draws."""

    epoch: int
    row: int
    """of the ledger"""
    watermark: int
    newest_version: int
    scale: float
    """draws per unit of weight"""
    part: int
    parts: int
    """this visit has that one, counted from 0, of so many equal parts of the segment's draws"""
    out: int = 0
    """of these, how many came out or were passed over"""
    weight: float = 1.0
    """the least that the segment was due since, of what it was due then: that part of its draws stays"""
    label: float | None = None
    """of the segment when the visit began, None for nothing"""
    bound: float = 1.0
    """`EligibleSteps.bound` of it then"""


class SegmentVisit:
    """A segment that is held, with the draws that are left.

    Each step gets a whole number of draws by systematic sampling (Madow 1949), less than one off what it is due.
    """

    def __init__(
        self, state: VisitState, segment: int, known: EligibleSteps, key: tuple[int, ...], begun: float = 0.0
    ) -> None:
        """A part `begun`, 0 to 1, of its draws is left out, as if they had come out before."""
        self.state, self.segment = state, segment
        index = known.index
        runs = index.runs_of(np.array([segment]))
        label = np.full(len(runs), np.nan if state.label is None else state.label, np.float32)
        each = known.weights_at(runs, state.watermark, state.newest_version, label) * (state.scale * state.bound)
        runs, each = runs[each > 0], each[each > 0]
        count = index.run_count[runs].astype(np.int64)
        ends = np.cumsum(each * count)
        rng = generator(*key, state.epoch, _DRAWS, state.row)
        # draw k lies where k + 1 - shift draws are expected
        shift = rng.random()
        until = np.floor(ends + shift).astype(np.int64)
        planned = int(until[-1]) if len(until) else 0
        at = np.repeat(np.arange(len(runs)), np.diff(until, prepend=0))
        into = np.arange(planned) + 1 - shift - (ends - each * count)[at]
        offset = index.run_first[runs][at] + np.clip(np.ceil(into / each[at]).astype(np.int64) - 1, 0, count[at] - 1)
        first, last = (planned * part // state.parts for part in (state.part, state.part + 1))
        order = rng.permutation(planned)[first:last]
        self._runs, self._offsets, self._chance = runs[at[order]], offset[order], rng.random(planned)[order]
        self._planned, self._due = planned / state.parts, float(ends[-1]) if len(ends) else 0.0
        state.out = max(state.out, int(begun * len(order)))
        self._choose(known)

    @property
    def left(self) -> int:
        """Draws to come."""
        return len(self._to_come)

    @property
    def rate(self) -> float:
        """How often it is chosen, in proportion to others."""
        return self._planned * self.state.weight

    def look_again(self, known: EligibleSteps, scale: float) -> None:
        """Weights changed: pass over draws of steps that may not be drawn any more, or are due less."""
        runs = known.index.runs_of(np.array([self.segment]))
        due = float(known.weight[runs] @ known.index.run_count[runs]) * scale
        self.state.weight = min(self.state.weight, due / max(self._due, 1e-300))
        self._choose(known)

    def _choose(self, known: EligibleSteps) -> None:
        some = slice(self.state.out, None)
        stays = (known.weight[self._runs[some]] > 0) & (self._chance[some] < self.state.weight)
        self._to_come = self.state.out + np.flatnonzero(stays)

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) of the next draws, fewer if there are no more."""
        some, self._to_come = self._to_come[:count], self._to_come[count:]
        if len(some):
            self.state.out = int(some[-1]) + 1
        return self._runs[some], self._offsets[some]
