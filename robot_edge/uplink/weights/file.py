"""The file of a version that is wanted, for the thread that may wait for the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from robot_edge.runtime.memory import available_memory
from robot_edge.uplink.weights.cache import COMING, REBUILT, STAYS_FREE_BYTES, WeightCache
from robot_edge.uplink.weights.plan import FetchPlan, Offer, Part
from wire.errors import WeightsError
from wire.weights.delta import apply, read_frames

_CHECKED_AT_ONCE = 8 * 1024 * 1024


class Found(NamedTuple):
    """What is here before anything of a version is fetched."""

    whole: bool
    """a file of its name, which is still to be checked"""
    held: dict[int, str]
    """as of `WeightCache`"""
    fault: str
    """why it cannot be had here, "" when it can"""


class Begun(NamedTuple):
    """What is here of what a plan brings."""

    position: int
    """the byte that is wanted first"""
    fault: str
    """why there is no room for the rest, "" when there is"""


class Appended(NamedTuple):
    """What became of a part."""

    position: int
    """the next byte that is wanted: behind the part, or where a chunk begins that was wrong"""
    done: bool = False
    """the version is here, and right"""
    wrong_chunk: bool = False
    """a chunk is not what it should be"""
    wrong_whole: bool = False
    """all of it has come, and makes something else"""


class WeightFile:
    """Written as it comes, or read to be checked. Raises `OSError`.

    What came of it stays when the process is killed, and is gone on with as far as its chunks are right.
    """

    def __init__(self, cache: WeightCache, offer: Offer) -> None:
        self.path = cache.path(offer)
        self._cache, self._offer, self._version = cache, offer, offer.version
        self._coming = self.path.with_suffix(COMING)
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._plan = FetchPlan(())

    def look(self) -> Found:
        """What is here of it, and of others."""
        if self.path.exists():
            return Found(True, {}, "")
        return Found(False, self._cache.held(), self._memory_fault())

    def begin(self, plan: FetchPlan) -> Begun:
        """Take in what comes by `plan`, and make room for it."""
        self._close()
        self._plan = plan
        name = f"{self.path.stem}.from-{plan.base.partition('.')[0]}" if plan.base else self.path.stem
        self._coming = self.path.with_name(name + COMING)
        for other in self.path.parent.glob(f"*{COMING}"):
            if other != self._coming:
                other.unlink()
        position = self._resume()
        return Begun(position, self._disk_fault(plan.size_bytes - position))

    def append(self, part: Part, position: int, data: bytes) -> Appended | None:
        """Write what comes next, from `position` on; None for what was asked for behind a chunk that was wrong."""
        file = self._open(self._coming, "ab")
        if file.tell() != position:
            return None
        file.write(data)
        position = file.tell()
        self._sha256.update(data)
        self._chunk.update(data)
        if part.ends_chunk:
            if part.chunk and self._chunk.digest() != part.chunk:
                self._close()
                begin = self._plan.chunk_begin(position - 1)
                os.truncate(self._coming, begin)
                # the hash of the whole has what was wrong in it
                return Appended(self._resume(), wrong_chunk=True)
            self._chunk = hashlib.sha256()
        if position < self._plan.size_bytes:
            return Appended(position)
        self._close()
        right = self._rebuild() if self._plan.base else self._sha256.hexdigest() == self._version.sha256
        if not right:
            self._coming.unlink()
            return Appended(self._resume(), wrong_whole=True)
        self._coming.rename(self.path)
        self._cache.hand_out(self._offer)
        return Appended(position, done=True)

    def check(self) -> bool | None:
        """Read on in the file that is here, for other things may have to be done; in the end whether it is right."""
        data = self._open(self.path, "rb").read(_CHECKED_AT_ONCE)
        self._sha256.update(data)
        if len(data) == _CHECKED_AT_ONCE:
            return None
        self._close()
        right = self._sha256.hexdigest() == self._version.sha256
        if right:
            self._cache.hand_out(self._offer)
        return right

    def drop(self) -> None:
        """It is wanted no more; what came of it goes."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._coming.unlink(missing_ok=True)

    # --- inside -------------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Drop what is behind the last chunk that is known to be right, and hash what is before that."""
        self._sha256, self._chunk = hashlib.sha256(), hashlib.sha256()
        position = 0
        if self._coming.exists():
            with self._coming.open("rb") as file:
                while position < self._plan.size_bytes:
                    part = self._plan.part(position, self._plan.size_bytes)
                    data = file.read(part.size)
                    if not part.chunk or hashlib.sha256(data).digest() != part.chunk:
                        break
                    self._sha256.update(data)
                    position += part.size
            if position == self._plan.size_bytes:
                # all but the last step: of one byte it is asked for once more
                position = self._plan.chunk_begin(position - 1)
                return self._cut(position)
            os.truncate(self._coming, position)
        return position

    def _cut(self, position: int) -> int:
        os.truncate(self._coming, position)
        return self._resume()

    def _rebuild(self) -> bool:
        """Apply the deltas that came to a copy of their base; whether that is the version."""
        rebuilt = self.path.with_suffix(REBUILT)
        try:
            shutil.copyfile(self.path.with_name(self._plan.base), rebuilt)
            target = np.memmap(rebuilt, np.uint8, "r+")
            with self._coming.open("rb") as file:
                apply(target, read_frames(file))
            right = hashlib.sha256(target.data).hexdigest() == self._version.sha256
            target.flush()
        except (WeightsError, FileNotFoundError, ValueError):
            right = False
        except OSError:
            rebuilt.unlink(missing_ok=True)  # a disk that is full, say, has that room again
            raise
        if right:
            rebuilt.replace(self._coming)
        else:
            rebuilt.unlink(missing_ok=True)
        return right

    def _memory_fault(self) -> str:
        # What reads the file has its bytes and the tensors in them at once; what acts keeps what it has meanwhile.
        needed, (available, where) = 2 * self._version.size_bytes, available_memory()
        if needed <= available:
            return ""
        return (
            f"version {self._version.number} needs {_mb(needed)} of memory, for its file and the tensors in it while "
            f"it is loaded beside the one that acts, and {_mb(available)} are available ({where}): end other programs, "
            "allow this one more, choose a smaller policy, or run it on another computer (`--think`)."
        )

    def _disk_fault(self, coming_bytes: int) -> str:
        needed, what = coming_bytes, "its file"
        if self._plan.base:
            needed, what = needed + self._version.size_bytes, "deltas and the file that they make"
        if self._cache.make_room(needed, (self.path.name, self._plan.base)):
            return ""
        return (
            f"version {self._version.number} needs {_mb(needed)} below {self.path.parent} for {what}, besides "
            f"{_mb(STAYS_FREE_BYTES)} that stay free, and {_mb(self._cache.free_bytes())} are free there: free some "
            "room, or choose a --data directory on a larger disk."
        )

    def _open(self, path: Path, mode: str) -> BinaryIO:
        if self._file is None:
            self._file = cast(BinaryIO, path.open(mode))
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
