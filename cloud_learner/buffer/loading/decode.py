"""Brings segments into memory: reads it, decodes the frames that windows may show, says what each step saw.

Only frames that a step saw at which a window may begin are decoded, and those of the steps that such a window tells of
as its past, or leads to (`n_step`). A frame that an earlier segment brought is looked for there; what follows a segment
is read as far as its windows may reach.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import simplejpeg

from cloud_learner.buffer.check import traces_of
from cloud_learner.buffer.control import POLICY, arrival_lag, marked_actor
from cloud_learner.buffer.loading.cache import Rows
from cloud_learner.buffer.loading.layout import (
    AFTER_END,
    NO_FRAME,
    NO_TRACE,
    TERMINATED,
    TRUNCATED,
    UNREADABLE_FRAME,
    Layout,
)
from cloud_learner.buffer.store.store import ReadResult
from wire.messages.gateway import Segment

CARRY_BACK = 16
"""how many segments back a frame that a step saw is looked for"""

_ROUNDING_NS = 1000
"""of a time that was told as ticks"""

Read = Callable[[Sequence[int]], ReadResult]
"""The segments of ledger rows; rows that are gone are simply absent. Raises `StorageError`."""
Reserve = Callable[[Sequence[int], np.ndarray], Rows]
"""Memory for so many frames of each shape and for segments of int64[k] steps; waits for it."""


class SegmentRequest(msgspec.Struct, frozen=True):
    """One segment to bring into memory."""

    row: int
    before: tuple[int, ...] = ()
    """ledger rows of the segments before it, nearest first"""
    after: tuple[int, ...] = ()
    """ledger rows of those after it, as far as its windows may reach"""
    newest_versions: tuple[int, ...] = ()
    """of the fleet when it and those after it arrived, with a target that has a `staleness`"""
    frames: bool = True
    """False: its frames and what came before it are in memory and stay; all else is to be brought up to date"""


class LoadedSteps(msgspec.Struct, frozen=True, eq=False):
    """One segment, loaded."""

    request: SegmentRequest
    own: int
    """how many of the steps are its own"""
    frames: Rows
    """what it takes of the memory for frames"""
    records: np.ndarray
    """the layout's records: the `history` steps before it if its frames were asked for, its own, those after it"""


class Loaded(msgspec.Struct, frozen=True, eq=False):
    """What came of requests."""

    segments: tuple[LoadedSteps, ...]
    damaged: dict[int, str]
    """ledger row: why it cannot be read. What is neither here nor loaded was pruned, or lies elsewhere"""
    elsewhere: tuple[int, ...]
    """ledger rows, neighbours included, that can be read later, when another machine has sealed them"""
    unreadable: dict[int, int]
    """ledger row: how many frames that its steps saw cannot be decoded"""
    held: dict[int, str]
    """ledger row, neighbours included: id of the segment of which pictures would be shown that a relay holds back"""


