"""Brings segments into memory: reads it, decodes the frames that windows may show, says what each step saw.

Only frames that a step saw at which a window may begin are decoded, and those of the steps that such a window tells of
as its past, or leads to (`n_step`). A frame that an earlier segment brought is looked for there; what follows a segment
is read as far as its windows may reach.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import simplejpeg

from cloud_learner.buffer.loading.cache import Rows
from cloud_learner.buffer.loading.layout import AFTER_END, NO_FRAME, TERMINATED, TRUNCATED, UNREADABLE_FRAME, Layout
from cloud_learner.buffer.store.store import ReadResult
from wire.messages.gateway import Segment

CARRY_BACK = 16
"""how many segments back a frame that a step saw is looked for"""

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


class LoadJob(msgspec.Struct, frozen=True):
    """What is loaded together."""

    number: int
    """0, 1, 2, ... in the order of need"""
    wanted: tuple[SegmentRequest, ...]
    follow: tuple[SegmentRequest, ...] = ()
    """segments in memory of which only what follows is wanted"""


class LoadedSteps(msgspec.Struct, frozen=True, eq=False):
    """One segment, loaded."""

    row: int
    own: int
    """how many of the steps are its own; the others follow it, or are the `Layout.history` steps before it"""
    records: np.ndarray
    """the layout's records: before, own, after"""


class Loaded(msgspec.Struct, frozen=True, eq=False):
    """A job that was done."""

    segments: tuple[LoadedSteps, ...] = ()
    follow: tuple[LoadedSteps, ...] = ()
    unused: Rows = ()
    """frames that were reserved and not written"""
    missing: dict[int, str] = {}
    """ledger row: why it could not be read"""
    elsewhere: tuple[int, ...] = ()
    """those of the missing ones that can be read later, when another machine has sealed them"""
    unreadable_frames: int = 0
    unreadable_in: tuple[int, ...] = ()
    """ledger rows of the segments whose steps saw those"""


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


def load_segments(job: LoadJob, reserve: Reserve, frames: Sequence[np.ndarray], read: Read, layout: Layout) -> Loaded:
    """Do `job`, writing decoded frames to what was reserved of `frames` (uint8[rows, h, w, 3] by shape).

    Raises `StorageError` if the store cannot be read at all.
    """
    block = _Block(read, layout)
    # in one go: an object store answers many requests in the time of one
    wanted = [row for w in job.wanted for row in (w.row, *w.before[:1], *w.after)]
    block.read([*wanted, *(row for w in job.follow for row in w.after)])
    there = [w for w in job.wanted if w.row in block.segments]
    seen = [block.frames_seen(w) for w in there]
    needed = [0] * len(layout.shapes)
    for views in seen:
        for c, view in enumerate(views):
            needed[layout.shape_of[c]] += sum(image is not None for image in view.images)
    # all that can fail has been done, but for decoding
    steps = np.array([block.segments[w.row].steps for w in there], np.int64)
    decoder = _Decoder(reserve(needed, steps), frames, layout)
    segments, unreadable_in = [], []
    for w, views in zip(there, seen, strict=True):
        segment = block.segments[w.row]
        records = block.with_following(block.with_past(w), w.after)
        for c, view in enumerate(views):
            numbers = [
                decoder.decode(segment.episode.id, c, t, image)
                for t, image in zip(view.times.tolist(), view.images, strict=True)
            ]
            if UNREADABLE_FRAME in numbers:
                unreadable_in.append(w.row)
            records["frame"][view.steps, c] = np.array(numbers, np.int32)[np.searchsorted(view.times, view.saw)]
        segments.append(LoadedSteps(w.row, segment.steps, records))
    nothing = np.zeros(0, layout.record)
    return Loaded(
        tuple(segments),
        tuple(LoadedSteps(w.row, 0, block.with_following(nothing, w.after)) for w in job.follow),
        unused=decoder.unused,
        missing={w.row: block.missing[w.row] for w in job.wanted if w.row in block.missing},
        elsewhere=tuple(sorted(block.elsewhere)),
        unreadable_frames=decoder.unreadable,
        unreadable_in=tuple(unreadable_in),
    )


class _Seen(msgspec.Struct, frozen=True, eq=False):
    """The different frames of one camera that windows of a segment show."""

    steps: np.ndarray
    """int64[m]: positions among the steps before the segment, its own and those after it that are shown"""
    saw: np.ndarray
    """int64[m]: time of the frame that each saw"""
    times: np.ndarray
    """int64[n], growing: the different ones of them"""
    images: list[bytes | None]
    """None where the frame never came"""


