"""Segments into memory, in threads or in the one that asks, in the order of need, below the cap of the cache.

What has to happen in memory for each batch is decided when it is planned and carried out in the same order later, by
`batch_builder`. All that a batch depends on is settled by then, in the thread that plans: which segments enter and
leave, how far their neighbours were known, and what the index says of each draw. So a batch is the same however far
ahead it is made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np

from cloud_learner.buffer.control import arrival_lag
from cloud_learner.buffer.loading.cache import FrameCache, Rows
from cloud_learner.buffer.loading.decode import CARRY_BACK, Loaded, Read, SegmentRequest, load_segments
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
        ("last_tick", "<i8"),
        ("probability", "<f8"),
        ("label", "<f4"),
    ]
)
"""a step to begin at: its segment's ledger row and the step within it; the segment's first tick; and of its episode
index of the task, outcome, ledger number, the rewards of all later segments, nan while it is unfinished, and the tick
of its last step, -1 until then; how probable the step was; and the label that the target goes by, of the segment, nan
for nothing"""


class LoadPlan(msgspec.Struct, frozen=True, eq=False):
    """One batch, in ledger rows: drop, then load, then gather."""

    number: int
    drop: tuple[int, ...]
    jobs: tuple[tuple[SegmentRequest, ...], ...]
    """what is loaded together"""
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
            if (bound := self._layout.config.target.leaves_out_stale) is not None:
                newest = index.newest_version[index.run_segment[known:]]
                lag = arrival_lag(index.run_version[known:], newest)
                starts = starts & ~bound.is_stale(index.run_actor[known:], source > 0, lag)
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
        wanted += self._catch_up(known)
        jobs = tuple(tuple(wanted[n : n + _TOGETHER]) for n in range(0, len(wanted), _TOGETHER))
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
        wanted = [SegmentRequest(row, before, after) for row, (before, after) in zip(rows, around, strict=True)]
        if self._layout.config.target.staleness is None:
            return wanted
        newest = self._index.newest_version
        numbers = (self._index.find(np.array((one.row, *one.after), np.int64)) for one in wanted)
        versions = (tuple(newest[number].tolist()) for number in numbers)
        return [msgspec.structs.replace(one, newest_versions=them) for one, them in zip(wanted, versions, strict=True)]

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
        draws["probability"], draws["label"] = batch.probability, index.label[segments]
        draws["first_tick"], draws["task"] = index.first_tick[segments], index.task[segments]
        draws["online"], draws["outcome"] = index.online[segments], index.outcome(segments)
        draws["episode"] = index.episode_numbers[index.episode[segments]]
        draws["return_after"], draws["last_tick"] = index.return_after(segments), index.last_tick(segments)
        return draws


class SegmentLoader:
    """Loads what is submitted, in that order. `take` and `release` may be called in another thread than `submit`."""

    def __init__(self, cache: FrameCache, read: Read, layout: Layout, threads: int) -> None:
        """Without `threads` each job is done when it is taken."""
        self._cache, self._read, self._layout = cache, read, layout
        self._frames = [cache.frames(shape) for shape in range(len(layout.shapes))]
        self._threads = ThreadPoolExecutor(threads, "loading") if threads else None
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Sequence[SegmentRequest], Future[Loaded] | None]] = deque()
        """submitted and not taken"""
        self._submitted = self._taken = 0
        self._turn = 0
        """number of the job that gets memory next: those before it have theirs"""
        self._waiting = self._closing = False
        """whether somebody waits for the next one to take, and whether nobody will any more"""

    def submit(self, wanted: Sequence[SegmentRequest]) -> None:
        """A job: load it when its turn comes."""
        job = self._threads.submit(self._load, wanted, self._submitted) if self._threads else None
        self._jobs.append((wanted, job))
        self._submitted += 1

    def take(self) -> Loaded:
        """What became of the oldest job not taken; waits for it.

        Raises `StorageError` if the store cannot be read; ask again then. Raises `ConfigError` if there is no room for
        it although all before it was taken.
        """
        wanted, under_way = self._jobs[0]
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
        try:
            loaded = under_way.result() if under_way else self._load(wanted, self._taken)
        except BaseException:
            # the next try is made here: threads may all wait for this one
            self._jobs[0] = wanted, None
            raise
        with self._changed:
            self._waiting = False
            self._taken += 1
        self._jobs.popleft()
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

    def _load(self, wanted: Sequence[SegmentRequest], number: int) -> Loaded:
        def reserve(counts: Sequence[int], steps: np.ndarray) -> Rows:
            return self._reserve(number, counts, int(self._layout.step_bytes(steps).sum()))

        return load_segments(wanted, reserve, self._frames, self._read, self._layout)

    def _reserve(self, number: int, counts: Sequence[int], charge: int) -> Rows:
        with self._changed:
            while not self._closing:
                if number <= self._turn and (room := self._cache.reserve(counts, charge)) is not None:
                    self._turn = max(self._turn, number + 1)
                    self._changed.notify_all()
                    return room
                if number == self._taken and self._waiting:
                    raise ConfigError(
                        f"a cache of {self._cache.cap_bytes} bytes, {self._cache.used_bytes} of them in use, has no "
                        f"room for {list(counts)} more frames: give it more (cache_bytes)."
                    )
                self._changed.wait()
        raise StorageError("the loader was closed.")
