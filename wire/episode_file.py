"""One episode as a file that can be carried about: the robot's spec and the segments, as they were stored.

    8 bytes   magic, the last one the format's number
    12 bytes  length of what follows, uint64, and its CRC-32, uint32, both little-endian
    body      MessagePack: `EpisodeHeader`, and a list of `Segment`s in order, each by the wire's codec

No pickle; what is read is checked before it is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from wire import codec
from wire.errors import ConfigError, CorruptDataError, InvalidDataError, MessageTooLargeError, WireError, storage_error
from wire.messages.gateway import Segment
from wire.types import Episode, RobotSpec
from wire.untrusted import require_file

MAGIC = b"VLAEPIS\x02"
MAX_EPISODE_BYTES = 2 * 1024 * 1024 * 1024
_SIZE = struct.Struct("<QI")


class EpisodeHeader(msgspec.Struct, frozen=True):
    """What a reader must know before the first step."""

    spec: RobotSpec
    episode: Episode
    instruction: str
    """the task as a person would say it"""
    outcome: str
    """success, failure, aborted, or '' for an episode that was not finished"""
    steps: int


class _EpisodeBody(msgspec.Struct, frozen=True, array_like=True):
    header: EpisodeHeader
    segments: list[bytes]


_bodies = msgspec.msgpack.Decoder(_EpisodeBody)


def write_episode(path: Path, header: EpisodeHeader, segments: Iterable[Segment]) -> int:
    """Write the file whole or not at all, on the device when this returns; its size in bytes.

    Raises `InvalidDataError` when the segments are no whole episode, `MessageTooLargeError`, `DiskFullError`,
    `NotWritableError`, `StorageError`.
    """
    encoded = [codec.encode(segment) for segment in _in_order(segments, header, InvalidDataError, path)]
    body = msgspec.msgpack.encode(_EpisodeBody(header, encoded))
    data = MAGIC + _SIZE.pack(len(body), zlib.crc32(body)) + body
    if len(data) > MAX_EPISODE_BYTES:
        raise MessageTooLargeError(f"{path}: the episode is larger than {MAX_EPISODE_BYTES} bytes.")
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise storage_error(error, "episode file", path) from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(data)


def read_header(path: Path) -> EpisodeHeader:
    """What the file says of its episode. Raises as `read_episode`."""
    return _read(path).header


def read_episode(path: Path) -> tuple[EpisodeHeader, tuple[Segment, ...]]:
    """All of the file, in memory. Raises `ConfigError` when there is no such file, `MessageTooLargeError`, and
    `CorruptDataError` when anything in it is not whole.
    """
    body = _read(path)
    return body.header, tuple(_in_order(_segments(body, path), body.header, CorruptDataError, path))


def _read(path: Path) -> _EpisodeBody:
    try:
        require_file(path)  # a pipe would be read for ever
        if path.stat().st_size > MAX_EPISODE_BYTES:
            raise MessageTooLargeError(f"{path} is larger than the {MAX_EPISODE_BYTES} bytes an episode file may have.")
        data = path.read_bytes()
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"episode file {getattr(error, 'strerror', None) or error} `vla-fleet buffer export-episode` makes one."
        ) from error
    magic, head, body = data[: len(MAGIC)], data[len(MAGIC) :][: _SIZE.size], data[len(MAGIC) + _SIZE.size :]
    if magic[:-1] != MAGIC[:-1] or len(magic) != len(MAGIC):
        raise ConfigError(f"{path} is no episode file; `vla-fleet buffer export-episode` makes one.")
    if magic != MAGIC:
        raise ConfigError(
            f"{path} has format {magic[-1]}, this vla-fleet reads format {MAGIC[-1]}: install the one that wrote it."
        )
    length, crc = _SIZE.unpack(head) if len(head) == _SIZE.size else (len(body) + 1, 0)
    if len(body) < length:
        raise CorruptDataError(f"{path} ends in the middle: copy or export it again.")
    if len(body) > length:
        raise CorruptDataError(f"{path} goes on after its end. Export it again.")
    if zlib.crc32(body) != crc:
        raise CorruptDataError(f"{path} is damaged: its checksum differs. Copy or export it again.")
    try:
        return _bodies.decode(body)
    except (msgspec.DecodeError, ConfigError) as error:
        raise CorruptDataError(f"{path}: its header cannot be read: {error}. Export it again.") from error


def _segments(body: _EpisodeBody, path: Path) -> Iterator[Segment]:
    for data in body.segments:
        try:
            segment = codec.decode(data, stored=True)
        except WireError as error:
            raise CorruptDataError(f"{path}: a segment cannot be read: {error}") from error
        if not isinstance(segment, Segment):
            raise CorruptDataError(f"{path}: a {type(segment).__name__} stands where a segment must. Export it again.")
        yield segment


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
