"""What was refused as invalid or found damaged, as it came: a file each, with who sent it and why in its first line."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from cloud_learner.buffer.files import open_directory, write_durably
from wire import codec
from wire.errors import InvalidDataError, WireError, storage_errors, suggest
from wire.messages.gateway import CameraFrames

log = logging.getLogger(__name__)
_SUFFIX = ".quarantine"


class QuarantineReason(StrEnum):
    """Why something is kept apart."""

    invalid = "invalid"
    """it cannot be stored as it is"""
    unconfirmed = "unconfirmed"
    """it says that somebody taught the robot, and nobody but the robot says so"""
    out_of_range = "out_of_range"
    """it has values that the robot cannot have"""
    damaged = "damaged"
    """a copy of what lies damaged on disk"""


OF_CONTENT = (QuarantineReason.unconfirmed, QuarantineReason.out_of_range)
"""reasons that a person may overrule: the segment itself is whole"""


class QuarantineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that lies in quarantine; what stands before the defaults is the first line of its file, as JSON."""

    robot: str
    """who sent it, '' for a copy of what was found damaged on disk"""
    reason: str
    wall_ns: int
    """when it came, nanoseconds since 1970"""
    reasons: tuple[QuarantineReason, ...]
    id: str = ""
    bytes: int = 0


class Quarantine:
    """The quarantine in `directory`. Constructing it touches nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Make sure that it can be written. Only for the gateway: removes what a crash left half-written."""
        open_directory(self._directory, "quarantine")

    def put(
        self,
        label: str,
        data: bytes,
        reason: str,
        robot: str = "",
        reasons: Sequence[QuarantineReason] = (QuarantineReason.invalid,),
    ) -> str:
        """Keep `data`, once however often it comes; its id. `label` may be anything: the data's hash makes it unique.

        Raises `DiskFullError`, `NotWritableError` or `StorageError`.
        """
        name = f"{re.sub(r'[^A-Za-z0-9_=-]', '-', label)[-100:]}-{hashlib.sha256(data).hexdigest()[:12]}"
        note = msgspec.json.encode(QuarantineEntry(robot, reason, time.time_ns(), tuple(reasons)))
        write_durably(self._path(name), note + b"\n" + data, "quarantine")
        return name

    def entries(self) -> list[QuarantineEntry]:
        """Everything in it, the oldest first."""
        found = [self._entry(path) for path in self._directory.glob("*" + _SUFFIX)]
        return sorted((entry for entry in found if entry), key=lambda entry: (entry.wall_ns, entry.id))

    def read(self, name: str) -> tuple[QuarantineEntry, bytes]:
        """What lies there under an id. Raises `InvalidDataError` for an unknown one."""
        known = {entry.id: entry for entry in self.entries()}
        if name not in known:
            raise InvalidDataError(
                f"there is no {name!r} in {self._directory}.{suggest(name, known)} `vla-fleet quarantine list` "
                "says what there is."
            )
        with storage_errors("quarantine", self._path(name)):
            return known[name], self._path(name).read_bytes().partition(b"\n")[2]

    def remove(self, name: str) -> None:
        with storage_errors("quarantine", self._path(name)):
            self._path(name).unlink(missing_ok=True)

    def trim(self, max_bytes: float) -> int:
        """Remove the oldest until the rest is no more than `max_bytes`; how many went."""
        entries = self.entries()
        size, removed = sum(entry.bytes for entry in entries), 0
        for entry in entries:
            if size <= max_bytes:
                break
            log.warning(
                "quarantine %s is above its %.0f MB: %s (%.1f MB) is deleted, which was there because: %s",
                self._directory,
                max_bytes / 1e6,
                entry.id,
                entry.bytes / 1e6,
                entry.reason,
            )
            self.remove(entry.id)
            size, removed = size - entry.bytes, removed + 1
        return removed

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{_SUFFIX}"

    def _entry(self, path: Path) -> QuarantineEntry | None:
        """None for one that went meanwhile."""
        with storage_errors("quarantine", path):
            try:
                with path.open("rb") as file:
                    line, size = file.readline(), os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                return None
        try:
            note = msgspec.json.decode(line, type=QuarantineEntry)
        except msgspec.DecodeError as error:
            note = QuarantineEntry("", f"its first line cannot be read: {error}", 0, (QuarantineReason.invalid,))
        return msgspec.structs.replace(note, id=path.name.removesuffix(_SUFFIX), bytes=size)


def describe(entry: QuarantineEntry, data: bytes) -> str:
    """What is in it, field by field where it is a message."""
    lines = [f"{entry.id}: {len(data)} bytes of {entry.robot or 'this disk'}", entry.reason]
    try:
        message = codec.decode(data, stored=True)
    except WireError as error:
        return "\n".join([*lines, f"no message: {error}"])
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, np.ndarray):
            extent = f" from {value.min()} to {value.max()}" if value.size else ""
            lines.append(f"{name}: {value.dtype}{list(value.shape)}{extent}")
        elif isinstance(value, dict):
            brought = {key: some.encoded if isinstance(some, CameraFrames) else some for key, some in value.items()}
            lines.append(f"{name}: { ({key: len(some) for key, some in brought.items()}) }")
        else:
            lines.append(f"{name}: {str(value)[:200]}")
    return "\n".join(lines)
