"""The file of a version that is wanted, for the thread that may wait for the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from robot_edge.uplink.weights.plan import FetchPlan, Part
from wire.errors import WeightsError
from wire.types import PolicyVersion
from wire.weights.delta import apply, read_frames

COMING, REBUILT = ".part", ".tmp"
_CHECKED_AT_ONCE = 8 * 1024 * 1024
_ROOM_BYTES = 64 * 1024 * 1024
"""that stay free on the disk"""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{12})\.safetensors")


class Found(NamedTuple):
    """What is here before anything of a version is fetched."""

    whole: bool
    """a file of its name, which is still to be checked"""
    held: dict[int, str]
    """the first 12 hexadecimal digits of the sha256 of versions that are here, by number"""
    fault: str
    """why it cannot be had here, "" when it can"""


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

    def __init__(self, directory: Path, version: PolicyVersion, keep: int) -> None:
        """`keep`: so many versions are kept, with this one, when it is here."""
        self.path = directory / file_name(version.number, version.sha256)
        self._version, self._keep = version, keep
        self._coming = self.path.with_suffix(COMING)
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._plan = FetchPlan(())

    def look(self) -> Found:
        """What is here of it, and of others."""
        if self.path.exists():
            return Found(True, {}, "")
        held = {int(found[1]): found[2] for path in self.path.parent.iterdir() if (found := _NAME.fullmatch(path.name))}
        return Found(False, held, self._fault())

    def begin(self, plan: FetchPlan) -> int:
        """Take in what comes by `plan`; so much of that is here already."""
        self._close()
        self._plan = plan
        name = f"{self.path.stem}.from-{plan.base.partition('.')[0]}" if plan.base else self.path.stem
        self._coming = self.path.with_name(name + COMING)
        for other in self.path.parent.glob(f"*{COMING}"):
            if other != self._coming:
                other.unlink()
        return self._resume()

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
        self._keep_newest()
        return Appended(position, done=True)

    def check(self) -> bool | None:
        """Read on in the file that is here, for other things may have to be done; in the end whether it is right."""
        data = self._open(self.path, "rb").read(_CHECKED_AT_ONCE)
        self._sha256.update(data)
        if len(data) == _CHECKED_AT_ONCE:
            return None
        self._close()
        return self._sha256.hexdigest() == self._version.sha256

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
        if right:
            rebuilt.replace(self._coming)
        else:
            rebuilt.unlink(missing_ok=True)
        return right

    def _keep_newest(self) -> None:
        others = [file for file in self.path.parent.glob("*.safetensors") if file != self.path]
        for old in sorted(others, key=lambda file: file.stat().st_mtime_ns)[: len(others) + 1 - self._keep]:
            old.unlink()

    def _fault(self) -> str:
        number, size = self._version.number, self._version.size_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            return (
                f"version {number} has {size / 1e6:.0f} MB, this computer {memory / 1e6:.0f} MB of memory: run its "
                "policy on another one (`--think`), or a smaller policy."
            )
        free = shutil.disk_usage(self.path.parent).free
        if size + _ROOM_BYTES > free:
            return (
                f"version {number} has {size / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free below "
                f"{self.path.parent}: free some room."
            )
        return ""

    def _open(self, path: Path, mode: str) -> BinaryIO:
        if self._file is None:
            self._file = cast(BinaryIO, path.open(mode))
        return self._file

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def file_name(number: int, sha256: str) -> str:
    """Of a version."""
    return f"{number:08d}-{sha256[:12]}.safetensors"
