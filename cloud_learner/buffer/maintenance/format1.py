"""Reading the first form of the buffer: one ZIP file with a zarr store per segment, and its SQLite ledger.

Nothing writes it any more; `migrate.py` brings what it holds into the present form.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import sqlite3
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from wire.errors import CorruptDataError, InvalidDataError, StorageError, storage_error
from wire.messages.all import CameraFrames, Segment
from wire.types import Episode

FORMAT = 1
_STEP_ARRAYS = (
    "times_ns",
    "state",
    "proposed",
    "executed",
    "actor",
    "chunk_tick",
    "delay_ticks",
    "version",
    "reward",
    "terminated",
    "truncated",
)
_TABLES = ("specs", "robots", "episodes", "versions", "evaluations", "applied", "events")


class OldSegment(msgspec.Struct, frozen=True):
    """Where the ledger of format 1 says that a segment lies."""

    row: int
    id: str
    path: str
    """relative to the segments directory"""
    bytes: int
    sha256: str
    received_ns: int
    committed_ns: int


class OldLedger:
    """The ledger of format 1, opened for reading with nothing but `sqlite3`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = _connect(path, "rw")

    def close(self) -> None:
        self._connection.close()

    def table(self, name: str) -> list[dict[str, Any]]:
        """All rows of one table by column, in the order in which they were entered."""
        if name not in _TABLES:
            raise ValueError(f"table {name!r} is none of {_TABLES}")
        with _explained(self.path):
            cursor = self._connection.execute(f"SELECT * FROM {name} ORDER BY rowid")
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def segments(self) -> Iterator[OldSegment]:
        """All segments in the order of their commits."""
        with _explained(self.path):
            cursor = self._connection.execute(
                'SELECT "row", id, path, bytes, sha256, received_ns, committed_ns FROM segments ORDER BY "row"'
            )
            for row in cursor:
                yield OldSegment(*row)

    def count(self) -> int:
        """Number of segments."""
        with _explained(self.path):
            return int(self._connection.execute("SELECT count(*) FROM segments").fetchone()[0])


def ledger_format(path: Path) -> str:
    """What the SQLite file at `path` says of its format: '' when there is no such file or it has no table yet.

    Raises `CorruptDataError` when it is no ledger.
    """
    if not path.exists():
        return ""
    with _explained(path), contextlib.closing(_connect(path, "ro")) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return ""
        found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        return str(found[0]) if found else ""


def checkpoint(path: Path) -> None:
    """Bring everything of the SQLite database at `path` into that one file, so that it can be renamed.

    Raises `StorageError` when another process has it open.
    """
    with _explained(path), contextlib.closing(_connect(path, "rw")) as connection:
        connection.execute("PRAGMA busy_timeout=2000")
        try:
            # WAL off needs the file for itself alone; readers and writers turn it on again when they open it
            mode = connection.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            mode = "in use"
    left = [name for suffix in ("-wal", "-shm") if (name := path.with_name(path.name + suffix)).exists()]
    if mode != "delete" or left:
        raise StorageError(
            f"ledger {path} is open in another process. Stop the fleet that uses it, and every "
            "`vla-fleet` command on this --data directory, then start again."
        )


def read_segment(path: Path, sha256: str) -> Segment:
    """The segment in the file at `path`. Raises `CorruptDataError` if it is gone or not what `sha256` was taken from."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptDataError(f"segment file {path} is gone. Restore it from a backup.") from error
    except OSError as error:
        raise storage_error(error, "segment file", path) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise CorruptDataError(
            f"segment file {path}: sha256 {found[:12]} of {len(data)} bytes instead of {sha256[:12]}. "
            "Restore it from a backup."
        )
    try:
        return decode_segment(data)
    except InvalidDataError as error:
        raise CorruptDataError(f"segment file {path}: {error}") from error


def decode_segment(data: bytes) -> Segment:
    """The segment in the bytes of one file of format 1. Raises `InvalidDataError` for any other bytes."""
    try:
        buffer = default_buffer_prototype().buffer
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: buffer.from_bytes(archive.read(name)) for name in archive.namelist()}
        group = zarr.open_group(MemoryStore(files, read_only=True), mode="r")
        attributes: dict[str, Any] = dict(group.attrs)
        if attributes.get("format") != FORMAT:
            raise InvalidDataError(f"segment format {attributes.get('format')}, only {FORMAT} is read here.")
        arrays: dict[str, Any] = {name: _array(group, name) for name in (*_STEP_ARRAYS, "frame_times_ns")}
        times, offsets = _array(group, "jpeg_times_ns"), _array(group, "jpeg_offsets")
        jpeg = _array(group, "jpeg").tobytes()
        frames, first = {}, 0
        for camera, count in attributes["frames"]:
            ends = offsets[first : first + count + 1].tolist()
            images = tuple(jpeg[a:b] for a, b in itertools.pairwise(ends))
            frames[camera] = CameraFrames(times_ns=times[first : first + count], encoded=images)
            first += count
        seen = arrays.pop("frame_times_ns")
        return Segment(
            episode=msgspec.convert(attributes["episode"], Episode),
            frame_times_ns=dict(zip(attributes["cameras"], seen, strict=True)),
            frames=frames,
            **attributes["segment"],
            **arrays,
        )
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, NotImplementedError) as error:
        raise InvalidDataError(f"not a segment file: {error!r}.") from error


def _array(group: zarr.Group, name: str) -> np.ndarray:
    array = group[name]
    if not isinstance(array, zarr.Array):
        raise InvalidDataError(f"not a segment file: '{name}' is no array.")
    return np.asarray(array[...])


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(f"ledger {path}: {error}. Is it in use, or may it not be read?") from error
    except sqlite3.DatabaseError as error:
        raise CorruptDataError(f"ledger {path}: {error}. Restore it from a backup.") from error
