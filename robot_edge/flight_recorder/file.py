"""Flight files: frames of (length, crc32, kind, bytes), one after the other; the first is the header.

A file is only ever appended to. What a kill or a full disk left half written at its end is cut off on reading.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from robot_edge.flight_recorder.events import (
    DIGEST_BYTES,
    FORMAT,
    FlightHeader,
    Gap,
    PreviewFrame,
    Reference,
    SnapshotRecord,
    TickRecord,
    stand_in,
)
from wire.errors import ConfigError, CorruptDataError, storage_error

log = logging.getLogger(__name__)

MAGIC = b"VLAFLY1\n"
SUFFIX = ".flight"
_FRAME = struct.Struct("<IIc")
_MAX_FRAME = 1 << 30
_MADE = 16
HEADER, SNAPSHOT, TICKS, ARRAY, PICTURE, GAP = b"H", b"S", b"T", b"A", b"P", b"G"
_ticks = msgspec.msgpack.Decoder(list[TickRecord])


def frame(kind: bytes, payload: bytes) -> bytes:
    """One frame: its length, checksum, kind and payload."""
    return _FRAME.pack(len(payload), zlib.crc32(payload, kind[0]), kind) + payload


def frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of every whole frame of an opened flight file. Raises `CorruptDataError` when it is none."""
    if file.read(len(MAGIC)) != MAGIC:
        raise CorruptDataError(f"{file.name} is not a flight file of this version of vla-fleet.")
    while True:
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            return
        size, crc, kind = _FRAME.unpack(head)
        payload = file.read(size) if size <= _MAX_FRAME else b""
        if len(payload) < size or size > _MAX_FRAME or zlib.crc32(payload, kind[0]) != crc:
            return
        yield kind, payload


def starts(path: Path) -> list[list[FlightFile]]:
    """The files of each start of a control process that a file or a directory holds, oldest start first.

    Raises `ConfigError` when there is none, `CorruptDataError` for a file that is no flight file.
    """
    if not path.exists():
        raise ConfigError(f"there is no flight at {path}.")
    paths = path.glob(f"*{SUFFIX}") if path.is_dir() else [path]
    files = [FlightFile(one, header) for one in paths if (header := read_header(one)) is not None]
    if not files:
        raise ConfigError(f"there is no flight in {path}: it holds no file '*{SUFFIX}' with a whole header.")
    files.sort(key=lambda file: (file.header.started_unix_ns, file.header.file))
    return [list(start) for _, start in itertools.groupby(files, key=lambda file: file.header.session_id)]


def read_header(path: Path) -> FlightHeader | None:
    """The header of a flight file, None when it was cut off before its end."""
    try:
        with path.open("rb") as file:
            first = next(frames(file), None)
    except OSError as error:
        raise storage_error(error, "reading a flight", path) from error
    if first is None:
        return None
    kind, payload = first
    try:
        plain = msgspec.msgpack.decode(payload)
        if kind != HEADER or not isinstance(plain, dict):
            raise CorruptDataError(f"{path} does not begin with a header.")
        if plain.get("format") != FORMAT:
            raise ConfigError(
                f"{path} has format {plain.get('format')}, this vla-fleet reads {FORMAT}: it was recorded by "
                f"vla-fleet {plain.get('program')}; use that one."
            )
        return msgspec.convert(plain, FlightHeader)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"{path}: its header cannot be read: {error}.") from error


@dataclass
class FlightRecord:
    """A snapshot, tick, picture or gap."""

    what: SnapshotRecord | TickRecord | PreviewFrame | Gap
    _file: FlightFile

    @property
    def large(self) -> list[np.ndarray]:
        """The arrays it refers to."""
        references = getattr(self.what, "references", ())
        return [self._file.array(reference) for reference in references]


class FlightFile:
    """The records of one file, in order."""

    def __init__(self, path: Path, header: FlightHeader) -> None:
        self.path = path
        self.header = header
        self._arrays: dict[bytes, bytes] = {}
        self._made: dict[Reference, np.ndarray] = {}

    def __iter__(self) -> Iterator[FlightRecord]:
        try:
            with self.path.open("rb") as file:
                whole = 0
                for kind, payload in frames(file):
                    whole = file.tell()
                    yield from self._records(kind, payload)
                torn = self.path.stat().st_size - whole
                if torn:
                    log.warning("%s: its last %d bytes are not whole and left out.", self.path, torn)
        except OSError as error:
            raise storage_error(error, "reading a flight", self.path) from error
        except (msgspec.MsgspecError, zlib.error) as error:
            raise CorruptDataError(f"{self.path}: a record cannot be read: {error}.") from error

    def _records(self, kind: bytes, payload: bytes) -> Iterator[FlightRecord]:
        if kind == TICKS:
            for tick in _ticks.decode(zlib.decompress(payload)):
                yield FlightRecord(tick, self)
        elif kind == SNAPSHOT:
            yield FlightRecord(msgspec.msgpack.decode(zlib.decompress(payload), type=SnapshotRecord), self)
        elif kind == ARRAY:
            self._arrays[payload[:DIGEST_BYTES]] = payload[DIGEST_BYTES:]
        elif kind == PICTURE:
            yield FlightRecord(msgspec.msgpack.decode(payload, type=PreviewFrame), self)
        elif kind == GAP:
            yield FlightRecord(msgspec.msgpack.decode(payload, type=Gap), self)

    def array(self, reference: Reference) -> np.ndarray:
        """A large array, or what stands in for an image. Raises `CorruptDataError` when its bytes are missing."""
        known = self._made.pop(reference, None)
        if known is None:
            known = self._make(reference)
        # A frame comes again in every tick until the next one.
        self._made[reference] = known
        if len(self._made) > _MADE:
            del self._made[next(iter(self._made))]
        return known

    def _make(self, reference: Reference) -> np.ndarray:
        data = self._arrays.get(reference.digests[0]) if reference.digests else None
        try:
            if data is not None:
                return np.frombuffer(zlib.decompress(data), reference.dtype).reshape(reference.shape).copy()
            if reference.dtype == "|u1" and len(reference.shape) == 3 and math.prod(reference.shape) < _MAX_FRAME:
                return stand_in(reference)
        except (ValueError, TypeError, zlib.error) as error:
            raise CorruptDataError(f"{self.path}: an array of {reference.dtype} {reference.shape}: {error}.") from error
        raise CorruptDataError(f"{self.path}: an array of {reference.dtype} {reference.shape} is missing.")
