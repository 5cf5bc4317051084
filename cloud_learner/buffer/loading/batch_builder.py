"""Makes batches of plans in turn: memory out, memory in, batch; when it is asked for, or some batches ahead."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from cloud_learner.buffer.loading.cache import FrameCache, StepCache
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.decode import Loaded
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.load_plan import LoadPlan
from cloud_learner.buffer.loading.loader import SegmentLoader
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, gather, settle

_END_S = 30.0


class BatchBuilder:
    """Fills and reads the caches. For one thread, whichever it is."""

    def __init__(
        self, steps: StepCache, cache: FrameCache, loader: SegmentLoader, layout: Layout, config: DatasetConfig
    ) -> None:
        self._steps, self._loader, self._layout, self._config = steps, loader, layout, config
        self._frames = [cache.frames(number) for number in range(len(layout.shapes))]
        self._loaded = 0
        """jobs of the running plan that were taken in"""
        self.replaced = 0
        """draws that could not be read and were replaced"""
        self.waited_s = 0.0
        """for what was to be loaded"""
        self.elsewhere: set[int] = set()
        """ledger rows that cannot be read yet, because they lie on another machine"""

    def make(self, plan: LoadPlan, slot: BatchSlot) -> Batch | None:
        """The batch of `plan` in `slot`, or None if no step of it can be read.

        Raises `StorageError` while the store cannot be read; the same plan may be tried again.
        """
        self._drop(plan.drop)
        for job in plan.jobs[self._loaded :]:
            before = time.perf_counter()
            loaded = self._loader.take(job.number)
            self.waited_s += time.perf_counter() - before
            self._take_in(loaded)
            self._loaded += 1
        self._loaded = 0
        settled = settle(self._steps, plan.draws)
        if settled is None:
            return None
        (positions, rows), draws = settled, plan.draws
        if replaced := int((positions != np.arange(len(positions))).sum()):
            self.replaced += replaced
            draws = draws[positions]
        # its own generator for each batch: the same however many were made before by this process
        rng = np.random.Generator(np.random.Philox(key=[self._config.seed, plan.number]))
        return gather(
            self._steps, self._frames, self._layout, draws, rows, self._config, slot, rng, plan.newest_version
        )

    def _take_in(self, loaded: Loaded) -> None:
        self._drop([*(segment.row for segment in loaded.segments), *loaded.missing])
        self.elsewhere.update(loaded.elsewhere)
        for segment in loaded.segments:
            self.elsewhere.discard(segment.row)
            self._steps.insert(segment.row, segment.records, segment.own)
        for segment in loaded.follow:
            if segment.row in self._steps:
                self._steps.look_ahead(segment.row, segment.records)

    def _drop(self, segments: Iterable[int]) -> None:
        extents = [self._steps.drop(segment) for segment in segments if segment in self._steps]
        if extents:
            frames = tuple(
                np.concatenate([extent.frames[number] for extent in extents])
                for number in range(len(self._layout.shapes))
            )
            own = np.array([extent.own for extent in extents])
            self._loader.release(frames, int(self._layout.step_bytes(own).sum()))


class BatchQueue:
    """Batches in the order in which plans were put; up to `depth` are made before they are asked for, in a thread."""

    def __init__(self, make: Callable[[LoadPlan, BatchSlot], Batch | None], depth: int) -> None:
        self._make, self._depth = make, depth
        self._plans: deque[LoadPlan] = deque()
        self._waiting: queue.SimpleQueue[LoadPlan | None] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[BatchSlot | None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(BatchSlot())
        self._made: queue.SimpleQueue[tuple[Batch | None, BatchSlot] | BaseException] = queue.SimpleQueue()
        self._again: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._failed = False
        # one more than `depth`: what was taken stays whole until the next is asked for
        self._taken = BatchSlot()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        if depth:
            self._thread.start()

    def put(self, plan: LoadPlan) -> None:
        """The next one."""
        (self._waiting.put if self._depth else self._plans.append)(plan)

    def take(self) -> Batch | None:
        """The batch of the oldest plan not taken; what was taken before may be overwritten.

        None if nothing of it can be read. After an error the same plan is tried again by the next call.
        """
        if not self._depth:
            batch = self._make(self._plans[0], self._taken)
            self._plans.popleft()
            return batch
        if self._failed:
            self._failed = False
            self._again.put(True)
        made = self._made.get()
        if isinstance(made, BaseException):
            self._failed = True
            raise made
        batch, slot = made
        self._slots.put(self._taken)
        self._taken = slot
        return batch

    def close(self) -> None:
        """End the thread."""
        self._again.put(False)
        self._slots.put(None)
        self._waiting.put(None)
        if self._depth:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while (plan := self._waiting.get()) is not None and (slot := self._slots.get()) is not None:
            while True:
                try:
                    self._made.put((self._make(plan, slot), slot))
                    break
                except BaseException as error:  # noqa: BLE001 - it is raised where the batch is asked for
                    self._made.put(error)
                    if not self._again.get():
                        return
