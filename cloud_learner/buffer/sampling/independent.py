"""Segments that are drawn from independently, by weight, and what of them lies in memory.

Those are all of a resident stratum, or what came late to a sweep. They enter in the order of the ledger, some with each
batch, for they may have to be read; only what has entered is drawn.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.cache_ops import CacheOps
from cloud_learner.buffer.sampling.epoch import Block, cut
from cloud_learner.buffer.sampling.snapshot import Choice, SamplingSnapshot

LARGEST_BLOCK = 64 * 1024 * 1024
"""bytes of a block, unless a segment is larger"""
_ENTER = 4
"""batches' worth of steps that enter with one batch"""
_SINGLES = 64
"""segments that came one by one, beyond the number of all others, before it is better to cut blocks anew"""


class Base(msgspec.Struct, frozen=True):
    """What the blocks of a resident stratum were cut from: what could be drawn at that moment, of older rows."""

    watermark: int
    newest_version: int
    below: int
    """ledger row"""


class IndependentSampler:
    """What is drawn independently of one stratum. `moves` collects what enters and leaves memory."""

    def __init__(self, scope: SamplingSnapshot, number: int, moves: CacheOps) -> None:
        self._scope, self._number, self._moves = scope, number, moves
        self.base: Base | None = None
        """None: every segment is a block of its own"""
        self.entered = 0
        """segments below this number have entered memory"""
        self.in_batch = False
        """what leaves now was perhaps drawn for this batch"""
        self.bytes = 0
        """of all that are in memory or are to enter"""
        self._choice = Choice(scope, np.zeros(0, np.int64))
        self._among = 0
        self._segments: np.ndarray = np.zeros(0, np.int64)
        self._singles: np.ndarray = np.zeros(0, np.int64)
        self._blocks: list[Block] = []
        self._block_of: np.ndarray = np.zeros(0, np.int64)
        self._block_cost: np.ndarray = np.zeros(0, np.int64)
        self._held: np.ndarray = np.zeros(0, bool)

    def start_batch(self) -> None:
        """Some of what waits enters memory."""
        self.in_batch = True
        if len(self._segments) and self.entered <= self._segments[-1]:
            waiting = self._segments[np.searchsorted(self._segments, self.entered) :]
            steps = np.cumsum(self._scope.universe.steps[waiting])
            count = int(np.searchsorted(steps, _ENTER * self._scope.batch)) + 1
            self.entered = int(waiting[count]) if count < len(waiting) else self._scope.segments
            self._moves.admit += _single(waiting[:count])
            self._singles = np.append(self._singles, waiting[:count])
            self._count_runs()

    def set(self, runs: np.ndarray) -> None:
        """From now on `runs` (growing) are drawn from; the others leave."""
        self._choice = Choice(self._scope, runs)
        self._segments = self._scope.segments_of(runs)
        self.bytes = self.bytes_of(self._segments)
        self._hold()

    def add(self, runs: np.ndarray) -> None:
        """Runs of segments that came after all others are drawn from too."""
        if len(runs):
            segments = self._scope.segments_of(runs)
            self._choice.append(runs)
            self._segments = np.append(self._segments, segments)
            self.bytes += int(self._scope.cost[segments].sum())
            self._count_runs()

    def clear(self) -> None:
        """Hold nothing."""
        self._leave(self.blocks)
        self._forget_blocks()
        self.base = None
        self.set(np.zeros(0, np.int64))

    @property
    def blocks(self) -> list[Block]:
        """All that are in memory."""
        return [self._blocks[block] for block in np.flatnonzero(self._held).tolist()] + _single(self._singles)

    @property
    def mass(self) -> float:
        """Sum of the weights of all steps that have entered."""
        return self._choice.mass(self._among)

    @property
    def scattered(self) -> bool:
        """Whether all have entered, and most of them as blocks of their own."""
        return self.entered == self._scope.segments and len(self._singles) > len(self._block_of) + _SINGLES

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of what has entered. Its mass must be above 0."""
        return self._choice.draw(count, rng, self._among)

    def bytes_of(self, segments: np.ndarray) -> int:
        """What `segments` (each once) take, with what else lies in their blocks."""
        block, wanted = self._find_blocks(segments)
        return int(self._scope.cost[segments[block < 0]].sum() + self._block_cost[wanted].sum())

    def settle(self, base: Base) -> None:
        """Cut everything into the blocks of `base`, whatever it lies in now; nothing is held until `set` is called."""
        self.base = base
        scope = self._scope
        population = scope.population(self._number, base.watermark, base.newest_version, None)
        below = population.segment < np.searchsorted(scope.universe.row, base.below)
        segment, cost = population.segment[below], population.cost[below]
        bounds = cut(segment, population.count[below], cost, LARGEST_BLOCK)
        number = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        self._forget_blocks()
        self._block_of = np.full(int(segment.max(initial=-1)) + 1, -1)
        self._block_of[segment] = number
        self._blocks = [
            tuple(dict.fromkeys(segment[begin:end].tolist()))
            for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        first = np.flatnonzero(np.diff(segment, prepend=-1))
        self._block_cost = np.zeros(len(self._blocks), np.int64)
        np.add.at(self._block_cost, number[first], cost[first])
        self._held = np.zeros(len(self._blocks), bool)

    def _forget_blocks(self) -> None:
        self._blocks = []
        self._block_of = self._block_cost = self._singles = np.zeros(0, np.int64)
        self._held = np.zeros(0, bool)

    def _find_blocks(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64[k] block each segment was cut into, -1 for those that came later; bool[blocks] which they are)."""
        block = np.full(len(segments), -1)
        known = int(np.searchsorted(segments, len(self._block_of)))
        block[:known] = self._block_of[segments[:known]]
        wanted = np.zeros(len(self._blocks), bool)
        wanted[block[:known][block[:known] >= 0]] = True
        return block, wanted

    def _hold(self) -> None:
        """Have in memory what has entered, and nothing else."""
        entered = self._segments[: np.searchsorted(self._segments, self.entered)]
        block, wanted = self._find_blocks(entered)
        singles = entered[block < 0]
        self._leave(
            [self._blocks[number] for number in np.flatnonzero(self._held & ~wanted).tolist()]
            + _single(np.setdiff1d(self._singles, singles, assume_unique=True))
        )
        self._moves.admit += [self._blocks[number] for number in np.flatnonzero(wanted & ~self._held).tolist()]
        self._moves.admit += _single(np.setdiff1d(singles, self._singles, assume_unique=True))
        self._held, self._singles = wanted, singles
        self._count_runs()

    def _count_runs(self) -> None:
        """How many of the runs lie in segments that have entered."""
        first = self._scope.universe.run_offsets[self.entered]
        self._among = int(np.searchsorted(self._choice.runs, first))

    def _leave(self, blocks: list[Block]) -> None:
        if self.in_batch:
            self._moves.release += blocks
        else:
            self._moves.drop += blocks


def _single(segments: np.ndarray) -> list[Block]:
    return [(segment,) for segment in segments.tolist()]