def records_of(segment: Segment, layout: Layout, labels: np.ndarray | None = None) -> np.ndarray:
    """record[T] of a segment's steps; `eligible` says where windows may begin if all frames are there.

    One more for the observation after the episode's last step, if it is kept. `labels`: float32[T, layout.labels].
    """
    after_end = segment.terminal if layout.n_step else None
    found = np.zeros(segment.steps + (after_end is not None), layout.record)
    own = found[: segment.steps]
    demonstration = segment.episode.source == "demonstration"
    own["state"], own["executed"] = segment.state, segment.executed
    own["reward"], own["actor"], own["version"] = segment.reward, segment.actor, segment.version
    own["delay"] = segment.delay_ticks
    own["end"] = np.where(segment.terminated, TERMINATED, np.where(segment.truncated, TRUNCATED, 0))
    own["continues"] = np.array(layout.continues[demonstration])[segment.actor]
    own["eligible"] = np.array(layout.starts[demonstration])[segment.actor]
    found["frame"], found["label"] = NO_FRAME, np.nan
    if labels is not None:
        own["label"] = labels
    if layout.cameras:
        oldest = np.min([segment.frame_times_ns[camera] for camera in layout.cameras], axis=0)
        own["frame_age"] = (segment.times_ns - oldest) / layout.period_ns
    if after_end is not None:
        found["state"][-1], found["end"][-1] = after_end.state, AFTER_END
    return found


def _frame_times(segment: Segment, layout: Layout, camera: str) -> np.ndarray:
    """int64[k]: time of the frame that each step of `records_of` saw."""
    times = segment.frame_times_ns[camera]
    if layout.n_step and segment.terminal:
        return np.append(times, segment.terminal.frame_times_ns[camera])
    return times


class _Block:
    """Segments that were read, with their neighbours."""

    def __init__(self, read: Read, layout: Layout) -> None:
        self._read, self._layout = read, layout
        self.segments: dict[int, Segment] = {}
        self.missing: dict[int, str] = {}
        self.elsewhere: set[int] = set()
        self._labels: dict[str, np.ndarray] = {}

    def read(self, rows: Sequence[int]) -> None:
        fresh = [row for row in dict.fromkeys(rows) if row not in self.segments and row not in self.missing]
        if not fresh:
            return
        found = self._read(fresh)
        self.segments.update(found.segments)
        self._labels.update((found.segments[row].id, labels) for row, labels in found.labels.items())
        self.elsewhere.update(found.elsewhere)
        for row in fresh:
            if row not in found.segments:
                self.missing[row] = found.damaged.get(row, "it is not there (any more, or not yet)")

    def with_following(self, own: np.ndarray, after: Sequence[int]) -> np.ndarray:
        """`own` and the records of what follows, up to the look-ahead or the first segment that is missing."""
        return np.concatenate([own, *self._following(after, self._records)])

    def _following(self, after: Sequence[int], values: Callable[[Segment], np.ndarray]) -> list[np.ndarray]:
        parts, left = [], self._layout.lookahead
        for row in after:
            if row not in self.segments or left <= 0:
                break
            parts.append(values(self.segments[row])[:left])
            left -= len(parts[-1])
        return parts

    def _records(self, segment: Segment) -> np.ndarray:
        return records_of(segment, self._layout, self._labels.get(segment.id))

    def with_past(self, wanted: SegmentRequest) -> np.ndarray:
        """Records of the `history` steps before `wanted` and of its own; the oldest known is repeated."""
        own = self._records(self.segments[wanted.row])
        if not self._layout.history:
            return own
        parts = [own]
        for segment, steps in self._before(wanted):
            parts.insert(0, self._records(segment)[segment.steps - steps :])
        records = _padded(parts, self._layout.history + len(own))
        records["eligible"][: self._layout.history] = False
        return records

    def _before(self, wanted: SegmentRequest) -> Iterator[tuple[Segment, int]]:
        """Segments before `wanted`, nearest first, each with how many of its last steps belong to the history."""
        left = self._layout.history
        for row in wanted.before:
            if left <= 0:
                return
            self.read([row])
            if row not in self.segments:
                return
            yield self.segments[row], min(left, self.segments[row].steps)
            left -= self.segments[row].steps

    def _times(self, wanted: SegmentRequest, camera: str) -> np.ndarray:
        """int64[k]: time of the frame that each step of `with_past` saw, and of those that follow if that matters."""
        layout = self._layout
        parts = [_frame_times(self.segments[wanted.row], layout, camera)]
        own = len(parts[0])
        if layout.history:
            for segment, steps in self._before(wanted):
                parts.insert(0, segment.frame_times_ns[camera][segment.steps - steps :])
            parts = [_padded(parts, layout.history + own)]
        if layout.n_step:
            parts += self._following(wanted.after, lambda segment: _frame_times(segment, layout, camera))
        return np.concatenate(parts)

    def frames_seen(self, wanted: SegmentRequest) -> list[_Seen]:
        """By camera. Segments before `wanted` are read as far back as a frame has to be looked for."""
        segment, history = self.segments[wanted.row], self._layout.history
        startable = np.array(self._layout.starts[segment.episode.source == "demonstration"])[segment.actor]
        within = np.flatnonzero(_and_before(startable, history))
        found = []
        for camera in self._layout.cameras:
            all_times = self._times(wanted, camera)
            steps = within
            if self._layout.n_step:
                later = history + np.flatnonzero(startable) + self._layout.n_step
                steps = np.union1d(steps, np.minimum(later, len(all_times) - 1))
            saw = all_times[steps]
            times = np.unique(saw)
            images: dict[int, bytes] = {}
            for row in (wanted.row, *wanted.after) if self._layout.n_step else (wanted.row,):
                self._look(images, row, camera, times)
            back = 0
            while len(images) < len(times) and back < len(wanted.before):
                # most often the first one has it
                self.read(wanted.before[back : max(1, 2 * back)])
                for row in wanted.before[back : max(1, 2 * back)]:
                    self._look(images, row, camera, times)
                back = max(1, 2 * back)
            found.append(_Seen(steps, saw, times, [images.get(time) for time in times.tolist()]))
        return found

    def _look(self, images: dict[int, bytes], row: int, camera: str, times: np.ndarray) -> None:
        if row not in self.segments or (brought := self.segments[row].frames.get(camera)) is None:
            return
        for number in np.flatnonzero(np.isin(brought.times_ns, times)).tolist():
            images.setdefault(int(brought.times_ns[number]), brought.encoded[number])


