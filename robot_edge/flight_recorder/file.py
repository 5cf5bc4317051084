"""Flight files: frames of (length, crc32, record), one after the other; the first is the header.

A file is only ever appended to. What a kill or a full disk left half written at its end is cut off on reading.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from robot_edge.flight_recorder.events import (
    FlightHeader,
    Gap,
    PreviewFrame,
    Reference,
    SnapshotRecord,
    StoredArray,
    TickBlock,
    TickRecord,
    stand_in,
)
from wire.errors import ConfigError, CorruptDataError, storage_errors

log = logging.getLogger(__name__)

MAGIC = b"VLAFLY4\n"
SUFFIX = ".flight"
MAX_RECORD_BYTES = 256 * 1024 * 1024
"""of a record, unpacked: many times the largest picture"""
_FRAME = struct.Struct("<II")
_MADE = 16
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FlightHeader | TickBlock | StoredArray | SnapshotRecord | PreviewFrame | Gap)


def frame(record: FlightHeader | TickBlock | StoredArray | SnapshotRecord | PreviewFrame | Gap) -> bytes:
    """The length and checksum of the compressed record, and it."""
    payload = zlib.compress(_encoder.encode(record), 1)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def frames(file: IO[bytes]) -> Iterator[Any]:
    """The record of every whole frame of an opened flight file. Raises `CorruptDataError` when it is none."""
    if file.read(len(MAGIC)) != MAGIC:
        raise CorruptDataError(f"{file.name} is not a flight file of this version of vla-fleet.")
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        size, crc = _FRAME.unpack(head)
        if size > MAX_RECORD_BYTES:
            return  # no record: what a kill left there
        payload = file.read(size)
        if len(payload) < size or zlib.crc32(payload) != crc:
            return
        try:
            yield _decoder.decode(_unpacked(payload, file))
        except (msgspec.MsgspecError, RecursionError, zlib.error) as error:
            raise CorruptDataError(f"{file.name}: a record cannot be read: {error}.") from error


def _unpacked(payload: bytes, file: IO[bytes]) -> bytes:
    """A record of a few bytes may claim to be endless: no more than the cap is unpacked."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(payload, MAX_RECORD_BYTES)
    if not unpacking.eof:
        torn = not unpacking.unconsumed_tail
        raise CorruptDataError(
            f"{file.name}: a record is {'torn' if torn else f'larger than {MAX_RECORD_BYTES} bytes when unpacked'}."
        )
    return data


def find_starts(path: Path) -> list[list[FlightFile]]:
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
    with storage_errors("reading a flight", path), path.open("rb") as file:
        first = next(frames(file), None)
    if first is not None and not isinstance(first, FlightHeader):
        raise CorruptDataError(f"{path} does not begin with a header.")
    return first


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
        # A frame comes again in every tick until the next one.
        self.array = functools.lru_cache(_MADE)(self._make)
        """A large array, or what stands in for an image. Raises `CorruptDataError` when its bytes are missing."""

    def __iter__(self) -> Iterator[FlightRecord]:
        with storage_errors("reading a flight", self.path), self.path.open("rb") as file:
            whole = 0
            for record in frames(file):
                whole = file.tell()
                if isinstance(record, TickBlock):
                    yield from (FlightRecord(tick, self) for tick in record.ticks)
                elif isinstance(record, StoredArray):
                    self._arrays[record.digest] = record.data
                elif not isinstance(record, FlightHeader):
                    yield FlightRecord(record, self)
            torn = self.path.stat().st_size - whole
            if torn:
                log.warning("%s: its last %d bytes are not whole and left out.", self.path, torn)

    def _make(self, reference: Reference) -> np.ndarray:
        data = self._arrays.get(reference.digests[0]) if reference.digests else None
        try:
            if data is not None:
                return np.frombuffer(data, reference.dtype).reshape(reference.shape).copy()
            if (
                reference.dtype == "|u1"
                and len(reference.shape) == 3
                and math.prod(reference.shape) <= MAX_RECORD_BYTES
            ):
                return stand_in(reference)
        except (ValueError, TypeError) as error:
            raise CorruptDataError(f"{self.path}: an array of {reference.dtype} {reference.shape}: {error}.") from error
        raise CorruptDataError(f"{self.path}: an array of {reference.dtype} {reference.shape} is missing.")
