"""Which arrays a robot spec's group in the store has, and how they are cut into objects.

Below `<spec hash>/`, all zarr v3 with the sharding codec:

- `times_ns` ... `truncated`: the step arrays of `wire.messages.gateway.Segment`, one row per step; `frame_times_ns`
  int64[rows, cameras] with the spec's cameras in their order.
- `frames/<camera>/times_ns` and `ends`: one row per frame; `ends` is the frame's end byte within its shard of `jpeg`.
- `frames/<camera>/jpeg`: the JPEG files one after another.
- `segments`: one line of JSON per segment, saying which one it is and where it lies: the store explains itself.

Shard k of every array belongs together and holds the same segments. Rows [k * SHARD_ROWS, k * SHARD_ROWS + n) are in
use, and likewise for the other arrays; what is not in use reads as 0.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BloscShuffle, Crc32cCodec
from zarr.core.array_spec import ArrayConfig
from zarr.storage import MemoryStore

from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

FORMAT = 2
SHARD_ROWS = 4096
SHARD_FRAMES = 4096
SHARD_JPEG_BYTES = 64 * 1024 * 1024
SHARD_FACTS_BYTES = 16 * 1024 * 1024
_CHUNK_ROWS = 256
_CHUNK_JPEG_BYTES = 256 * 1024
_CHUNK_FACTS_BYTES = 64 * 1024

STEPS = (
    ("times_ns", "<i8"),
    ("state", "<f4"),
    ("proposed", "<f4"),
    ("executed", "<f4"),
    ("actor", "|u1"),
    ("chunk_tick", "<i4"),
    ("delay_ticks", "<i2"),
    ("version", "<i4"),
    ("reward", "<f4"),
    ("terminated", "|b1"),
    ("truncated", "|b1"),
)
"""Step arrays of a segment and their types."""
FRAME_TIMES, FACTS = "frame_times_ns", "segments"


class ShardedArray(msgspec.Struct, frozen=True):
    """One array of a group."""

    path: str
    """relative to the group"""
    dtype: str
    width: int
    """columns of a row, 0 for a one-dimensional array"""
    shard: int
    """rows of a shard"""
    chunk: int
    """rows of an inner chunk"""
    packed: bool
    """whether chunks are compressed (Blosc with Zstandard); each has a CRC-32C behind it either way"""

    @property
    def index_bytes(self) -> int:
        """Size of the index at the beginning of a shard object: (offset, length) of each chunk, and a CRC-32C."""
        return 16 * (self.shard // self.chunk) + 4

    def row_shape(self) -> tuple[int, ...]:
        return (self.width,) if self.width else ()

    def key(self, spec_hash: str, number: int) -> str:
        """The object of shard `number`."""
        return f"{spec_hash}/{self.path}/c/{number}" + ("/0" if self.width else "")


def steps_of(spec: RobotSpec) -> tuple[ShardedArray, ...]:
    """The step arrays, without those that have no column, and `frame_times_ns` if there is a camera."""
    widths = {"state": spec.state_dim, "proposed": spec.action_dim, "executed": spec.action_dim}
    found = [
        ShardedArray(name, dtype, widths.get(name, 0), SHARD_ROWS, _CHUNK_ROWS, True)
        for name, dtype in STEPS
        if widths.get(name, 1)
    ]
    if spec.cameras:
        found.append(ShardedArray(FRAME_TIMES, "<i8", len(spec.cameras), SHARD_ROWS, _CHUNK_ROWS, True))
    return tuple(found)


class CameraArrays(msgspec.Struct, frozen=True):
    """The arrays of one camera."""

    name: str
    times: ShardedArray
    ends: ShardedArray
    jpeg: ShardedArray


def cameras_of(spec: RobotSpec) -> tuple[CameraArrays, ...]:
    """The arrays of each camera, in the spec's order."""
    found = []
    for camera in spec.cameras:
        folder = f"frames/{folder_name(camera.name)}"
        found.append(
            CameraArrays(
                camera.name,
                ShardedArray(f"{folder}/times_ns", "<i8", 0, SHARD_FRAMES, _CHUNK_ROWS, True),
                ShardedArray(f"{folder}/ends", "<i8", 0, SHARD_FRAMES, _CHUNK_ROWS, True),
                ShardedArray(f"{folder}/jpeg", "|u1", 0, SHARD_JPEG_BYTES, _CHUNK_JPEG_BYTES, False),
            )
        )
    return tuple(found)


