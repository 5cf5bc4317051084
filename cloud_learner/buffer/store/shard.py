"""Segments as one shard of their robot spec's arrays, and back: pure functions on bytes and numpy arrays.

zarr encodes a shard in memory; its objects are then stored one by one. What comes back is the segment that went in, to
the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.rows import Placed
from cloud_learner.buffer.store import arrays
from wire.errors import InvalidDataError
from wire.messages.gateway import CameraFrames, Segment
from wire.types import Episode, RobotSpec

_NO_FRAMES = CameraFrames(np.zeros(0, np.int64), ())
_PLACE_BYTES = 20
"""Room that a number in a line of facts may need."""


class ShardItem(msgspec.Struct, frozen=True):
    """A canonical segment that is to lie in a shard."""

    row: int
    """its ledger row"""
    sha256: str
    """of its record in the journal"""
    segment: Segment


class SegmentMetadata(msgspec.Struct, frozen=True):
    """One line of the array `segments`: everything of a segment that is not in the other arrays, and where it lies."""

    row: int
    id: str
    episode: Episode
    index: int
    first_tick: int
    last: bool
    outcome: str
    closed_ns: int
    sha256: str
    first_row: int
    """of the step arrays"""
    steps: int
    frames: dict[str, tuple[int, int, int, int]]
    """by camera: first row and number of frames, first byte and number of bytes in `jpeg`"""


class EncodedShard(msgspec.Struct, frozen=True):
    """A shard as it is to be stored: first `objects`, then `metadata`, then what the ledger must know."""

    objects: dict[str, bytes]
    metadata: dict[str, bytes]
    placed: tuple[Placed, ...]
    """within the shard; one line more than the spec has cameras: segment number, 1, first byte and size of its facts"""
    rows: int
    bytes: int
    """of all objects"""


def canonical(segment: Segment, spec: RobotSpec) -> Segment:
    """The segment with every camera of the spec in its dicts, in the spec's order: as it is hashed, stored and read.

    Raises `InvalidDataError` if it names another camera, or does not say which frames of a camera its steps saw.
    """
    names = [camera.name for camera in spec.cameras]
    if list(segment.frame_times_ns) == names and list(segment.frames) == names:
        return segment
    if set(segment.frame_times_ns) != set(names) or not set(segment.frames) <= set(names):
        raise InvalidDataError(
            f"segment {segment.id[:200]!r} has frames of {sorted({*segment.frame_times_ns, *segment.frames})[:20]}; "
            f"the cameras of its robot are {names}."
        )
    return msgspec.structs.replace(
        segment,
        frame_times_ns={name: segment.frame_times_ns[name] for name in names},
        frames={name: segment.frames.get(name, _NO_FRAMES) for name in names},
    )


class Room:
    """What still fits into a shard."""

    def __init__(self, spec: RobotSpec) -> None:
        self.rows = arrays.SHARD_ROWS
        self._facts = arrays.SHARD_FACTS_BYTES
        self._frames = {camera.name: arrays.SHARD_FRAMES for camera in spec.cameras}
        self._bytes = {camera.name: arrays.SHARD_JPEG_BYTES for camera in spec.cameras}

    def take(self, segment: Segment) -> bool:
        """Whether the canonical segment fits; then its room is gone."""
        facts = len(_line(_facts(ShardItem(0, "0" * 64, segment), 0, dict.fromkeys(segment.frames, (0, 0, 0, 0)))))
        facts += _PLACE_BYTES * (2 + 4 * len(segment.frames))
        sizes = {name: sum(map(len, frames.encoded)) for name, frames in segment.frames.items()}
        if (
            segment.steps > self.rows
            or facts > self._facts
            or any(len(frames.encoded) > self._frames[name] for name, frames in segment.frames.items())
            or any(size > self._bytes[name] for name, size in sizes.items())
        ):
            return False
        self.rows -= segment.steps
        self._facts -= facts
        for name, size in sizes.items():
            self._frames[name] -= len(segment.frames[name].encoded)
            self._bytes[name] -= size
        return True


def require_room(segment: Segment, spec: RobotSpec) -> None:
    """Raise `InvalidDataError` if the canonical segment would not even fit into a shard of its own."""
    if not Room(spec).take(segment):
        raise InvalidDataError(
            f"segment {segment.id[:200]!r} is larger than a shard of the store: at most {arrays.SHARD_ROWS} steps, and "
            f"{arrays.SHARD_FRAMES} frames and {arrays.SHARD_JPEG_BYTES >> 20} MiB of each camera. "
            "Close segments more often."
        )


def encode_shard(spec: RobotSpec, number: int, items: Sequence[ShardItem]) -> EncodedShard:
    """Shard `number` of the spec's group with these segments, in this order. They must fit: see `Room`."""
    segments = [item.segment for item in items]
    data: dict[str, np.ndarray] = {}
    for name, dtype in arrays.STEPS:
        data[name] = np.concatenate([getattr(segment, name) for segment in segments], dtype=dtype, casting="no")
    seen = [np.stack(list(segment.frame_times_ns.values()), axis=1) for segment in segments if segment.frame_times_ns]
    if spec.cameras:
        data[arrays.FRAME_TIMES] = np.concatenate(seen)
    first_frame, first_byte = _join_frames(spec, segments, data)
    first_row = np.concatenate([[0], np.cumsum([segment.steps for segment in segments])]).tolist()
    placed, lines, at = [], [], 0
    for n, item in enumerate(items):
        within = {
            name: (first_frame[name][n], len(frames.encoded), first_byte[name][n], sum(map(len, frames.encoded)))
            for name, frames in item.segment.frames.items()
        }
        base = (number * arrays.SHARD_FRAMES, 0, number * arrays.SHARD_JPEG_BYTES, 0)
        whole = {name: tuple(a + b for a, b in zip(base, place, strict=True)) for name, place in within.items()}
        line = _line(_facts(item, number * arrays.SHARD_ROWS + first_row[n], whole))
        places = np.array([*within.values(), (n, 1, at, len(line))], "<i8")
        placed.append(Placed(item.row, first_row[n], places))
        lines.append(line)
        at += len(line)
    data[arrays.FACTS] = np.frombuffer(b"".join(lines), np.uint8)
    objects = _encode(spec, number, data)
    used = {path: len(rows) for path, rows in data.items()}
    return EncodedShard(
        objects=objects,
        metadata=arrays.metadata(spec, number, used),
        placed=tuple(placed),
        rows=first_row[-1],
        bytes=sum(map(len, objects.values())),
    )


