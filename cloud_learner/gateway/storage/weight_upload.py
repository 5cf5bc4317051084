"""A version whose bytes are coming in: its weights file, or the delta that makes it of its parent's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cloud_learner.buffer.files import TEMPORARY, move_durably, remove_quietly
from wire.errors import RejectedError, WeightsError
from wire.messages.gateway import Publish
from wire.types import PolicyVersion
from wire.weights.check import require_finite
from wire.weights.delta import apply, read_frames
from wire.weights.manifest import CHUNK_BYTES, ChunkHashes

DELTA, MANIFEST = ".delta", ".manifest"
_SYNC_BYTES = 16 * 1024**2
"""A gigabyte synced at its end would keep everybody waiting for seconds; so much of it at a time does not."""


def delta_path(path: Path) -> Path:
    """Where the delta of a version lies, by its weights file."""
    return path.with_suffix(DELTA)


def manifest_path(path: Path) -> Path:
    """Where it stands what a version is, by its weights file."""
    return path.with_suffix(MANIFEST)


class WeightUpload:
    """What came of a version so far. Raises `OSError`, but where something else is said."""

    def __init__(self, publish: Publish, path: Path, base: Path | None) -> None:
        """`base`: the file that a delta is of."""
        self.version: PolicyVersion = publish.version
        self.trained = publish.trained
        self.path = path
        self.size_bytes = publish.delta_bytes if base is not None else publish.version.size_bytes
        """that are to come"""
        self.received = 0
        self._base = base
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._coming = (
            self._temporary if base is None else delta_path(path).with_name(delta_path(path).name + TEMPORARY)
        )
        self._file: BinaryIO = open(self._coming, "wb")  # noqa: SIM115  closed by finish or drop
        self._synced = 0

    def append(self, data: bytes) -> None:
        self._file.write(data)
        self.received += len(data)
        if self.received - self._synced >= _SYNC_BYTES:
            self._sync()

    def finish(self) -> bytes:
        """Keep the version; the hashes of its chunks.

        Raises `RejectedError` when it is not what was offered, or nothing that can be run.
        """
        self._sync()
        self._file.close()
        if self._base is not None:
            self._rebuild(self._base)
        what = f"weights of version {self.version.number}"
        sha256, chunks = hashlib.sha256(), ChunkHashes()
        with open(self._temporary, "rb") as file:
            while data := file.read(CHUNK_BYTES):
                sha256.update(data)
                chunks.append(data)
        if (found := sha256.hexdigest()) != self.version.sha256:
            raise RejectedError(f"{what}: sha256 {found[:12]} instead of {self.version.sha256[:12]}.")
        try:
            require_finite(self._temporary, what)
        except WeightsError as error:
            raise RejectedError(str(error)) from error
        if self._base is not None:
            move_durably(self._coming, delta_path(self.path))
        move_durably(self._temporary, self.path)
        return chunks.digest()

    def drop(self) -> None:
        """Leave nothing of a version that is not committed."""
        # closing flushes, which fails again on a full disk
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._coming, self._temporary, self.path, delta_path(self.path), manifest_path(self.path)):
            remove_quietly(path)

    def _sync(self) -> None:
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self._synced = self.received

    def _rebuild(self, base: Path) -> None:
        shutil.copyfile(base, self._temporary)
        try:
            target = np.memmap(self._temporary, np.uint8, "r+")
            with open(self._coming, "rb") as frames:
                apply(target, read_frames(frames))
            target.flush()
        except WeightsError as error:
            raise RejectedError(f"weights of version {self.version.number}: {error}") from error
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
