"""Memory for decoded frames below one cap: one array for each frame shape, handed out by rows.

The pages come from the kernel when they are first written, so a cache costs what it was ever used for, not its cap.
On Linux they belong to an anonymous file that loading processes map too: a frame is decoded where it stays.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from wire.errors import ConfigError

Rows = tuple[np.ndarray, ...]
"""int32[n] numbers of frames by shape"""


class SharedFrames(msgspec.Struct, frozen=True):
    """What another process needs to see the frames of one shape; the descriptor must be passed on to it."""

    descriptor: int
    rows: int
    shape: tuple[int, int, int]


class FrameCache:
    """Frames of several shapes below one cap. Not for several threads at once."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], cap_bytes: int) -> None:
        """Raises `ConfigError` if `cap_bytes` does not hold one frame of each shape."""
        if sum(h * w * c for h, w, c in shapes) > cap_bytes:
            raise ConfigError(f"a cache of {cap_bytes} bytes does not hold one frame of {list(shapes)}: give it more.")
        self.cap_bytes = cap_bytes
        self._pools = [_Frames(shape, cap_bytes) for shape in shapes]
        self._elsewhere = 0

    @property
    def bytes(self) -> int:
        """`frame_bytes`, and what was charged."""
        return self._elsewhere + self.frame_bytes

    @property
    def frame_bytes(self) -> int:
        """Memory that was ever written and not given back to the kernel."""
        return sum(pool.touched * pool.row_bytes for pool in self._pools)

    @property
    def used_bytes(self) -> int:
        """Frames handed out, and what was charged."""
        return self._elsewhere + sum(pool.used * pool.row_bytes for pool in self._pools)

    def frames(self, shape: int) -> np.ndarray:
        """uint8[rows, h, w, 3] of the whole shape; only rows that were handed out mean something."""
        return self._pools[shape].array

    def reserve(self, counts: Sequence[int], elsewhere: int = 0) -> Rows | None:
        """That many frames of each shape and `elsewhere` bytes of other memory, or None if the cap forbids it now."""
        asked = sum(count * pool.row_bytes for count, pool in zip(counts, self._pools, strict=True))
        if self.used_bytes + asked + elsewhere > self.cap_bytes:
            return None
        fresh = sum(max(0, n - len(pool.warm)) * pool.row_bytes for n, pool in zip(counts, self._pools, strict=True))
        if self.bytes + fresh + elsewhere > self.cap_bytes:
            for pool in self._pools:
                pool.trim()
        self._elsewhere += elsewhere
        return tuple(pool.take(count) for count, pool in zip(counts, self._pools, strict=True))

    def release(self, rows: Rows, elsewhere: int = 0) -> None:
        """Take back frames, and bytes that were charged, that nobody reads any more."""
        self._elsewhere -= elsewhere
        for pool, numbers in zip(self._pools, rows, strict=True):
            pool.warm.extend(numbers.tolist())

    def mappings(self) -> tuple[SharedFrames, ...]:
        """For other processes. Raises `ConfigError` where memory cannot be shared by descriptor."""
        if any(pool.descriptor < 0 for pool in self._pools):
            raise ConfigError("this system shares no memory by descriptor; use workers=0.")
        return tuple(SharedFrames(pool.descriptor, len(pool.array), pool.shape) for pool in self._pools)

    def close(self) -> None:
        """Close the descriptors; the memory goes when nobody refers to its arrays any more."""
        for pool in self._pools:
            pool.close()


def attach(mapping: SharedFrames) -> np.ndarray:
    """uint8[rows, h, w, 3]: the frames of another process's cache."""
    height, width, channels = mapping.shape
    memory = mmap.mmap(mapping.descriptor, _whole_pages(mapping.rows * height * width * channels))
    return _as_frames(memory, mapping.rows, mapping.shape)


class _Frames:
    """The frames of one shape: `warm` rows were written before, `cold` ones were given back to the kernel."""

    def __init__(self, shape: tuple[int, int, int], cap_bytes: int) -> None:
        self.shape = shape
        self.row_bytes = shape[0] * shape[1] * shape[2]
        rows = cap_bytes // self.row_bytes
        size = _whole_pages(rows * self.row_bytes)
        self.descriptor = -1
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("frames")
            os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self.array = _as_frames(self._memory, rows, shape)
        self.warm: list[int] = []
        self._cold: list[int] = []
        self._next = 0

    @property
    def touched(self) -> int:
        return self._next - len(self._cold)

    @property
    def used(self) -> int:
        return self._next - len(self._cold) - len(self.warm)

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
        self.warm.sort()
        self._cold += self.warm
        if hasattr(mmap, "MADV_REMOVE"):
            page = mmap.PAGESIZE
            for first, end in _runs(np.array(self.warm, np.int64)):
                begin = -(-first * self.row_bytes // page) * page
                length = end * self.row_bytes // page * page - begin
                if length > 0:
                    self._memory.madvise(mmap.MADV_REMOVE, begin, length)
        self.warm = []

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """[first, end) of the stretches without gaps in growing int64[n]."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    firsts, lasts = numbers[np.r_[0, cuts]], numbers[np.r_[cuts - 1, len(numbers) - 1]]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def _whole_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _as_frames(memory: mmap.mmap, rows: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.frombuffer(memory, np.uint8, rows * shape[0] * shape[1] * shape[2]).reshape(rows, *shape)