class FreshSegments:
    """Segments that came straight from the gateway, the newest below a number of bytes: they need not be read."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self.given = 0
        """segments that had not to be read"""
        self._segments: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, row: int, segment: Segment) -> None:
        if any(frames.sha256 for frames in segment.frames.values()):
            # its pictures may come, and then the store has them
            return
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
            found = {row: self._segments[row][0] for row in rows if row in self._segments}
            self.given += len(found)
            return found


def load_segments(
    wanted: Sequence[SegmentRequest], reserve: Reserve, frames: Sequence[np.ndarray], read: Read, layout: Layout
) -> Loaded:
    """Load what is wanted, writing decoded frames to what was reserved of `frames` (uint8[rows, h, w, 3] by shape).

    Raises `StorageError` if the store cannot be read at all.
    """
    block = _Block(read, layout)
    # in one go: an object store answers many requests in the time of one
    block.read([row for w in wanted for row in (w.row, *w.before[: int(w.frames)], *w.after)])
    there = [w for w in wanted if w.row in block.segments]
    records = [block.records(w) for w in there]
    seen = [block.frames_seen(w, steps) if w.frames else [] for w, steps in zip(there, records, strict=True)]
    needed = np.zeros((len(there), len(layout.shapes)), np.int64)
    for number, views in enumerate(seen):
        for c, view in enumerate(views):
            needed[number, layout.shape_of[c]] += sum(image is not None for image in view.images)
    # all that can fail has been done, but for decoding
    own = np.array([block.segments[w.row].steps for w in there if w.frames], np.int64)
    room = reserve(needed.sum(0).tolist(), own)
    decoded: list[dict[bytes, int]] = [{} for _ in layout.shapes]
    segments: list[LoadedSteps] = []
    unreadable: dict[int, int] = {}
    for w, steps, views, count, end in zip(there, records, seen, needed, np.cumsum(needed, 0), strict=True):
        mine = tuple(rows[last - some : last] for rows, some, last in zip(room, count, end, strict=True))
        free = [iter(rows.tolist()) for rows in mine]
        for c, view in enumerate(views):
            shape = layout.shape_of[c]
            numbers = _decode(view.images, free[shape], frames[shape], decoded[shape])
            steps["frame"][view.steps, c] = numbers[view.which]
            if torn := int((numbers == UNREADABLE_FRAME).sum()):
                unreadable[w.row] = unreadable.get(w.row, 0) + torn
        segments.append(LoadedSteps(w, block.segments[w.row].steps, mine, steps))
    return Loaded(
        tuple(segments),
        damaged={w.row: block.damaged[w.row] for w in wanted if w.row in block.damaged},
        elsewhere=tuple(sorted(block.elsewhere)),
        unreadable=unreadable,
        held=block.held,
    )


def _decode(
    images: Sequence[bytes | None], free: Iterator[int], frames: np.ndarray, decoded: dict[bytes, int]
) -> np.ndarray:
    """int32[n]: the number in `frames` of each of n images, or why it has none. What is in `decoded` is only copied."""
    found = np.full(len(images), NO_FRAME, np.int32)
    for position, image in enumerate(images):
        if image is None:
            continue
        number = next(free)
        if image not in decoded:
            decoded[image] = number if _decode_into(image, frames[number]) else UNREADABLE_FRAME
        elif decoded[image] != UNREADABLE_FRAME:
            frames[number] = frames[decoded[image]]
        found[position] = UNREADABLE_FRAME if decoded[image] == UNREADABLE_FRAME else number
    return found


def records_of(
    segment: Segment, layout: Layout, labels: np.ndarray | None = None, newest_version: int | None = None
) -> np.ndarray:
    """record[T] of a segment's steps; `eligible` says where windows may begin if all frames are there.

    One more for the observation after the episode's last step, if it is kept. `labels`: float32[T, L] of its steps.
    `newest_version`: of the fleet when it arrived, where the target goes by it.
    """
    after_end = segment.terminal if layout.config.n_step else None
    found = np.zeros(segment.steps + (after_end is not None), layout.record)
    own = found[: segment.steps]
    source = int(segment.episode.source == "demonstration")
    own["state"], own["executed"] = segment.state, segment.executed
    own["reward"], own["actor"], own["version"] = segment.reward, marked_actor(segment), segment.version
    own["delay"] = segment.delay_ticks
    own["end"] = np.where(segment.terminated, TERMINATED, np.where(segment.truncated, TRUNCATED, 0))
    own["continues"] = layout.continues[source, own["actor"]]
    own["eligible"] = layout.starts[source, own["actor"]]
    if newest_version is not None:
        own["arrival_lag"] = arrival_lag(segment.version, newest_version)
        if (bound := layout.config.target.leaves_out_stale) is not None:
            fresh = ~bound.is_stale(segment.actor, bool(source), own["arrival_lag"])
            own["continues"] &= fresh
            own["eligible"] &= fresh
    found["frame"], found["label"] = NO_FRAME, np.nan
    if labels is not None:
        own["label"] = labels
    for c, camera in enumerate(layout.cameras):
        own["frame_time"][:, c] = segment.frame_times_ns[camera]
    if layout.config.traces:
        found["trace_step"] = NO_TRACE
        _put_traces(own, segment, layout)
    if layout.cameras:
        own["frame_age"] = (segment.times_ns - own["frame_time"].min(1)) / layout.period_ns
    if after_end is not None:
        found["state"][-1], found["end"][-1] = after_end.state, AFTER_END
        found["frame_time"][-1] = [after_end.frame_times_ns[camera] for camera in layout.cameras]
    return found


def _put_traces(own: np.ndarray, segment: Segment, layout: Layout) -> None:
    """Write the traces of a segment's chunks to their first steps in its record[T], if they have as many points as are
    asked for, and their probability is known."""
    chunks = {chunk.first_tick: chunk for chunk in segment.chunks}
    begun = Counter(chunk.first_tick for chunk in segment.chunks)
    for trace in traces_of(segment):
        chunk = chunks[trace.first_tick]
        if begun[trace.first_tick] > 1:
            # steps say the tick of their chunk, and there are two
            continue
        if trace.points.shape != own.dtype["trace_points"].shape or not np.isfinite(chunk.log_prob):
            continue
        by_it = np.flatnonzero((segment.chunk_tick == chunk.first_tick) & (segment.actor == POLICY))
        if not len(by_it):
            continue
        first = by_it[0]
        own["chunk_back"][by_it] = by_it - first
        own["trace_points"][first], own["trace_state"][first] = trace.points, trace.state
        own["trace_age"][first], own["trace_step"][first] = trace.age_ticks, trace.step
        own["trace_log_prob"][first] = chunk.log_prob
        if layout.cameras:
            looked_ns = chunk.observed_ns - round(trace.age_ticks * layout.period_ns) + _ROUNDING_NS
            own["trace_lead"][first] = (own["frame_time"][: first + 1].min(1) > looked_ns).sum()


class _Seen(msgspec.Struct, frozen=True, eq=False):
    """The different frames of one camera that windows of a segment show."""

    steps: np.ndarray
    """int64[m]: positions among the segment's records of those that are shown"""
    which: np.ndarray
    """int64[m]: index into `images` of what each saw"""
    images: list[bytes | None]
    """None where the frame never came, or is held back"""


