"""What has to happen in memory for each plan, decided when the plan is made and carried out in the same order later.

All that a batch depends on is settled here, in the thread that plans: which segments enter and leave, how far their
neighbours were known, and what the index says of each draw. So a batch is the same however far ahead it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from cloud_learner.buffer.loading.decoding.block import CARRY_BACK, LoadJob, SegmentRequest
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.windows import Draws
from cloud_learner.buffer.sampling.plan import SamplingPlan
from cloud_learner.buffer.sampling.segment_index import SegmentIndex


class Order(msgspec.Struct, frozen=True, eq=False):
    """One plan, in ledger rows: drop, then load, then gather, then release."""

    number: int
    drop: tuple[int, ...]
    jobs: tuple[LoadJob, ...]
    draws: Draws
    release: tuple[int, ...]
    watermark: int
    """newest ledger row that was known"""


class LoadOrders:
    """Counts who holds a segment and remembers which neighbours it was loaded with."""

    def __init__(self, universe: SegmentIndex, layout: Layout, bytes_of: Callable[[np.ndarray], np.ndarray]) -> None:
        """`bytes_of`: memory of the steps of segments, from their int[k] numbers of steps."""
        self._universe, self._layout, self._bytes_of = universe, layout, bytes_of
        self._holders: dict[int, int] = {}
        self._chains: dict[int, _Chain] = {}
        self._stale: set[int] = set()
        """segments whose neighbours may have changed"""
        self._jobs = 0
        self._watermark: int | None = None
        self._startable: np.ndarray = np.zeros(1, np.int64)
        """int64[runs + 1]: steps at which a window may begin, in all runs before each"""

    def cost(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] bytes of memory that each of the int64[k] segments takes at most."""
        frames = self._frames(segments) @ np.array(
            [self._layout.frame_bytes(s) for s in range(len(self._layout.shapes))]
        )
        return self._bytes_of(self._universe.steps[segments]) + frames.astype(np.int64)

    def startable(self, segments: np.ndarray) -> np.ndarray:
        """int64[k]: at how many steps of each of the int64[k] segments a window may begin, if all can be read."""
        universe, known = self._universe, len(self._startable) - 1
        if known != len(universe.run_actor):
            starts, fresh = np.array(self._layout.starts), slice(known, None)
            source = universe.demonstration[universe.run_segment[fresh]].astype(np.intp)
            steps = np.where(starts[source, universe.run_actor[fresh]], universe.run_count[fresh], 0)
            total = self._startable[-1] + np.cumsum(steps, dtype=np.int64)
            self._startable = np.concatenate([self._startable, total])
        offsets = universe.run_offsets
        return self._startable[offsets[segments + 1]] - self._startable[offsets[segments]]

    def order(self, plan: SamplingPlan, watermark: int | None = None) -> Order:
        """Carry the plan's blocks into the count of holders; what follows from it.

        `watermark`: the newest ledger row that was known when the plan was made, when that is not now.
        """
        self._watermark = watermark
        dropped = self._let_go(plan.drop)
        jobs = []
        for block in plan.admit:
            fresh = []
            for segment in block:
                self._holders[segment] = self._holders.get(segment, 0) + 1
                if self._holders[segment] == 1 and segment not in dropped:
                    fresh.append(segment)
            if fresh:
                jobs.append(self._load(np.array(fresh, np.int64)))
        jobs += self._catch_up()
        gone = [segment for segment in dropped if segment not in self._holders]
        draws = self._draws(plan.segments, plan.offsets)
        released = self._let_go(plan.release)
        for segment in (*gone, *released):
            self._chains.pop(segment, None)
        return Order(plan.number, self._rows(gone), tuple(jobs), draws, self._rows(released), self._universe.watermark)

    def note_added(self, added: np.ndarray) -> None:
        """Segments joined the universe: their neighbours in memory may reach further from the next plan on."""
        if not self._chains:
            return
        for segment in added.tolist():
            self._walk(segment, self._universe.previous, self._layout.lookahead, self._universe.steps)
            self._walk(segment, self._universe.following, CARRY_BACK, None)

    def note_all(self) -> None:
        """Any neighbour may have changed."""
        self._stale.update(self._chains)

    def note_readable(self, rows: Iterable[int]) -> None:
        """These ledger rows could not be read before and can be now: load them, and what they touch, again."""
        numbers = self._universe.find(np.array(sorted(rows), np.int64))
        for segment in numbers[numbers >= 0].tolist():
            self._chains.pop(segment, None)
            self._stale.add(segment)
            self.note_added(np.array([segment]))

    # --- loading --------------------------------------------------------------------------------------------------

    def _load(self, segments: np.ndarray, follow: tuple[SegmentRequest, ...] = ()) -> LoadJob:
        self._jobs += 1
        wanted = []
        for segment, row, chain in zip(
            segments.tolist(), self._universe.row[segments].tolist(), self._look_around(segments), strict=True
        ):
            self._chains[segment] = chain
            wanted.append(SegmentRequest(row, chain.before, chain.after))
        return LoadJob(
            number=self._jobs,
            wanted=tuple(wanted),
            follow=follow,
            room=tuple(self._frames(segments).sum(0).tolist()),
            other_bytes=int(self._bytes_of(self._universe.steps[segments]).sum()),
        )

    def _catch_up(self) -> list[LoadJob]:
        """Load again what now has other neighbours: wholly if a frame may have come, else only what follows."""
        stale = np.array(sorted(segment for segment in self._stale if segment in self._holders), np.int64)
        self._stale.clear()
        if not len(stale):
            return []
        again, follow = [], []
        for segment, row, chain in zip(
            stale.tolist(), self._universe.row[stale].tolist(), self._look_around(stale), strict=True
        ):
            known = self._chains.get(segment)
            if known is None or known.before != chain.before:
                again.append(segment)
            elif known.after != chain.after:
                follow.append(SegmentRequest(row, (), chain.after))
            self._chains[segment] = chain
        return [self._load(np.array(again, np.int64), tuple(follow))] if again or follow else []

    def _look_around(self, segments: np.ndarray) -> list[_Chain]:
        """The ledger rows before each segment, nearest first, and after it as far as its windows reach."""
        universe, far = self._universe, self._layout.lookahead
        known = np.iinfo(np.int64).max if self._watermark is None else self._watermark
        before, after = [], []
        at = segments
        for _ in range(CARRY_BACK):
            at = np.where(at >= 0, universe.previous[at], -1)
            at = np.where(universe.row[at] <= known, at, -1)
            if (at < 0).all():
                break
            before.append(np.where(at >= 0, universe.row[at], -1))
        at, reached = segments, np.zeros(len(segments), np.int64)
        while True:
            at = np.where((at >= 0) & (reached < far), universe.following[at], -1)
            at = np.where(universe.row[at] <= known, at, -1)
            if (at < 0).all():
                break
            after.append(np.where(at >= 0, universe.row[at], -1))
            reached += universe.steps[at]
        rows = np.stack(before, 1).tolist() if before else [[]] * len(segments)
        later = np.stack(after, 1).tolist() if after else [[]] * len(segments)
        return [
            _Chain(tuple(row for row in b if row >= 0), tuple(row for row in a if row >= 0))
            for b, a in zip(rows, later, strict=True)
        ]

    def _walk(self, segment: int, neighbour: np.ndarray, far: int, steps: np.ndarray | None) -> None:
        """Mark the segments in memory that lie in one direction, up to `far` steps away, or that many segments."""
        at, passed = int(neighbour[segment]), 0
        while at >= 0 and passed < far:
            if at in self._chains:
                self._stale.add(at)
            passed += 1 if steps is None else int(steps[at])
            at = int(neighbour[at])

    def _let_go(self, blocks: Iterable[tuple[int, ...]]) -> list[int]:
        """Segments that nobody holds any more."""
        free = []
        for block in blocks:
            for segment in block:
                self._holders[segment] -= 1
                if not self._holders[segment]:
                    del self._holders[segment]
                    free.append(segment)
        return free

    # --- what the index knows -------------------------------------------------------------------------------------

    def _draws(self, segments: np.ndarray, offsets: np.ndarray) -> Draws:
        universe = self._universe
        return Draws(
            segment=universe.row[segments],
            offset=offsets,
            first_tick=universe.first_tick[segments],
            task=universe.task[segments].astype(np.int64),
            online=universe.online[segments],
            outcome=universe.outcome(segments),
            episode=universe.episode_numbers[universe.episode[segments]],
            return_after=universe.return_after(segments),
        )

    def _frames(self, segments: np.ndarray) -> np.ndarray:
        """int64[k, shapes] decoded frames that each segment takes at most."""
        return self._layout.frames_at_most(self._universe.frames[segments], self.startable(segments))

    def _rows(self, segments: list[int]) -> tuple[int, ...]:
        return tuple(self._universe.row[segments].tolist()) if segments else ()


class _Chain(msgspec.Struct, frozen=True):
    """The neighbours a segment was loaded with, as ledger rows."""

    before: tuple[int, ...]
    after: tuple[int, ...]
