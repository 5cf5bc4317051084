"""Reading many segments of one shard at once.

zarr spends about a millisecond of bookkeeping on each array that is read, and a segment lies in twenty. This module
reads the same bytes in two steps for all arrays together: the indices of their shards, then the inner chunks that are
needed, each checked by its CRC-32C. It knows no more than zarr's specification of the sharding codec; that zarr reads
the same is a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import google_crc32c
import msgspec
import numpy as np
from numcodecs import blosc

from cloud_learner.buffer.ledger.rows import Place
from cloud_learner.buffer.store import arrays
from cloud_learner.buffer.store.arrays import ShardedArray
from cloud_learner.buffer.store.objects import ObjectStore
from cloud_learner.buffer.store.shard import SegmentMetadata
from wire.errors import CorruptDataError
from wire.messages.gateway import CameraFrames, Segment
from wire.types import RobotSpec

_EMPTY = 2**64 - 1
"""Offset and length of a chunk that is not there: all of it is 0."""
_facts = msgspec.json.Decoder(SegmentMetadata)


def read_segments(objects: ObjectStore, spec: RobotSpec, number: int, places: Sequence[Place]) -> dict[int, Segment]:
    """The segments at these places of shard `number`, by ledger row; their arrays may share memory.

    Raises `CorruptDataError` when anything that is needed for one of them is gone or damaged.
    """
    cameras = arrays.cameras_of(spec)
    placed = np.stack([_placed(place, len(cameras)) for place in places])  # [segments, cameras + 1, 4]
    rows = np.array([(place.first_row, place.steps) for place in places], np.int64)
    steps = arrays.steps_of(spec)
    wanted: dict[ShardedArray, np.ndarray] = dict.fromkeys(steps, rows)
    for c, camera in enumerate(cameras):
        wanted[camera.times] = wanted[camera.ends] = placed[:, c, :2]
        wanted[camera.jpeg] = placed[:, c, 2:]
    wanted[arrays.FACTS_ARRAY] = placed[:, -1, 2:]
    parts = _read_chunks(objects, spec.hash, number, wanted)
    found = {}
    for place, lines in zip(places, placed.tolist(), strict=True):
        found[place.row] = _segment(spec, number, place, lines, parts)
    return found


class _ShardPart:
    """The chunks of one array that were read, one after another."""

    def __init__(self, array: ShardedArray, chunks: np.ndarray) -> None:
        """`chunks`: growing int64[n]."""
        self.array = array
        self.chunks = chunks
        self.rows = np.empty((len(chunks) * array.chunk, *array.row_shape()), array.dtype)
        self._first = {int(chunk): n * array.chunk for n, chunk in enumerate(chunks)}

    def take(self, first: int, count: int) -> np.ndarray:
        """Rows [first, first + count) of the shard."""
        if not count:
            return self.rows[:0]
        at = self._first[first // self.array.chunk] + first % self.array.chunk
        return self.rows[at : at + count]


def _read_chunks(
    objects: ObjectStore, spec_hash: str, number: int, wanted: dict[ShardedArray, np.ndarray]
) -> dict[str, _ShardPart]:
    """For each array the chunks that hold the rows int64[n, 2] (first, count) of the shard, by path."""
    parts = {array.path: _ShardPart(array, _chunks(array, rows)) for array, rows in wanted.items()}
    used = [part for part in parts.values() if len(part.chunks)]
    keys = [part.array.key(spec_hash, number) for part in used]
    indices = objects.read([(key, 0, part.array.index_bytes) for key, part in zip(keys, used, strict=True)])
    spans, targets = [], []
    for key, part, data in zip(keys, used, indices, strict=True):
        index = _checked(data, objects, key).view("<u8").reshape(-1, 2)
        for chunk, (offset, length) in zip(part.chunks.tolist(), index[part.chunks].tolist(), strict=True):
            target = part.rows[part._first[chunk] :][: part.array.chunk]
            if offset == _EMPTY:
                target[...] = 0
            else:
                spans.append((key, offset, offset + length))
                targets.append((part.array.packed, target))
    for (key, _, _), (packed, target), data in zip(spans, targets, objects.read(spans), strict=True):
        content = _checked(data, objects, key)
        try:
            if packed:
                blosc.decompress(content, target)
            else:
                target[...] = content.view(target.dtype).reshape(target.shape)
        except (RuntimeError, ValueError) as error:
            raise CorruptDataError(
                f"object {objects.place}/{key}: a chunk of it cannot be unpacked: {error}."
            ) from error
    return parts


def _chunks(array: ShardedArray, rows: np.ndarray) -> np.ndarray:
    """int64[n]: which chunks hold the rows int64[k, 2] (first, count), growing."""
    rows = rows[rows[:, 1] > 0]
    firsts, lasts = rows[:, 0] // array.chunk, (rows[:, 0] + rows[:, 1] - 1) // array.chunk
    found: set[int] = set()
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        found.update(range(first, last + 1))
    return np.array(sorted(found), np.int64)


def _checked(data: bytes, objects: ObjectStore, key: str) -> np.ndarray:
    """uint8[n]: `data` without the CRC-32C behind it."""
    content = np.frombuffer(data, np.uint8, max(0, len(data) - 4))
    if google_crc32c.value(content) != int.from_bytes(data[-4:], "little"):
        raise CorruptDataError(
            f"object {objects.place}/{key}: a chunk of it does not match its CRC-32C. Restore it from a backup."
        )
    return content


def _placed(place: Place, cameras: int) -> np.ndarray:
    if place.placed is None or place.placed.shape != (cameras + 1, 4):
        raise CorruptDataError(f"ledger: segment row {place.row} does not say where in shard {place.shard} it lies.")
    return place.placed


def _segment(
    spec: RobotSpec, number: int, place: Place, lines: Iterable[Sequence[int]], parts: dict[str, _ShardPart]
) -> Segment:
    *by_camera, (_, _, facts_at, facts_bytes) = lines
    try:
        facts = _facts.decode(parts[arrays.FACTS].take(facts_at, facts_bytes).tobytes())
    except msgspec.DecodeError as error:
        raise CorruptDataError(
            f"store: shard {number} of {place.spec_hash}: the facts of {place.id}: {error}."
        ) from error
    if facts.id != place.id or facts.steps != place.steps:
        raise CorruptDataError(
            f"store: shard {number} of {place.spec_hash} has segment {facts.id} where the ledger expects {place.id}. "
            "Ledger and store do not belong together: restore both from one backup."
        )
    columns = {}
    for name, dtype in arrays.STEPS:
        part = parts.get(name)
        columns[name] = part.take(place.first_row, place.steps) if part else np.zeros((place.steps, 0), dtype)
    seen, frames = {}, {}
    for c, (camera, (first, count, byte, size)) in enumerate(zip(arrays.cameras_of(spec), by_camera, strict=True)):
        frame_times = parts[arrays.FRAME_TIMES].take(place.first_row, place.steps)
        seen[camera.name] = np.ascontiguousarray(frame_times[:, c])
        jpeg = parts[camera.jpeg.path].take(byte, size).tobytes()
        ends = (parts[camera.ends.path].take(first, count) - byte).tolist()
        images = tuple(jpeg[a:b] for a, b in zip([0, *ends], ends, strict=False))
        frames[camera.name] = CameraFrames(parts[camera.times.path].take(first, count), images)
    return Segment(
        id=facts.id,
        episode=facts.episode,
        index=facts.index,
        first_tick=facts.first_tick,
        last=facts.last,
        outcome=facts.outcome,
        closed_ns=facts.closed_ns,
        frame_times_ns=seen,
        frames=frames,
        **columns,
    )