class _Block:
    """Segments that were read, with their neighbours."""

    def __init__(self, read: Read, layout: Layout) -> None:
        self._read, self._layout = read, layout
        self.segments: dict[int, Segment] = {}
        self.damaged: dict[int, str] = {}
        self.elsewhere: set[int] = set()
        self.held: dict[int, str] = {}
        self._asked: set[int] = set()
        self._labels: dict[int, np.ndarray] = {}

    def read(self, rows: Sequence[int]) -> None:
        fresh = [row for row in dict.fromkeys(rows) if row not in self._asked]
        if not fresh:
            return
        self._asked.update(fresh)
        found = self._read(fresh)
        self.segments.update(found.segments)
        self._labels.update(found.labels)
        self.damaged.update(found.damaged)
        self.elsewhere.update(found.elsewhere)

    def records(self, wanted: SegmentRequest) -> np.ndarray:
        """Of the steps before `wanted`, if its frames are wanted, its own, and of those after it.

        Before it are the `history` of them, the oldest known one repeated; after it those that its windows may reach,
        up to the first segment that is missing.
        """
        newest = wanted.newest_versions or (None,) * (1 + len(wanted.after))
        parts, left = [self._of(wanted.row, newest[0])], self._layout.config.lookahead
        for row, newest_version in zip(wanted.after, newest[1:], strict=True):
            if row not in self.segments or left <= 0:
                break
            parts.append(self._of(row, newest_version)[:left])
            left -= len(parts[-1])
        left = self._layout.config.history if wanted.frames else 0
        for row in wanted.before:
            if left <= 0:
                break
            self.read([row])
            if row not in self.segments:
                break
            parts.insert(0, self._of(row)[-left:])
            parts[0]["eligible"] = False
            left -= len(parts[0])
        known = np.concatenate(parts)
        oldest = known[:1].copy() if len(known) else np.zeros(1, known.dtype)
        oldest["eligible"] = False
        return np.concatenate([np.repeat(oldest, left), known]) if left else known

    def _of(self, row: int, newest_version: int | None = None) -> np.ndarray:
        return records_of(self.segments[row], self._layout, self._labels.get(row), newest_version)

    def frames_seen(self, wanted: SegmentRequest, records: np.ndarray) -> list[_Seen]:
        """By camera, of its `records`. Segments before `wanted` are read as far back as a frame must be looked for."""
        history, n_step = self._layout.config.history, self._layout.config.n_step
        starts = history + np.flatnonzero(records["eligible"][history : history + self.segments[wanted.row].steps])
        steps = np.unique(starts[:, None] - np.arange(history + 1))
        if n_step:
            steps = np.union1d(steps, np.minimum(starts + n_step, len(records) - 1))
        found = []
        for c, camera in enumerate(self._layout.cameras):
            times, which = np.unique(records["frame_time"][steps, c], return_inverse=True)
            images: dict[int, bytes | None] = {}
            for row in (wanted.row, *wanted.after) if n_step else (wanted.row,):
                self._look(images, row, camera, times)
            back = 0
            while len(images) < len(times) and back < len(wanted.before):
                # most often the first one has it
                some = wanted.before[back : max(1, 2 * back)]
                self.read(some)
                for row in some:
                    self._look(images, row, camera, times)
                back = max(1, 2 * back)
            found.append(_Seen(steps, which, [images.get(time) for time in times.tolist()]))
        return found

    def _look(self, images: dict[int, bytes | None], row: int, camera: str, times: np.ndarray) -> None:
        if row not in self.segments or (brought := self.segments[row].frames.get(camera)) is None:
            return
        for number in np.flatnonzero(np.isin(brought.times_ns, times)).tolist():
            if brought.sha256:
                self.held[row] = self.segments[row].id
            images.setdefault(int(brought.times_ns[number]), None if brought.sha256 else brought.encoded[number])


def _decode_into(image: bytes, to: np.ndarray) -> bool:
    """Whether `image` is a JPEG of the size of `to`, uint8[h, w, 3] RGB."""
    try:
        return bool(simplejpeg.decode_jpeg(image, "RGB", buffer=to).shape == to.shape)
    except ValueError:
        return False
