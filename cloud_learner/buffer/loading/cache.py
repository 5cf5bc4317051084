"""What is in memory: decoded frames below one cap, and the steps of segments.

Frames lie in one array for each shape and are handed out by number. The pages come from the kernel when they are first
written, so a cache costs what it was ever used for, not its cap.

Steps lie in flat arrays in which every window is one contiguous slice. Each segment has an extent: the n steps before
it that its windows may tell of (`history`), its own T steps, then room for the L steps that follow it in its episode
and that its windows may reach into. What follows is filled in when it is there; until then windows end earlier. What
came before is there from the first, its oldest step repeated where no more is known. Extents are put at the end; when
too much of what lies before it was given up, all are moved together.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.loading.layout import AFTER_END, SLACK, Layout
from wire.errors import ConfigError

Rows = tuple[np.ndarray, ...]
"""int32[n] numbers of frames by shape"""
_LEAST_ROWS = 256


class FrameCache:
    """Frames of several shapes below one cap. Not for several threads at once."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], cap_bytes: int) -> None:
        """Raises `ConfigError` if `cap_bytes` does not hold one frame of each shape."""
        if sum(h * w * c for h, w, c in shapes) > cap_bytes:
            raise ConfigError(f"a cache of {cap_bytes} bytes does not hold one frame of {list(shapes)}: give it more.")
        self.cap_bytes = cap_bytes
        self._pools = [_Frames(shape, cap_bytes) for shape in shapes]
        self._charged = 0

    @property
    def bytes(self) -> int:
        """`frame_bytes`, and what was charged."""
        return self._charged + self.frame_bytes

    @property
    def frame_bytes(self) -> int:
        """Memory that was ever written and not given back to the kernel."""
        return sum(pool.touched * pool.row_bytes for pool in self._pools)

    @property
    def used_bytes(self) -> int:
        """Frames handed out, and what was charged."""
        return self._charged + sum((pool.touched - len(pool.warm)) * pool.row_bytes for pool in self._pools)

    def frames(self, shape: int) -> np.ndarray:
        """uint8[rows, h, w, 3] of the whole shape; only rows that were handed out mean something."""
        return self._pools[shape].array

    def reserve(self, counts: Sequence[int], charge: int = 0) -> Rows | None:
        """That many frames of each shape and `charge` bytes of other memory, or None if the cap forbids it now."""
        asked = sum(count * pool.row_bytes for count, pool in zip(counts, self._pools, strict=True))
        if self.used_bytes + asked + charge > self.cap_bytes:
            return None
        fresh = sum(max(0, n - len(pool.warm)) * pool.row_bytes for n, pool in zip(counts, self._pools, strict=True))
        if self.bytes + fresh + charge > self.cap_bytes:
            for pool in self._pools:
                pool.trim()
        self._charged += charge
        return tuple(pool.take(count) for count, pool in zip(counts, self._pools, strict=True))

    def release(self, rows: Rows, charge: int = 0) -> None:
        """Take back frames, and bytes that were charged, that nobody reads any more."""
        self._charged -= charge
        for pool, numbers in zip(self._pools, rows, strict=True):
            pool.warm.extend(numbers.tolist())


class _Frames:
    """The frames of one shape: `warm` rows were written before, cold ones were given back to the kernel."""

    def __init__(self, shape: tuple[int, int, int], cap_bytes: int) -> None:
        self.row_bytes = shape[0] * shape[1] * shape[2]
        rows = cap_bytes // self.row_bytes
        self._memory = mmap.mmap(-1, max(1, rows * self.row_bytes))
        self.array = np.frombuffer(self._memory, np.uint8, rows * self.row_bytes).reshape(rows, *shape)
        self.warm: list[int] = []
        self._cold: list[int] = []
        self._next = 0

    @property
    def touched(self) -> int:
        return self._next - len(self._cold)

    def take(self, count: int) -> np.ndarray:
        """int32[count]: the last one given back comes first, for it is still near the processor."""
        found: list[int] = []
        for free in (self.warm, self._cold):
            some = min(count - len(found), len(free))
            if some:
                found += free[: -some - 1 : -1]
                del free[-some:]
        fresh = count - len(found)
        found += range(self._next, self._next + fresh)
        self._next += fresh
        return np.array(found, np.int32)

    def trim(self) -> None:
        """Give the pages of free frames back; pages that a used frame shares stay."""
        numbers = np.sort(np.array(self.warm, np.int64))
        self._cold += numbers.tolist()
        self.warm = []
        if not hasattr(mmap, "MADV_REMOVE"):
            return
        for stretch in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            first, end = (stretch[0] * self.row_bytes, (stretch[-1] + 1) * self.row_bytes) if len(stretch) else (0, 0)
            begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            length = end // mmap.PAGESIZE * mmap.PAGESIZE - begin
            if length > 0:
                self._memory.madvise(mmap.MADV_REMOVE, int(begin), int(length))


class Extent(msgspec.Struct):
    """Where one segment lies."""

    first: int
    """of its own steps; those before it lie before"""
    own: int
    filled: int
    """its own steps and those after it that are there"""
    frames: Rows
    """int32[n] frames of each shape that are only this segment's"""


