"""One episode as a file that can be carried about: the robot's spec and the segments, as they were stored.

    8 bytes  magic, the last one the format's number
    records  uint32 length, uint32 CRC-32 of the bytes that follow (both little-endian), the bytes
               the first: `EpisodeHeader` as MessagePack
               the others: one `Segment` each, by the wire's codec, in order
    8 bytes  zeros: a record without bytes ends the file, so that half a copy is recognised

No pickle; what is read is checked before it is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from wire import codec
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, MessageTooLargeError, WireError, storage_error
from wire.messages.gateway import Segment
from wire.types import Episode, RobotSpec

MAGIC = b"VLAEPIS\x01"
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_EPISODE_BYTES = 2 * 1024 * 1024 * 1024
_RECORD = struct.Struct("<II")
_END = _RECORD.pack(0, 0)


class EpisodeHeader(msgspec.Struct, frozen=True):
    """What a reader must know before the first step."""

    spec: RobotSpec
    episode: Episode
    instruction: str
    """the task as a person would say it"""
    outcome: str
    """success, failure, aborted, or '' for an episode that was not finished"""
    steps: int


_header = msgspec.msgpack.Decoder(EpisodeHeader)


def write_episode(path: Path, header: EpisodeHeader, segments: Iterable[Segment]) -> int:
    """Write the file whole or not at all, on the device when this returns; its size in bytes.

    Raises `InvalidDataError` when the segments are no whole episode, `MessageTooLargeError`, `DiskFullError`,
    `NotWritableError`, `StorageError`.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(MAGIC)
            _write(file, msgspec.msgpack.encode(header), path)
            for segment in _in_order(segments, header, InvalidDataError, path):
                _write(file, codec.encode(segment), path)
            file.write(_END)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(error, "episode file", path) from error
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read_header(path: Path) -> EpisodeHeader:
    """The beginning of the file. Raises `ConfigError` when there is no such file, `CorruptDataError` when it is
    damaged.
    """
    with _opened(path) as file:
        return _read_header(file, path)


def read_episode(path: Path) -> tuple[EpisodeHeader, tuple[Segment, ...]]:
    """All of the file, in memory. Raises `ConfigError`, `MessageTooLargeError`, and `CorruptDataError` when anything in
    it is not whole.
    """
    with _opened(path) as file:
        header = _read_header(file, path)
        return header, tuple(_in_order(_segments(file, path), header, CorruptDataError, path))


def _opened(path: Path) -> BinaryIO:
    try:
        if path.stat().st_size > MAX_EPISODE_BYTES:
            raise MessageTooLargeError(f"{path} is larger than the {MAX_EPISODE_BYTES} bytes an episode file may have.")
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(
            f"episode file {path}: {error.strerror}. `vla-fleet buffer export-episode` makes one."
        ) from error


def _read_header(file: BinaryIO, path: Path) -> EpisodeHeader:
    magic = file.read(len(MAGIC))
    if magic[:-1] != MAGIC[:-1] or len(magic) != len(MAGIC):
        raise ConfigError(f"{path} is no episode file; `vla-fleet buffer export-episode` makes one.")
    if magic != MAGIC:
        raise ConfigError(
            f"{path} has format {magic[-1]}, this vla-fleet reads format {MAGIC[-1]}: install the one that wrote it."
        )
    data = _read(file, MAX_HEADER_BYTES, path)
    try:
        return _header.decode(data)
    except (msgspec.DecodeError, ConfigError) as error:
        raise CorruptDataError(f"{path}: its header cannot be read: {error}. Export it again.") from error


def _segments(file: BinaryIO, path: Path) -> Iterator[Segment]:
    while data := _read(file, codec.MAX_MESSAGE_BYTES, path):
        try:
            segment = codec.decode(data)
        except WireError as error:
            raise CorruptDataError(f"{path}: a segment cannot be read: {error}") from error
        if not isinstance(segment, Segment):
            raise CorruptDataError(f"{path}: a {type(segment).__name__} stands where a segment must. Export it again.")
        yield segment
    if file.read(1):
        raise CorruptDataError(f"{path} goes on after its end. Export it again.")


def _in_order(
    segments: Iterable[Segment], header: EpisodeHeader, wrong: type[InvalidDataError | CorruptDataError], path: Path
) -> Iterator[Segment]:
    """The segments as they come; raises `wrong` at the first that does not go on where the one before ended."""
    tick = 0
    spec, episode = header.spec, header.episode
    cameras = [camera.name for camera in spec.cameras]
    shapes = {"state": spec.state_dim, "proposed": spec.action_dim, "executed": spec.action_dim}
    for segment in segments:
        if segment.episode != episode:
            raise wrong(f"{path}: segment {segment.id} is not of episode '{episode.id}'.")
        if segment.first_tick != tick:
            raise wrong(
                f"{path}: episode '{episode.id}': the steps from tick {tick} to {segment.first_tick} are missing."
            )
        for name, width in shapes.items():
            shape = getattr(segment, name).shape
            if shape != (segment.steps, width):
                raise wrong(
                    f"{path}: segment {segment.id}: {name} has shape {list(shape)}, not {[segment.steps, width]}."
                )
        seen = {camera: len(times) for camera, times in segment.frame_times_ns.items()}
        if seen != dict.fromkeys(cameras, segment.steps) or len(segment.reward) != segment.steps:
            raise wrong(f"{path}: segment {segment.id}: its frame times or rewards are not one a step.")
        tick += segment.steps
        yield segment
    if tick != header.steps or not tick:
        raise wrong(f"{path}: episode '{episode.id}' has {tick} of {header.steps} steps; an episode has at least one.")


def _write(file: BinaryIO, data: bytes, path: Path) -> None:
    if file.tell() + len(data) > MAX_EPISODE_BYTES - 64:
        raise MessageTooLargeError(f"{path}: the episode is larger than {MAX_EPISODE_BYTES} bytes.")
    file.write(_RECORD.pack(len(data), zlib.crc32(data)))
    file.write(data)


def _read(file: BinaryIO, limit: int, path: Path) -> bytes:
    """The next record's bytes, b'' at the end mark."""
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        raise CorruptDataError(f"{path} ends in the middle: copy or export it again.")
    length, crc = _RECORD.unpack(head)
    if length > limit:
        raise CorruptDataError(f"{path}: a record of {length} bytes; at most {limit} are accepted. Export it again.")
    data = file.read(length)
    if len(data) < length:
        raise CorruptDataError(f"{path} ends in the middle: copy or export it again.")
    if zlib.crc32(data) != crc:
        raise CorruptDataError(f"{path} is damaged: the checksum of a record differs. Copy or export it again.")
    return data
