"""Segments into memory, and batches out of it: in threads or in the one that asks, in the order of need, below the cap
of the cache.

What has to happen in memory for each batch is decided when it is planned and carried out in the same order later. All
that a batch depends on is settled by then, in the thread that plans: which segments enter and leave, how far their
neighbours were known, and what the index says of each draw. So a batch is the same however far ahead it is made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from cloud_learner.buffer.loading.cache import FrameCache, Rows, StepCache
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.decode import (
    CARRY_BACK,
    FreshSegments,
    Loaded,
    LoadJob,
    Read,
    SegmentRequest,
    load_segments,
)
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.windows import Batch, BatchSlot, gather, settle
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.sampler import BatchPlan
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.store.store import ReadResult
from wire.errors import ConfigError, StorageError

log = logging.getLogger(__name__)
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
        ("probability", "<f8"),
    ]
)
"""a step to begin at: its segment's ledger row and the step within it; the segment's first tick; and of its episode
index of the task, outcome, ledger number, and the rewards of all later segments, nan while it is unfinished; how
probable the step was"""


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
            draws = self._draws(batch)
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
        """These ledger rows could not be read before, or had other labels: load them, and what they touch, again."""
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
        framed = bool(self._layout.n_step and self._layout.cameras)
        stale = np.array(sorted(self._stale & self._neighbours.keys()), np.int64)
        self._stale.clear()
        again, follow = [], []
        for segment, (before, after) in zip(stale.tolist(), self._around(stale, known), strict=True):
            if self._neighbours[segment][0] != before or (framed and self._neighbours[segment][1] != after):
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

    def _draws(self, batch: BatchPlan) -> np.ndarray:
        index, segments, draws = self._index, batch.segments, np.empty(len(batch.segments), DRAW)
        draws["segment"], draws["offset"] = index.row[segments], batch.offsets
        draws["probability"] = batch.probability
        draws["first_tick"], draws["task"] = index.first_tick[segments], index.task[segments]
        draws["online"], draws["outcome"] = index.online[segments], index.outcome(segments)
        draws["episode"] = index.episode_numbers[index.episode[segments]]
        draws["return_after"] = index.return_after(segments)
        return draws


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

    def __init__(
        self,
        cache: FrameCache,
        read: Read,
        layout: Layout,
        fresh: FreshSegments,
        threads: int,
        read_labels: Callable[[Sequence[int]], dict[int, np.ndarray]] = lambda rows: {},
    ) -> None:
        """Without `threads` each job is done when it is taken. `read_labels`: float32[T, L] by ledger row."""
        self._read_labels = read_labels
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
        labels = self._read_labels(rows)
        return ReadResult({**found.segments, **given}, found.damaged, found.elsewhere, labels)


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