class StepCache:
    """Columns of N steps; rows that belong to no extent hold anything. Not for several threads at once.

    Besides a step's own values: `run` int32[N] how many steps from here on follow each other and may be continued over,
    `left` int32[N] how many are there at all, `reach` int32[N] how many ticks later the last observation is that is
    there, `later_reward` float64[N] the rewards from here to the segment's end,
    `group` and `mates` int16[N] where in `eligible_offset` the eligible steps that saw the same frames begin, and how
    many they are (0: no window may begin here), `eligible_offset` int16[N] from the segment's first step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._before = layout.config.history
        self._around = layout.config.history + layout.config.lookahead
        self.columns = {name: np.empty((0, *shape), dtype) for name, (dtype, shape) in layout.columns.items()}
        self._extents: dict[int, Extent] = {}
        """in the order in which they lie"""
        self._end = self._high = self._used = 0

    def __len__(self) -> int:
        """Segments in memory."""
        return len(self._extents)

    def __contains__(self, segment: int) -> bool:
        return segment in self._extents

    @property
    def bytes(self) -> int:
        """Memory that was written and not given back."""
        return self._high * self._layout.row_bytes

    def first_rows(self, segments: np.ndarray) -> np.ndarray:
        """int64[k]: where the int64[k] segments begin, -1 for those that are not in memory."""
        extents = self._extents
        found = [-1 if (extent := extents.get(s)) is None else extent.first for s in segments.tolist()]
        return np.array(found, np.int64)

    def insert(self, segment: int, records: np.ndarray, own: int, frames: Rows) -> None:
        """`records`: the layout's record of the n steps before, of `own` steps and of what is there of the L after."""
        first = self._allocate(own + self._around) + self._before
        extent = Extent(first, own, len(records) - self._before, frames)
        self._extents[segment] = extent
        self._write(first - self._before, records)
        reward = self.columns["reward"][first : first + own].astype(np.float64)
        self.columns["later_reward"][first : first + own] = np.cumsum(reward[::-1])[::-1]
        self._group(first, records[self._before : self._before + own])
        self._link(extent)

    def update(self, segment: int, records: np.ndarray) -> None:
        """Replace what is known of a segment's steps and of at most L after it, in `records`, but for their frames."""
        extent = self._extents[segment]
        extent.filled = len(records)
        self._write(extent.first, records, but="frame")
        self._link(extent)

    def drop(self, segment: int) -> Extent:
        """Forget a segment; its frames are the caller's to release."""
        extent = self._extents.pop(segment)
        self._used -= extent.own + self._around
        if len(self.columns["run"]) > max(_LEAST_ROWS, 4 * self._used):
            self._close_gaps()
            self._resize(max(_LEAST_ROWS, 2 * self._end))
        return extent

    # --- what follows from the steps ------------------------------------------------------------------------------

    def _write(self, first: int, records: np.ndarray, but: str = "") -> None:
        for name in records.dtype.names or ():
            if name in self.columns and name != but:
                self.columns[name][first : first + len(records)] = records[name]

    def _link(self, extent: Extent) -> None:
        """`run` and `left` of all filled steps."""
        here = slice(extent.first, extent.first + extent.filled)
        position = np.arange(extent.filled, dtype=np.int32)
        ends = np.where(self.columns["continues"][here], np.int32(extent.filled), position)
        # the nearest step from here on that a window must not go over
        self.columns["run"][here] = np.minimum.accumulate(ends[::-1])[::-1] - position
        steps = extent.filled - (self.columns["end"][here][-1:] == AFTER_END).sum(dtype=np.int32)
        self.columns["left"][here] = steps - position
        self.columns["reach"][here] = extent.filled - 1 - position

    def _group(self, first: int, own: np.ndarray) -> None:
        """Eligible steps side by side, those that saw the same frames in one group."""
        mine = slice(first, first + len(own))
        self.columns["mates"][mine] = 0
        eligible = np.flatnonzero(own["eligible"] & (own["frame"] >= 0).all(1))
        if not len(eligible):
            return
        frames = own["frame"][eligible]
        # without cameras each step is alone
        begins = np.r_[True, (frames[1:] != frames[:-1]).any(1) | (frames.shape[1] == 0)]
        starts = np.flatnonzero(begins)
        counts = np.diff(np.r_[starts, len(eligible)])
        number = np.cumsum(begins) - 1
        self.columns["eligible_offset"][first : first + len(eligible)] = eligible
        self.columns["group"][first + eligible] = starts[number]
        self.columns["mates"][first + eligible] = counts[number]

    # --- extents --------------------------------------------------------------------------------------------------

    def _allocate(self, room: int) -> int:
        self._used += room
        if self._end + room > max(_LEAST_ROWS, self._used * SLACK):
            self._close_gaps()
        first = self._end
        self._end += room
        if self._end > (capacity := len(self.columns["run"])):
            self._resize(max(self._end, _LEAST_ROWS, capacity + capacity // 2))
        self._high = max(self._high, self._end)
        return first

    def _close_gaps(self) -> None:
        to = 0
        for extent in self._extents.values():
            begin, room = extent.first - self._before, extent.own + self._around
            if begin != to:
                for column in self.columns.values():
                    # numpy copies overlapping slices as if through a buffer
                    column[to : to + room] = column[begin : begin + room]
                extent.first = to + self._before
            to += room
        self._end = to

    def _resize(self, rows: int) -> None:
        self._high = min(self._high, rows)
        for column in self.columns.values():
            # in place where the allocator can; nobody holds a view over an insert or drop
            column.resize((rows, *column.shape[1:]), refcheck=False)