def _join_frames(
    spec: RobotSpec, segments: Sequence[Segment], data: dict[str, np.ndarray]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Put the frame arrays of all segments into `data`; first frame and first byte of each segment, by camera."""
    first_frame: dict[str, list[int]] = {}
    first_byte: dict[str, list[int]] = {}
    for camera in arrays.cameras_of(spec):
        frames = [segment.frames[camera.name] for segment in segments]
        encoded = [image for some in frames for image in some.encoded]
        ends = np.cumsum([len(image) for image in encoded], dtype=np.int64)
        starts = np.concatenate([[0], ends])
        firsts = np.concatenate([[0], np.cumsum([len(some.encoded) for some in frames], dtype=np.int64)])[:-1]
        first_frame[camera.name] = firsts.tolist()
        first_byte[camera.name] = starts[firsts].tolist()
        data[camera.times.path] = np.concatenate([some.times_ns for some in frames], dtype=np.int64)
        data[camera.ends.path] = ends
        data[camera.jpeg.path] = np.frombuffer(b"".join(encoded), np.uint8)
    return first_frame, first_byte


def _encode(spec: RobotSpec, number: int, data: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    spec_hash, objects = spec.hash, {}
    group, files = arrays.scratch_group(spec)
    for array in arrays.arrays_of(spec):
        rows = data[array.path]
        if not len(rows):
            continue
        target = group[array.path]
        if array.path != arrays.FACTS and array.packed:
            target = target.with_config(arrays.WHOLE)  # type: ignore[union-attr]
        target[: len(rows)] = rows  # type: ignore[index]
        encoded = files.get(array.key("", 0).lstrip("/"))
        if encoded is not None:
            objects[array.key(spec_hash, number)] = encoded.to_bytes()
    return objects


def _facts(item: ShardItem, first_row: int, frames: Mapping[str, tuple[int, ...]]) -> SegmentMetadata:
    segment = item.segment
    return SegmentMetadata(
        row=item.row,
        id=segment.id,
        episode=segment.episode,
        index=segment.index,
        first_tick=segment.first_tick,
        last=segment.last,
        outcome=segment.outcome,
        closed_ns=segment.closed_ns,
        sha256=item.sha256,
        first_row=first_row,
        steps=segment.steps,
        frames=dict(frames),  # type: ignore[arg-type]
    )


def _line(facts: SegmentMetadata) -> bytes:
    return msgspec.json.encode(facts) + b"\n"
