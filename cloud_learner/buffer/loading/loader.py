"""Segments into memory, and batches out of it: in threads or in the one that asks, in the order of need, below the cap
of the cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from cloud_learner.buffer.loading.cache import FrameCache, Rows, StepCache
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.decode import Loaded, LoadJob, Read, load_segments
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.load_plan import LoadPlan
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, gather, settle
from cloud_learner.buffer.store.store import ReadResult
from wire.errors import ConfigError, StorageError
from wire.messages.gateway import Segment

log = logging.getLogger(__name__)


class FreshSegments:
    """Segments that came straight from the gateway, the newest below a number of bytes: they need not be read."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._segments: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, row: int, segment: Segment) -> None:
        size = sum(len(image) for frames in segment.frames.values() for image in frames.encoded)
        size += segment.steps * (segment.state.strides[0] + 2 * segment.executed.strides[0] + 64)
        with self._lock:
            if row in self._segments:
                return
            self._segments[row] = segment, size
            self._bytes += size
            while self._bytes > self._cap_bytes:
                self._bytes -= self._segments.popitem(last=False)[1][1]

    def get(self, rows: Sequence[int]) -> dict[int, Segment]:
        """Those of `rows` that are here."""
        with self._lock:
            return {row: self._segments[row][0] for row in rows if row in self._segments}


class LoaderStats(msgspec.Struct):
    """What a loader did."""

    segments: int = 0
    damaged: int = 0
    """segments that could not be read and were left out"""
    unreadable_frames: int = 0
    from_gateway: int = 0
    """segments that had not to be read"""
    named: set[int] = msgspec.field(default_factory=set)
    """ledger rows that the log has named"""

    def note(self, loaded: Loaded) -> None:
        """Count a job that was done and name what is wrong with it."""
        self.segments += len(loaded.segments)
        self.unreadable_frames += loaded.unreadable_frames
        for row, reason in loaded.missing.items():
            if row in loaded.elsewhere:
                log.info("the segment in ledger row %d is still in the journal of another machine.", row)
                continue
            self.damaged += 1
            if row not in self.named:
                log.error("the segment in ledger row %d is left out of training: %s", row, reason)
                self.named.add(row)
        for row in loaded.unreadable_in:
            if row not in self.named:
                log.error(
                    "frames of the segment in ledger row %d cannot be decoded; steps that saw them are left out.", row
                )
                self.named.add(row)


class SegmentLoader:
    """Does jobs in the order of their numbers. `release` and `take` may be called in another thread than `submit`."""

    def __init__(self, cache: FrameCache, read: Read, layout: Layout, fresh: FreshSegments, threads: int) -> None:
        """Without `threads` each job is done when it is taken."""
        self._cache, self._store_read, self._layout, self._fresh = cache, read, layout, fresh
        self._frames = [cache.frames(shape) for shape in range(len(layout.shapes))]
        self._threads = ThreadPoolExecutor(threads, "loading") if threads else None
        self._changed = threading.Condition()
        self._jobs: dict[int, tuple[LoadJob, Future[Loaded] | None]] = {}
        self._turn = 0
        """the job that gets memory next: those before it have theirs"""
        self._awaited = -1
        self._closing = False
        self.stats = LoaderStats()

    def submit(self, job: LoadJob) -> None:
        """Do it when its turn comes."""
        self._jobs[job.number] = job, self._threads.submit(self._load, job) if self._threads else None

    def take(self, number: int) -> Loaded:
        """What became of a job; waits for it. Raises `StorageError` if the store cannot be read; ask again then.

        Raises `ConfigError` if there is no room for it although all before it was taken.
        """
        job, under_way = self._jobs[number]
        with self._changed:
            self._awaited = number
            self._changed.notify_all()
        try:
            loaded = under_way.result() if under_way else self._load(job)
        except BaseException:
            # the next try is made here: threads may all wait for this one
            self._jobs[number] = job, None
            raise
        del self._jobs[number]
        self.stats.note(loaded)
        self.release(loaded.unused, 0)
        return loaded

    def release(self, frames: Rows, charge: int) -> None:
        """Memory that is not needed any more."""
        with self._changed:
            if frames or charge:
                self._cache.release(frames or tuple(np.zeros(0, np.int32) for _ in self._frames), charge)
            self._changed.notify_all()

    def close(self) -> None:
        """Wake who waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        self._jobs.clear()

    def _load(self, job: LoadJob) -> Loaded:
        def reserve(counts: Sequence[int], steps: np.ndarray) -> Rows:
            return self._reserve(job, counts, int(self._layout.step_bytes(steps).sum()))

        return load_segments(job, reserve, self._frames, self._read, self._layout)

    def _reserve(self, job: LoadJob, counts: Sequence[int], charge: int) -> Rows:
        with self._changed:
            while not self._closing:
                if job.number <= self._turn and (room := self._cache.reserve(counts, charge)) is not None:
                    self._turn = max(self._turn, job.number + 1)
                    self._changed.notify_all()
                    return room
                if job.number <= min(self._turn, self._awaited):
                    raise ConfigError(
                        f"a cache of {self._cache.cap_bytes} bytes, {self._cache.used_bytes} of them in use, has no "
                        f"room for {list(counts)} frames of {len(job.wanted)} segments: give it more (cache_bytes)."
                    )
                self._changed.wait()
        raise StorageError("the loader was closed.")

    def _read(self, rows: Sequence[int]) -> ReadResult:
        given = self._fresh.get(rows)
        with self._changed:
            self.stats.from_gateway += len(given)
        others = [row for row in rows if row not in given]
        found = self._store_read(others) if others else ReadResult({}, {})
        return ReadResult({**found.segments, **given}, found.damaged, found.elsewhere)


class BatchBuilder:
    """Makes batches of plans in turn: memory out, memory in, batch. For one thread, whichever it is."""

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
