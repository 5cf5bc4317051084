"""What has to happen in memory for each batch, decided when it is planned and carried out in the same order later.

All that a batch depends on is settled here, in the thread that plans: which segments enter and leave, how far their
neighbours were known, and what the index says of each draw. So a batch is the same however far ahead it is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from cloud_learner.buffer.loading.decode import CARRY_BACK, LoadJob, SegmentRequest
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.sampling.sampler import BatchPlan
from cloud_learner.buffer.sampling.segment_index import Growing, SegmentIndex

_TOGETHER = 8
"""segments of one job"""
DRAW = np.dtype(
    [
        ("segment", "<i8"),
        ("offset", "<i8"),
        ("first_tick", "<i8"),
        ("task", "<i8"),
        ("online", "|b1"),
        ("outcome", "|i1"),
        ("episode", "<i8"),
        ("return_after", "<f8"),
    ]
)
"""a step to begin at: its segment's ledger row and the step within it; the segment's first tick; and of its episode
index of the task, outcome, ledger number, and the rewards of all later segments, nan while it is unfinished"""


class LoadPlan(msgspec.Struct, frozen=True, eq=False):
    """One batch, in ledger rows: drop, then load, then gather."""

    number: int
    drop: tuple[int, ...]
    jobs: tuple[LoadJob, ...]
    draws: np.ndarray
    """DRAW[b]"""
    watermark: int
    """newest ledger row that was known"""
    newest_version: int


class LoadPlanner:
    """Knows which segments are in memory after the last plan, and with which neighbours each was loaded."""

    def __init__(self, index: SegmentIndex, layout: Layout) -> None:
        self._index, self._layout = index, layout
        self._neighbours: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._stale: set[int] = set()
        """segments whose neighbours may have changed"""
        self._jobs = 0
        self._startable = Growing(np.int64)
        """steps at which a window may begin, in all runs before each"""
        self._startable.append(np.zeros(1, np.int64))

    @property
    def loaded(self) -> np.ndarray:
        """int64 segment numbers"""
        return np.fromiter(self._neighbours, np.int64)

    def cost(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] bytes of memory that each of the int64[k] segments takes at most."""
        frames = self._layout.frames_bytes(self._index.frames[segments], self.startable(segments))
        return self._layout.step_bytes(self._index.steps[segments]) + frames

    def startable(self, segments: np.ndarray) -> np.ndarray:
        """int64[k]: at how many steps of each of the int64[k] segments a window may begin, if all can be read."""
        index, known = self._index, len(self._startable.all) - 1
        if known != len(index.run_actor):
            source = index.demonstration[index.run_segment[known:]].astype(np.intp)
            starts = np.array(self._layout.starts)[source, index.run_actor[known:]]
            steps = np.where(starts, index.run_count[known:], 0)
            self._startable.append(self._startable.all[-1] + np.cumsum(steps, dtype=np.int64))
        until = self._startable.all
        return until[index.run_offsets[segments + 1]] - until[index.run_offsets[segments]]

    def plan(self, batch: BatchPlan, watermark: int | None = None, draws: np.ndarray | None = None) -> LoadPlan:
        """What follows from the batch's plan.

        `watermark`: the newest ledger row that was known when it was made, when that is not now; then `draws` as well.
        """
        known = self._index.watermark if watermark is None else watermark
        for segment in batch.drop.tolist():
            self._neighbours.pop(segment, None)
        jobs = [self._load(batch.load[n : n + _TOGETHER], known) for n in range(0, len(batch.load), _TOGETHER)]
        jobs += self._catch_up(known)
        if draws is None:
            draws = self._draws(batch.segments, batch.offsets)
        drop = tuple(self._index.row[batch.drop].tolist())
        return LoadPlan(batch.number, drop, tuple(jobs), draws, known, batch.newest_version)

    def note_added(self, added: np.ndarray) -> None:
        """Segments joined the index: their neighbours in memory may reach further from the next plan on."""
        for segment in added.tolist() if self._neighbours else ():
            self._walk(segment, self._index.previous, self._layout.lookahead, self._index.steps)
            self._walk(segment, self._index.following, CARRY_BACK, None)

    def note_all(self) -> None:
        """Any neighbour may have changed."""
        self._stale.update(self._neighbours)

    def note_readable(self, rows: Iterable[int]) -> None:
        """These ledger rows could not be read before and can be now: load them, and what they touch, again."""
        numbers = self._index.find(np.array(sorted(rows), np.int64))
        for segment in numbers[numbers >= 0].tolist():
            if segment in self._neighbours:
                self._neighbours[segment] = ((-1,), ())
                self._stale.add(segment)
            self.note_added(np.array([segment]))

    def _load(self, segments: np.ndarray, known: int, follow: tuple[SegmentRequest, ...] = ()) -> LoadJob:
        around = self._around(segments, known)
        self._neighbours.update(zip(segments.tolist(), around, strict=True))
        rows = self._index.row[segments].tolist()
        wanted = tuple(SegmentRequest(row, *sides) for row, sides in zip(rows, around, strict=True))
        self._jobs += 1
        return LoadJob(self._jobs - 1, wanted, follow)

    def _catch_up(self, known: int) -> list[LoadJob]:
        """Load again what now has other neighbours: wholly if a frame may have come, else only what follows."""
        stale = np.array(sorted(self._stale & self._neighbours.keys()), np.int64)
        self._stale.clear()
        again, follow = [], []
        for segment, (before, after) in zip(stale.tolist(), self._around(stale, known), strict=True):
            if self._neighbours[segment][0] != before:
                again.append(segment)
            elif self._neighbours[segment][1] != after:
                follow.append(SegmentRequest(int(self._index.row[segment]), (), after))
            self._neighbours[segment] = before, after
        return [self._load(np.array(again, np.int64), known, tuple(follow))] if again or follow else []

    def _around(self, segments: np.ndarray, known: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return self._index.neighbours(segments, CARRY_BACK, self._layout.lookahead, known) if len(segments) else []

    def _walk(self, segment: int, neighbour: np.ndarray, far: int, steps: np.ndarray | None) -> None:
        """Mark the segments in memory that lie in one direction, up to `far` steps away, or that many segments."""
        at, passed = int(neighbour[segment]), 0
        while at >= 0 and passed < far:
            if at in self._neighbours:
                self._stale.add(at)
            passed += 1 if steps is None else int(steps[at])
            at = int(neighbour[at])

    def _draws(self, segments: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        index, draws = self._index, np.empty(len(segments), DRAW)
        draws["segment"], draws["offset"] = index.row[segments], offsets
        draws["first_tick"], draws["task"] = index.first_tick[segments], index.task[segments]
        draws["online"], draws["outcome"] = index.online[segments], index.outcome(segments)
        draws["episode"] = index.episode_numbers[index.episode[segments]]
        draws["return_after"] = index.return_after(segments)
        return draws
