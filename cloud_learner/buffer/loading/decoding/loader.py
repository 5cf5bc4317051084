"""Who loads blocks, and when: in the order of need, below the frame cache's cap.

`InlineLoader` loads in the thread that asks, `processes.ProcessLoader` in processes of its own, ahead of need.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from cloud_learner.buffer.loading.decoding.block import Loaded, LoadJob, Read, ReadSegments, load_block
from cloud_learner.buffer.loading.frame_cache import FrameCache, Rows
from cloud_learner.buffer.loading.layout import Layout
from wire.errors import ConfigError
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


class Taken(msgspec.Struct, frozen=True, eq=False):
    """A job that was done, and the frames it wrote."""

    loaded: Loaded
    frames: Rows


class Loader(Protocol):
    """Does jobs in the order of their numbers. `release` and `take` may be called in another thread than `submit`."""

    @property
    def stats(self) -> LoaderStats: ...

    def submit(self, job: LoadJob) -> None:
        """Do it when its turn comes."""
        ...

    def take(self, number: int) -> Taken:
        """What became of a job; waits for it. Raises `StorageError` if the store cannot be read; ask again then.

        Raises `ConfigError` if there is no room for it although nothing is under way.
        """
        ...

    def release(self, frames: Rows, other_bytes: int) -> None:
        """Memory that is not needed any more."""
        ...

    def close(self) -> None: ...


class LoaderStats(msgspec.Struct):
    """What a loader did."""

    segments: int = 0
    damaged: int = 0
    """segments that could not be read and were left out"""
    unreadable_frames: int = 0
    from_gateway: int = 0
    """segments that had not to be read"""
    restarts: int = 0
    """loading processes that ended and were replaced"""
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


class InlineLoader:
    """Does each job in the thread that asks for it, when it asks."""

    def __init__(self, cache: FrameCache, read: Read, layout: Layout, fresh: FreshSegments) -> None:
        self._cache, self._store_read, self._layout, self._fresh = cache, read, layout, fresh
        self._frames = [cache.frames(shape) for shape in range(len(layout.shapes))]
        self._jobs: dict[int, LoadJob] = {}
        self.stats = LoaderStats()

    def submit(self, job: LoadJob) -> None:
        self._jobs[job.number] = job

    def take(self, number: int) -> Taken:
        job = self._jobs[number]
        room = self._cache.reserve(job.room, job.other_bytes)
        if room is None:
            raise no_room(job, self._cache)
        try:
            loaded = load_block(job, room, self._frames, self._read, self._layout)
        except BaseException:
            self._cache.release(room, job.other_bytes)
            raise
        if loaded.short:
            self._cache.release(room, job.other_bytes)
            self._jobs[number] = msgspec.structs.replace(job, room=loaded.short)
            return self.take(number)
        del self._jobs[number]
        self.stats.note(loaded)
        return taken(self._cache, loaded, room)

    def release(self, frames: Rows, other_bytes: int) -> None:
        self._cache.release(frames, other_bytes)

    def close(self) -> None:
        self._jobs.clear()

    def _read(self, rows: Sequence[int]) -> ReadSegments:
        given = self._fresh.get(rows)
        self.stats.from_gateway += len(given)
        return read_others(rows, given, self._store_read)


def read_others(rows: Sequence[int], given: Mapping[int, Segment], read: Read) -> ReadSegments:
    """The segments of `rows`: those that are `given`, and the others read."""
    others = [row for row in rows if row not in given]
    if not others:
        return _Both(given, {})
    found = read(others)
    return _Both({**found.segments, **given}, found.damaged, found.elsewhere)


class _Both(msgspec.Struct, frozen=True, eq=False):
    segments: Mapping[int, Segment]
    damaged: Mapping[int, str]
    elsewhere: Sequence[int] = ()


def taken(cache: FrameCache, loaded: Loaded, room: Rows) -> Taken:
    """`loaded` with the frames it used; the others go back."""
    used = loaded.used or (0,) * len(room)
    cache.release(tuple(rows[n:] for rows, n in zip(room, used, strict=True)))
    return Taken(loaded, tuple(rows[:n] for rows, n in zip(room, used, strict=True)))


def no_room(job: LoadJob, cache: FrameCache) -> ConfigError:
    return ConfigError(
        f"a cache of {cache.cap_bytes} bytes, {cache.used_bytes} of them in use, has no room for {job.room} frames of "
        f"{len(job.wanted)} segments: give it more (cache_bytes)."
    )
