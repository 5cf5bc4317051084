"""Carries orders out, one after the other: memory in, batch out, memory free again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cloud_learner.buffer.loading.decoding.block import LoadJob
from cloud_learner.buffer.loading.decoding.loader import Loader, Taken
from cloud_learner.buffer.loading.decoding.orders import Order
from cloud_learner.buffer.loading.frame_cache import FrameCache
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.step_cache import StepCache
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, Shape, gather, settle


class BatchBuilder:
    """The pool, and who fills and reads it. For one thread, whichever it is."""

    def __init__(
        self,
        pool: StepCache,
        cache: FrameCache,
        loader: Loader,
        layout: Layout,
        shape: Shape,
        instructions: Sequence[str],
        seed: int,
    ) -> None:
        self._pool, self._loader, self._layout = pool, loader, layout
        self._shape, self._instructions, self._seed = shape, instructions, seed
        self._frames = [cache.frames(number) for number in range(len(layout.shapes))]
        self._loaded = 0
        """jobs of the running order that were taken in"""
        self.replaced = 0
        """draws that could not be read and were replaced"""
        self.elsewhere: set[int] = set()
        """ledger rows that cannot be read yet, because they lie on another machine"""

    def make(self, order: Order, slot: BatchSlot) -> Batch | None:
        """The batch of `order` in `slot`, or None if no step of it can be read.

        Raises `StorageError` while the store cannot be read; the same order may be tried again.
        """
        self._drop(order.drop)
        for job in order.jobs[self._loaded :]:
            self._take_in(job, self._loader.take(job.number))
            self._loaded += 1
        self._loaded = 0
        batch = None
        settled = settle(self._pool, order.draws)
        if settled is not None:
            positions, rows = settled
            draws = order.draws
            if not np.array_equal(positions, np.arange(len(positions))):
                self.replaced += int((positions != np.arange(len(positions))).sum())
                draws = draws.take(positions)
            # its own generator for each batch: the same however many were made before by this process
            rng = np.random.Generator(np.random.Philox(key=[self._seed, order.number]))
            batch = gather(
                self._pool, self._frames, self._layout, draws, rows, self._shape, self._instructions, slot, rng
            )
        self._drop(order.release)
        return batch

    def _take_in(self, job: LoadJob, taken: Taken) -> None:
        loaded = taken.loaded
        self._drop([*(segment.row for segment in loaded.segments), *loaded.missing])
        self.elsewhere.update(loaded.elsewhere)
        kept = 0
        for segment in loaded.segments:
            self.elsewhere.discard(segment.row)
            self._pool.insert(segment.row, np.frombuffer(segment.records, self._layout.record), segment.own)
            kept += int(self._pool.bytes_of(np.array([segment.own]))[0])
        for segment in loaded.follow:
            if segment.row in self._pool:
                self._pool.look_ahead(segment.row, np.frombuffer(segment.records, self._layout.record))
        if kept < job.other_bytes:
            # room for segments that could not be read
            nothing = tuple(np.zeros(0, np.int32) for _ in self._layout.shapes)
            self._loader.release(nothing, job.other_bytes - kept)

    def _drop(self, segments: Iterable[int]) -> None:
        extents = [self._pool.drop(segment) for segment in segments if segment in self._pool]
        if extents:
            frames = tuple(
                np.concatenate([extent.frames[number] for extent in extents])
                for number in range(len(self._layout.shapes))
            )
            self._loader.release(frames, int(self._pool.bytes_of(np.array([e.own for e in extents])).sum()))