FACTS_ARRAY = ShardedArray(FACTS, "|u1", 0, SHARD_FACTS_BYTES, _CHUNK_FACTS_BYTES, True)


@functools.lru_cache(maxsize=64)
def arrays_of(spec: RobotSpec) -> tuple[ShardedArray, ...]:
    """Every array of the group."""
    cameras = [array for camera in cameras_of(spec) for array in (camera.times, camera.ends, camera.jpeg)]
    return (*steps_of(spec), *cameras, FACTS_ARRAY)


def shard_keys(spec: RobotSpec, number: int) -> tuple[str, ...]:
    """Every object that shard `number` may have."""
    spec_hash = spec.hash
    return tuple(array.key(spec_hash, number) for array in arrays_of(spec))


def folder_name(camera: str) -> str:
    """A camera's name as one component of a key: what is not safe there becomes `=` and two hexadecimal digits."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", lambda match: "".join(f"={b:02X}" for b in match[0].encode()), camera)
    if not safe or safe[0] in "._" or safe == "zarr.json" or safe.endswith(".part"):
        safe = f"={safe[0].encode().hex().upper()}{safe[1:]}" if safe else "="
    return safe


@functools.lru_cache(maxsize=64)
def _templates(spec: RobotSpec) -> dict[str, bytes]:
    """The metadata objects of the group with arrays of one shard each, by key relative to the group."""
    files: dict[str, Any] = {}
    # as JSON would have it: plain names for enums
    attributes = {
        "format": FORMAT,
        "spec": msgspec.json.decode(msgspec.json.encode(spec)),
        "actors": list(ACTORS),
        "cameras": {camera.name: f"frames/{folder_name(camera.name)}" for camera in spec.cameras},
    }
    group = zarr.create_group(MemoryStore(files), attributes=attributes)
    for array in arrays_of(spec):
        parents = array.path.split("/")[:-1]
        for depth in range(len(parents)):
            group.require_group("/".join(parents[: depth + 1]))
        row = array.row_shape()
        packing = [BloscCodec(cname="zstd", clevel=3, shuffle=BloscShuffle.shuffle)] if array.packed else []
        group.create_array(
            array.path,
            shape=(array.shard, *row),
            dtype=np.dtype(array.dtype),
            chunks=(array.chunk, *row),
            shards={"shape": (array.shard, *row), "index_location": "start"},  # type: ignore[arg-type]
            compressors=[*packing, Crc32cCodec()],
            fill_value=0,
        )
    return {key: bytes(value.to_bytes()) for key, value in files.items()}


def metadata(spec: RobotSpec, number: int, used: dict[str, int]) -> dict[str, bytes]:
    """The metadata objects of a group whose last shard is `number`, by key.

    `used`: rows of that shard in use, by array path.
    """
    spec_hash, found = spec.hash, {}
    sizes = {f"{array.path}/zarr.json": (array, used.get(array.path, 0)) for array in arrays_of(spec)}
    for key, data in _templates(spec).items():
        if key in sizes:
            array, rows = sizes[key]
            content = msgspec.json.decode(data)
            content["shape"][0] = number * array.shard + rows
            data = msgspec.json.format(msgspec.json.encode(content), indent=2)
        found[f"{spec_hash}/{key}"] = data
    return found


def scratch_group(spec: RobotSpec) -> tuple[zarr.Group, dict[str, Any]]:
    """A group in memory with arrays of one shard each, and the objects in it, to encode a shard with."""
    files: dict[str, Any] = {}
    store = MemoryStore(files)
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    files.update((key, buffer.from_bytes(data)) for key, data in _templates(spec).items())
    return zarr.open_group(store, mode="r+"), files


# a chunk of zeros is a chunk: zarr would leave it out, and with it the sign of a zero
WHOLE = ArrayConfig(order="C", write_empty_chunks=True)