def _padded(parts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """`parts` in a row, as many of the first before them as make `length`; zeros for a segment without steps."""
    known = np.concatenate(parts)
    first = known[:1] if len(known) else np.zeros(1, known.dtype)
    return np.concatenate([np.repeat(first, length - len(known)), known])


def _and_before(startable: np.ndarray, history: int) -> np.ndarray:
    """bool[history + T]: the steps that bool[T] `startable` names and those up to `history` before one."""
    if not history:
        return startable
    count = np.concatenate([np.zeros(history + 1, np.int64), np.cumsum(startable)])
    until = np.minimum(np.arange(history + len(startable)) + history + 1, len(count) - 1)
    return count[until] > count[:-1]


class _Decoder:
    """Decodes each frame once, into the next free row; a segment that saw the same frame gets a copy."""

    def __init__(self, room: Rows, frames: Sequence[np.ndarray], layout: Layout) -> None:
        self._room, self._frames, self._layout = room, frames, layout
        self._known: dict[tuple[str, int, int], int] = {}
        self._used = [0] * len(layout.shapes)
        self.unreadable = 0

    @property
    def unused(self) -> Rows:
        """What is left of the room."""
        return tuple(rows[used:] for rows, used in zip(self._room, self._used, strict=True))

    def decode(self, episode: str, camera: int, time_ns: int, image: bytes | None) -> int:
        """Number of the frame in the memory of its shape, or why there is none."""
        if image is None:
            return NO_FRAME
        shape = self._layout.shape_of[camera]
        number = int(self._room[shape][self._used[shape]])
        to = self._frames[shape][number]
        key = (episode, camera, time_ns)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = number if _decode_into(image, to) else UNREADABLE_FRAME
            if known == UNREADABLE_FRAME:
                self.unreadable += 1
        if known == UNREADABLE_FRAME:
            return known
        if known != number:
            to[:] = self._frames[shape][known]
        self._used[shape] += 1
        return number


def _decode_into(image: bytes, to: np.ndarray) -> bool:
    """Whether `image` is a JPEG of the size of `to`, uint8[h, w, 3] RGB."""
    try:
        return bool(simplejpeg.decode_jpeg(image, "RGB", buffer=to).shape == to.shape)
    except ValueError:
        return False
