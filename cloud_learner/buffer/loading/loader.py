"""Segments into memory, in threads or in the one that asks, in the order of need, below the cap of the cache.

What has to happen in memory for each batch is decided when it is planned and carried out in the same order later, by
`batch_builder`. All that a batch depends on is settled by then, in the thread that plans: which segments enter and
leave, how far their neighbours were known, and what the index says of each draw. So a batch is the same however far
ahead it is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from cloud_learner.buffer.loading.cache import FrameCache, Rows
from cloud_learner.buffer.loading.decode import CARRY_BACK, Loaded, LoadJob, Read, SegmentRequest, load_segments
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.sampling.growing import Growing
from cloud_learner.buffer.sampling.sampler import BatchPlan
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from wire.errors import ConfigError, StorageError

_TOGETHER = 8
"""segments of one job"""
_COMPARE, _STEPS, _FRAMES = range(3)
"""what a segment in memory needs: what other neighbours ask for, if it has any; its steps again; its frames as well"""
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
    """Knows which segments are in memory after the last plan, and what was asked for with each."""

    def __init__(self, index: SegmentIndex, layout: Layout) -> None:
        self._index, self._layout = index, layout
        self._requests: dict[int, SegmentRequest] = {}
        """by segment in memory: the last one"""
        self._stale: dict[int, int] = {}
        """by segment in memory that may have to be brought up to date: how, of `_COMPARE`, `_STEPS` and `_FRAMES`"""
        self._jobs = 0
        self._startable = Growing(np.int64)
        """steps at which a window may begin, in all runs before each"""
        self._startable.append(np.zeros(1, np.int64))

    @property
    def loaded(self) -> np.ndarray:
        """int64 segment numbers"""
        return np.fromiter(self._requests, np.int64)

    def cost(self, segments: np.ndarray) -> np.ndarray:
        """int64[k] bytes of memory that each of the int64[k] segments takes at most."""
        frames = self._layout.frames_bytes(self._index.frames[segments], self.startable(segments))
        return self._layout.step_bytes(self._index.steps[segments]) + frames

    def startable(self, segments: np.ndarray) -> np.ndarray:
        """int64[k]: at how many steps of each of the int64[k] segments a window may begin, if all can be read."""
        index, known = self._index, len(self._startable.all) - 1
        if known != len(index.run_actor):
            source = index.demonstration[index.run_segment[known:]].astype(np.intp)
            starts = self._layout.starts[source, index.run_actor[known:]]
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
            self._requests.pop(segment, None)
            self._stale.pop(segment, None)
        wanted = self._requests_for(batch.load, known)
        self._requests.update(zip(batch.load.tolist(), wanted, strict=True))
        groups = [wanted[n : n + _TOGETHER] for n in range(0, len(wanted), _TOGETHER)]
        if again := self._catch_up(known):
            groups.append(again)
        jobs = tuple(LoadJob(number, tuple(group)) for number, group in enumerate(groups, self._jobs))
        self._jobs += len(jobs)
        if draws is None:
            draws = self._draws(batch)
        drop = tuple(self._index.row[batch.drop].tolist())
        return LoadPlan(batch.number, drop, jobs, draws, known, batch.newest_version)

    def note_added(self, added: np.ndarray) -> None:
        """Segments joined the index: their neighbours in memory may reach further from the next plan on."""
        for segment in added.tolist() if self._requests else ():
            before, after = self._touched(segment)
            self._mark([*before, *after], _COMPARE)

    def note_all(self) -> None:
        """Any neighbour may have changed."""
        self._mark(self._requests, _COMPARE)

    def note_readable(self, rows: Iterable[int]) -> None:
        """These ledger rows could not be read before: load them, and what they touch, again."""
        for segment in self._index.find(np.array(sorted(rows), np.int64)).tolist():
            if segment >= 0:
                before, after = self._touched(segment)
                self._mark([segment, *after], _FRAMES)
                self._mark(before, _FRAMES if self._shows_later else _STEPS)

    def note_labelled(self, rows: Iterable[int]) -> None:
        """The steps of these ledger rows have other labels."""
        for segment in self._index.find(np.array(sorted(rows), np.int64)).tolist() if self._requests else ():
            if segment >= 0:
                self._mark([segment, *self._touched(segment)[0]], _STEPS)

    @property
    def _shows_later(self) -> bool:
        """Whether windows show frames that the segments after theirs brought."""
        return bool(self._layout.config.n_step and self._layout.cameras)

    def _mark(self, segments: Iterable[int], how: int) -> None:
        for segment in segments:
            if segment in self._requests:
                self._stale[segment] = max(self._stale.get(segment, how), how)

    def _catch_up(self, known: int) -> list[SegmentRequest]:
        """For what is in memory and not up to date any more: with frames if another may have come, else without."""
        segments = np.array(sorted(self._stale), np.int64)
        stale, self._stale, found = self._stale, {}, []
        for segment, request in zip(segments.tolist(), self._requests_for(segments, known), strict=True):
            before, how = self._requests[segment], stale[segment]
            if request.after != before.after:
                how = max(how, _FRAMES if self._shows_later else _STEPS)
            if request.before != before.before or how == _FRAMES:
                found.append(request)
            elif how == _STEPS:
                found.append(msgspec.structs.replace(request, frames=False))
            self._requests[segment] = request
        return found

    def _requests_for(self, segments: np.ndarray, known: int) -> list[SegmentRequest]:
        if not len(segments):
            return []
        around = self._index.neighbours(segments, CARRY_BACK, self._layout.config.lookahead, known)
        rows = self._index.row[segments].tolist()
        return [SegmentRequest(row, before, after) for row, (before, after) in zip(rows, around, strict=True)]

    def _touched(self, segment: int) -> tuple[list[int], list[int]]:
        """The segments before it whose windows may reach into it, and those after it that may have seen its frames."""
        before: list[int] = []
        after: list[int] = []
        index, passed = self._index, 0
        at = int(index.previous[segment])
        while at >= 0 and passed < self._layout.config.lookahead:
            before.append(at)
            passed += int(index.steps[at])
            at = int(index.previous[at])
        at = int(index.following[segment])
        while at >= 0 and len(after) < CARRY_BACK:
            after.append(at)
            at = int(index.following[at])
        return before, after

    def _draws(self, batch: BatchPlan) -> np.ndarray:
        index, segments, draws = self._index, batch.segments, np.empty(len(batch.segments), DRAW)
        draws["segment"], draws["offset"] = index.row[segments], batch.offsets
        draws["probability"] = batch.probability
        draws["first_tick"], draws["task"] = index.first_tick[segments], index.task[segments]
        draws["online"], draws["outcome"] = index.online[segments], index.outcome(segments)
        draws["episode"] = index.episode_numbers[index.episode[segments]]
        draws["return_after"] = index.return_after(segments)
        return draws


class SegmentLoader:
    """Does jobs in the order of their numbers. `release` and `take` may be called in another thread than `submit`."""

    def __init__(self, cache: FrameCache, read: Read, layout: Layout, threads: int) -> None:
        """Without `threads` each job is done when it is taken."""
        self._cache, self._read, self._layout = cache, read, layout
        self._frames = [cache.frames(shape) for shape in range(len(layout.shapes))]
        self._threads = ThreadPoolExecutor(threads, "loading") if threads else None
        self._changed = threading.Condition()
        self._jobs: dict[int, tuple[LoadJob, Future[Loaded] | None]] = {}
        self._turn = 0
        """the job that gets memory next: those before it have theirs"""
        self._awaited = -1
        self._closing = False

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
        return loaded

    def release(self, frames: Rows, charge: int) -> None:
        """Memory that is not needed any more."""
        with self._changed:
            self._cache.release(frames, charge)
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
