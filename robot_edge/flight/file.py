"""Flight files: frames of (length, crc32, kind, bytes), one after the other; the first is the header.

A file is only ever appended to. What a kill or a full disk left half written at its end is cut off on reading.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from robot_edge.flight.events import (
    DIGEST_BYTES,
    FORMAT,
    Gap,
    Header,
    Picture,
    Reference,
    SnapshotRecord,
    TickRecord,
    stand_in,
)
from wire.errors import ConfigError, Corrupt, storage_error

MAGIC = b"VLAFLY1\n"
SUFFIX = ".flight"
_FRAME = struct.Struct("<IIc")
_MAX_FRAME = 1 << 30
HEADER, SNAPSHOT, TICKS, ARRAY, PICTURE, GAP = b"H", b"S", b"T", b"A", b"P", b"G"
_ticks = msgspec.msgpack.Decoder(list[TickRecord])


def frame(kind: bytes, payload: bytes) -> bytes:
    """One frame: its length, checksum, kind and payload."""
    return _FRAME.pack(len(payload), zlib.crc32(payload, kind[0]), kind) + payload


def frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(kind, payload) of every whole frame of an opened flight file. Raises `Corrupt` when it is none."""
    if file.read(len(MAGIC)) != MAGIC:
        raise Corrupt(f"{file.name} is not a flight file of this version of vla-fleet.")
    while True:
        head = file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            return
        size, crc, kind = _FRAME.unpack(head)
        payload = file.read(size) if size <= _MAX_FRAME else b""
        if len(payload) < size or size > _MAX_FRAME or zlib.crc32(payload, kind[0]) != crc:
            return
        yield kind, payload


@dataclass
class Start:
    """One start of a control process: its files in order."""

    boot: str
    started_unix_ns: int
    files: list[Path] = field(default_factory=list)


def starts(path: Path) -> list[Start]:
    """What a file or a directory of flight files holds, oldest start first.

    Raises `ConfigError` when there is none, `Corrupt` for a file that is no flight file.
    """
    if path.is_dir():
        paths = sorted(path.glob(f"*{SUFFIX}"))
    elif path.exists():
        paths = [path]
    else:
        raise ConfigError(f"there is no flight at {path}.")
    found: dict[str, Start] = {}
    order: list[tuple[int, int, Path, str]] = []
    for one in paths:
        header = read_header(one)
        if header is None:
            continue
        order.append((header.started_unix_ns, header.file, one, header.boot))
    for started, _, one, boot in sorted(order):
        found.setdefault(boot, Start(boot, started)).files.append(one)
    if not found:
        raise ConfigError(f"there is no flight in {path}: it holds no file '*{SUFFIX}' with a whole header.")
    return list(found.values())


def read_header(path: Path) -> Header | None:
    """The header of a flight file, None when it was cut off before its end."""
    try:
        with path.open("rb") as file:
            first = next(frames(file), None)
    except OSError as error:
        raise storage_error(error, "reading a flight", path) from error
    if first is None:
        return None
    return _header(path, *first)


def _header(path: Path, kind: bytes, payload: bytes) -> Header:
    try:
        if kind != HEADER:
            raise Corrupt(f"{path} does not begin with a header.")
        seen = msgspec.msgpack.decode(payload)
        if seen.get("format") != FORMAT:
            raise ConfigError(
                f"{path} has format {seen.get('format')}, this vla-fleet reads {FORMAT}: it was recorded by "
                f"vla-fleet {seen.get('program')}; use that one."
            )
        return msgspec.convert(seen, Header)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path}: its header cannot be read: {error}.") from error


@dataclass
class Record:
    """A snapshot, tick, picture or gap, with the large arrays it refers to."""

    what: SnapshotRecord | TickRecord | Picture | Gap
    large: list[np.ndarray]


class Reading:
    """Goes through the records of one file."""

    def __init__(self, path: Path) -> None:
        """Raises `Corrupt`, `ConfigError` or `StorageError` for a file that cannot be read."""
        self.path = path
        header = read_header(path)
        if header is None:
            raise Corrupt(f"{path} was cut off before the end of its header; nothing was recorded in it.")
        self.header = header
        self._arrays: dict[bytes, bytes] = {}

    def __iter__(self) -> Iterator[Record]:
        try:
            with self.path.open("rb") as file:
                for kind, payload in frames(file):
                    yield from self._records(kind, payload)
        except OSError as error:
            raise storage_error(error, "reading a flight", self.path) from error
        except (msgspec.MsgspecError, zlib.error) as error:
            raise Corrupt(f"{self.path}: a record cannot be read: {error}.") from error

    def _records(self, kind: bytes, payload: bytes) -> Iterator[Record]:
        if kind == TICKS:
            for tick in _ticks.decode(zlib.decompress(payload)):
                yield Record(tick, self._large(tick.references))
        elif kind == SNAPSHOT:
            snapshot = msgspec.msgpack.decode(zlib.decompress(payload), type=SnapshotRecord)
            yield Record(snapshot, self._large(snapshot.references))
        elif kind == ARRAY:
            self._arrays[payload[:DIGEST_BYTES]] = payload[DIGEST_BYTES:]
        elif kind == PICTURE:
            yield Record(msgspec.msgpack.decode(payload, type=Picture), [])
        elif kind == GAP:
            yield Record(msgspec.msgpack.decode(payload, type=Gap), [])

    def _large(self, references: tuple[Reference, ...]) -> list[np.ndarray]:
        found = []
        for reference in references:
            data = self._arrays.get(reference.digests[0])
            if data is None:
                found.append(stand_in(reference))
            else:
                found.append(np.frombuffer(zlib.decompress(data), reference.dtype).reshape(reference.shape).copy())
        return found
