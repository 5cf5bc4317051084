"""Batches of plans in turn: what leaves memory leaves it, what enters it enters, and the batch is gathered."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import HeldState
from cloud_learner.buffer.ledger.segments import chunks
from cloud_learner.buffer.loading.cache import FrameCache, StepCache
from cloud_learner.buffer.loading.config import LoadCounts
from cloud_learner.buffer.loading.decode import Loaded, SegmentRequest
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.loader import LoadPlan, LoadPlanner, SegmentLoader
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, WindowReader, settle

log = logging.getLogger(__name__)
_LEFT_OUT = "the segment in ledger row %d is left out of training: %s"
_KEPT = "the segment in ledger row %d cannot be read again, what is in memory of it stays in training: %s"
_TORN = "frames of the segment in ledger row %d cannot be decoded; steps that saw them are left out."

_HELD = "pictures of the segment in ledger row %d are held back by a relay: steps that saw them wait until they come."
_ASK_S = 30.0
"""between two times that the same pictures are asked for"""
_WANTED = 500


class BatchBuilder:
    """Batches in the order in which plans were put; `prefetch` are made before they are asked for, in a thread."""

    def __init__(self, cache: FrameCache, loader: SegmentLoader, layout: Layout) -> None:
        self._loader, self._layout, self._seed = loader, layout, layout.config.seed
        self.steps = StepCache(layout)
        frames = [cache.frames(number) for number in range(len(layout.shapes))]
        self._windows = WindowReader(self.steps, frames, layout)
        # one more than is made ahead: what was taken stays whole until the next is asked for
        self._slots = [BatchSlot() for _ in range(layout.config.prefetch + 1)]
        self._thread = ThreadPoolExecutor(1, "batches") if layout.config.prefetch else None
        self._making: deque[Future[Batch | None]] = deque()
        self._plans: deque[LoadPlan] = deque()
        """of which no batch was made; each attempt is for the first of them"""
        self._made = 0
        self._loaded = 0
        """jobs of the first plan that were taken in"""
        self.counts = LoadCounts()
        self._said: set[tuple[str, int]] = set()
        """what the log has said of which ledger row"""
        self.waited_s = 0.0
        """by whoever takes batches: for those made ahead, or else for what was to be loaded"""
        self.elsewhere: set[int] = set()
        """ledger rows that could not be read when something was loaded, because they lay on another machine: they stay
        here though they can be read later, until what was loaded without them is loaded again"""
        self.held: dict[int, str] = {}
        """the same for rows of which pictures are held back; ids of their segments"""

    def put(self, plan: LoadPlan) -> None:
        """The next one."""
        for job in plan.jobs:
            self._loader.submit(job)
        self._plans.append(plan)

    def take(self) -> Batch | None:
        """The batch of the oldest plan not taken; what was taken before may be overwritten.

        None if nothing of it can be read. Raises `StorageError` while the store cannot be read, and `ConfigError` if
        the cache is too small; the same plan is tried again by the next call.
        """
        if not self._thread:
            return self._make()
        while len(self._making) < len(self._slots):
            self._making.append(self._thread.submit(self._make))
        before = time.perf_counter()
        try:
            batch = self._making.popleft().result()
            self.waited_s += time.perf_counter() - before
            return batch
        except BaseException:
            # what has not begun would only fail again before anybody asks
            self._making = deque(attempt for attempt in self._making if not attempt.cancel())
            raise

    def close(self) -> None:
        """End the thread; close the loader first, for it may wait for that."""
        if self._thread:
            self._thread.shutdown(cancel_futures=True)

    def _make(self) -> Batch | None:
        plan, slot = self._plans[0], self._slots[self._made % len(self._slots)]
        self._drop(plan.drop)
        for job in plan.jobs[self._loaded :]:
            before = time.perf_counter()
            loaded = self._loader.take()
            self.waited_s += (time.perf_counter() - before) * (not self._thread)
            self._take_in(job, loaded)
            self._loaded += 1
        batch = self._gather(plan, slot)
        self._plans.popleft()
        self._made, self._loaded = self._made + 1, 0
        return batch

    def _gather(self, plan: LoadPlan, slot: BatchSlot) -> Batch | None:
        settled = settle(self.steps, plan.draws)
        if settled is None:
            return None
        positions, rows = settled
        self.counts.replaced += int((positions != np.arange(len(positions))).sum())
        # its own generator for each batch: the same however many were made before by this process
        rng = np.random.Generator(np.random.Philox(key=[self._seed, plan.number]))
        return self._windows.gather(plan.draws[positions], rows, slot, rng, plan.newest_version)

    def _take_in(self, wanted: Iterable[SegmentRequest], loaded: Loaded) -> None:
        wanted = tuple(wanted)
        self._note(loaded, {request.row for request in wanted if not request.frames and request.row in self.steps})
        self._drop(request.row for request in wanted if request.frames)
        self.elsewhere.update(loaded.elsewhere)
        self.held.update(loaded.held)
        for segment in loaded.segments:
            row = segment.request.row
            if segment.request.frames:
                self.counts.loaded += 1
                self.steps.insert(row, segment.records, segment.own, segment.frames)
            elif row in self.steps:
                self.steps.update(row, segment.records)

    def _note(self, loaded: Loaded, stay: Container[int]) -> None:
        """Count what is wrong with a job that was done, and say it once; the ledger rows `stay` are in memory."""
        for row in loaded.elsewhere:
            log.info("the segment in ledger row %d is still in the journal of another machine.", row)
        for row in loaded.held:
            self._say(_HELD, row)
        for row, reason in loaded.damaged.items():
            self._say(_KEPT if row in stay else _LEFT_OUT, row, reason)
            self.counts.damaged += row not in stay
        for row in loaded.unreadable:
            self._say(_TORN, row)
        self.counts.unreadable_frames += sum(loaded.unreadable.values())

    def _say(self, text: str, row: int, *more: str) -> None:
        if (text, row) not in self._said:
            self._said.add((text, row))
            log.log(logging.INFO if text == _HELD else logging.ERROR, text, row, *more)

    def _drop(self, rows: Iterable[int]) -> None:
        extents = [self.steps.drop(row) for row in rows if row in self.steps]
        if extents:
            frames = tuple(map(np.concatenate, zip(*(extent.frames for extent in extents), strict=True)))
            own = np.array([extent.own for extent in extents])
            self._loader.release(frames, int(self._layout.step_bytes(own).sum()))


class AwaitedSegments:
    """What could not be read, or not shown, when it was loaded, and may be later."""

    def __init__(self, ledger: Ledger, builder: BatchBuilder, planner: LoadPlanner) -> None:
        self._ledger, self._builder, self._planner = ledger, builder, planner
        self._asked_s: dict[int, float] = {}
        """by ledger row: when its pictures were asked for last"""

    def poll(self) -> None:
        """Have loaded again what can be read by now. Raises `StorageError`."""
        self._look_elsewhere()
        for rows in chunks(list(self._builder.held)):
            still = self._ledger.held_rows(rows)
            came = [row for row in rows if row not in still]
            for row in came:
                del self._builder.held[row]
                self._asked_s.pop(row, None)
            self._planner.note_readable(came)
            self._asked_s |= {row: math.inf for row, state in still.items() if state == HeldState.gone}

    def pop_wanted(self) -> tuple[str, ...]:
        """Ids of segments of which pictures are to be asked for now, at most some hundred."""
        now_s = time.monotonic()
        held = list(self._builder.held.items())
        due = [(row, name) for row, name in held if now_s >= self._asked_s.get(row, -math.inf) + _ASK_S][:_WANTED]
        self._asked_s |= {row: now_s for row, _ in due}
        return tuple(name for _, name in due)

    def _look_elsewhere(self) -> None:
        if waiting := list(self._builder.elsewhere):
            places = self._ledger.places(waiting)
            sealed = [row for row, place in places.items() if place.journal is None]
            # what was pruned has no place any more
            self._builder.elsewhere.difference_update(sealed, set(waiting) - places.keys())
            self._planner.note_readable(sealed)
