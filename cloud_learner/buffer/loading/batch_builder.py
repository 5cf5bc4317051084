"""Batches of plans in turn: what leaves memory leaves it, what enters it enters, and the batch is gathered."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from cloud_learner.buffer.loading.cache import FrameCache, StepCache
from cloud_learner.buffer.loading.config import LoadCounts
from cloud_learner.buffer.loading.decode import Loaded, SegmentRequest
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.loader import LoadPlan, SegmentLoader
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, WindowReader, settle

log = logging.getLogger(__name__)
_LEFT_OUT = "the segment in ledger row %d is left out of training: %s"
_KEPT = "the segment in ledger row %d cannot be read again, what is in memory of it stays in training: %s"
_TORN = "frames of the segment in ledger row %d cannot be decoded; steps that saw them are left out."


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
        for row, reason in loaded.damaged.items():
            self._say(_KEPT if row in stay else _LEFT_OUT, row, reason)
            self.counts.damaged += row not in stay
        for row in loaded.unreadable:
            self._say(_TORN, row)
        self.counts.unreadable_frames += sum(loaded.unreadable.values())

    def _say(self, text: str, row: int, *more: str) -> None:
        if (text, row) not in self._said:
            self._said.add((text, row))
            log.error(text, row, *more)

    def _drop(self, rows: Iterable[int]) -> None:
        extents = [self.steps.drop(row) for row in rows if row in self.steps]
        if extents:
            frames = tuple(map(np.concatenate, zip(*(extent.frames for extent in extents), strict=True)))
            own = np.array([extent.own for extent in extents])
            self._loader.release(frames, int(self._layout.step_bytes(own).sum()))
