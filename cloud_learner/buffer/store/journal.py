"""The journal: segments that were taken but do not lie in a shard yet, one record after another in local files.

A record is 4 bytes `vlaJ`, the payload's length (u64, little-endian), its SHA-256, and the payload. A file is only ever
appended to by the process that began it, and never again after that process ended: a torn record at the end of a file
stays where it is, and nothing refers to it.

Several processes may write at once, each its own file. A writer holds a lock on its file, so that nobody else removes
it; who removes files asks the ledger which ones it refers to after having looked which ones are complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import struct
import threading
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from cloud_learner.buffer.files import bad_sectors, make_directory, sync_directory, write_durably
from cloud_learner.buffer.ledger.rows import Journaled
from wire.errors import CorruptDataError, storage_error, storage_errors

ROTATE_BYTES = 64 * 1024 * 1024
"""A file that has reached this size gets no further record."""
_MAGIC = b"vlaJ"
_HEADER = struct.Struct("<4sQ32s")
_OWNER = "owner"
_NAME = re.compile(r"([0-9]{8,})\.journal\Z")


class Journal:
    """The journal in `directory`. Constructing it touches nothing; the first `append_all` begins a file."""

    def __init__(self, directory: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self.directory = directory
        self._rotate_bytes = rotate_bytes
        self._lock = threading.RLock()
        self._descriptor = -1
        self._number = 0
        self._end = 0

    def append_all(self, payloads: Sequence[bytes]) -> list[Journaled]:
        """Write records, in this order, with one flush; all are on the device when this returns.

        They lie in one file, for `remove_unused`. Raises `DiskFullError`, `NotWritableError` or `StorageError`; then
        none of them is there and the next ones may be tried.
        """
        digests = [hashlib.sha256(payload) for payload in payloads]
        headers = (
            _HEADER.pack(_MAGIC, len(payload), digest.digest())
            for payload, digest in zip(payloads, digests, strict=True)
        )
        records = b"".join(part for pair in zip(headers, payloads, strict=True) for part in pair)
        found = []
        with self._lock:
            try:
                if self._descriptor < 0 or self._end >= self._rotate_bytes:
                    self._begin()
                self._write(records)
            except OSError as error:
                raise storage_error(error, "journal", self._path(self._number)) from error
            for payload, digest in zip(payloads, digests, strict=True):
                found.append(Journaled(self._number, self._end, len(payload), digest.hexdigest()))
                self._end += _HEADER.size + len(payload)
        return found

    def read(self, at: Journaled) -> bytes:
        """The payload of a record. Raises `CorruptDataError` when it is gone, torn, changed or unreadable."""
        path, record = self._path(at.journal), self._record(at)
        if not record and not path.exists():
            raise CorruptDataError(f"journal file {path} is gone. Restore it from a backup.")
        payload = record[_HEADER.size :]
        expected = _HEADER.pack(_MAGIC, at.bytes, bytes.fromhex(at.sha256))
        if record[: _HEADER.size] != expected or hashlib.sha256(payload).hexdigest() != at.sha256:
            raise CorruptDataError(
                f"journal file {path}: the record at byte {at.offset} is not the one that was written. "
                "Restore the file from a backup."
            )
        return payload

    def raw(self, at: Journaled | None) -> bytes:
        """What stands in place of a damaged record, as much as can be read; nothing for one that lies elsewhere."""
        if at is not None:
            with contextlib.suppress(CorruptDataError):
                return self._record(at)
        return b""

    def _record(self, at: Journaled) -> bytes:
        if not (path := self._path(at.journal)).exists():
            return b""
        with storage_errors("journal", path), bad_sectors("journal file", path), open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), _HEADER.size + at.bytes, at.offset)

    def remove_unused(self, referred: Callable[[], Set[int]]) -> int:
        """Remove the complete files that nobody refers to. Returns how many.

        `referred` is asked after the complete files were listed: whatever is committed later lies in a newer file, or
        in one that its writer still holds. A writer must commit what it appended before it appends more, and may do so
        while the ledger is asked.
        """
        with self._lock:
            candidates = [number for number in self.numbers() if number != self._open_number]
            held = [(number, file) for number in candidates if (file := self._hold(number)) is not None]
        removed = 0
        try:
            needed = referred()
            for number, _ in held:
                if number not in needed:
                    self._path(number).unlink(missing_ok=True)
                    removed += 1
        except OSError as error:
            raise storage_error(error, "journal", self.directory) from error
        finally:
            for _, descriptor in held:
                os.close(descriptor)
        return removed

    def is_here(self) -> bool:
        """Whether this machine has the journal at all; a trainer on another one does not."""
        return self.directory.is_dir()

    def owner(self) -> str:
        """What tells this journal from that of another machine, '' before `claim`."""
        path = self.directory / _OWNER
        with storage_errors("journal", path), contextlib.suppress(FileNotFoundError):
            return path.read_text().strip()
        return ""

    def claim(self) -> str:
        """Give this journal a name of its own, once; the name."""
        if not (name := self.owner()):
            name = secrets.token_hex(8)
            write_durably(self.directory / _OWNER, name.encode(), "journal")
        return name

    def has(self, number: int) -> bool:
        """Whether a file is there."""
        return self._path(number).exists()

    def numbers(self) -> list[int]:
        """Numbers of the files that are there, growing."""
        names: list[str] = []
        with storage_errors("journal", self.directory), contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.directory)
        return sorted(int(match[1]) for name in names if (match := _NAME.match(name)))

    def close(self) -> None:
        """Give the open file up; the next `append_all` begins another one."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    @property
    def _open_number(self) -> int:
        return self._number if self._descriptor >= 0 else -1

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.journal"

    def _hold(self, number: int) -> int | None:
        """A locked descriptor of a complete file, or None if its writer is still at it or it is gone."""
        with storage_errors("journal", self._path(number)):
            try:
                descriptor = os.open(self._path(number), os.O_RDONLY)
            except FileNotFoundError:
                return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _begin(self) -> None:
        self.close()
        make_directory(self.directory)
        number = max([*self.numbers(), self._number]) + 1
        while True:
            try:
                descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:  # another process was faster
                number += 1
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # somebody may have taken the empty file for an unused one before it was locked
                if os.fstat(descriptor).st_nlink:
                    sync_directory(self.directory)
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        self._descriptor, self._number, self._end = descriptor, number, 0

    def _write(self, records: bytes) -> None:
        rest = memoryview(records)
        try:
            while rest:
                rest = rest[os.pwrite(self._descriptor, rest, self._end + len(records) - len(rest)) :]
            os.fdatasync(self._descriptor)
        except OSError:
            # After a failed flush nobody knows what is on the device: what was written is cut off and the file left.
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            if self._end == 0:
                with contextlib.suppress(OSError):
                    self._path(self._number).unlink()
            os.close(descriptor)
            raise
