"""A shard: the records of many segments, one after another as they stood in the journal, in one object.

Below `<spec hash>/` lies a zarr v3 group, so that others can read it without us: its attributes say of which robot spec
the records are, and its array `records` is a line of bytes cut into shards of `SHARD_BYTES`. Shard k is the object
`records/c/k`: an index, then compressed chunks, each with a CRC-32C behind it. Where a record begins within its shard
is in the ledger. What is behind the last record of a shard reads as 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import zarr
from numcodecs import zstd
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from cloud_learner.buffer.store.objects import ObjectStore
from cloud_learner.buffer.store.range_cache import Span
from wire.codec import MAX_MESSAGE_BYTES
from wire.errors import CorruptDataError
from wire.messages.gateway import ACTORS
from wire.types import RobotSpec

FORMAT = 3
SHARD_BYTES = MAX_MESSAGE_BYTES
"""of records, before they are compressed; any record fits"""
_CHUNK_BYTES = 256 * 1024
_LEVEL = 3
"""of zstd"""
_INDEX_BYTES = 16 * (SHARD_BYTES // _CHUNK_BYTES) + 4
"""Of the index at the beginning of an object: (offset, bytes) of each chunk, and a CRC-32C."""
_ALL_BYTES = 2**52
"""Length of the array: as much as fits into a float64, so that its metadata never change."""
_PACKED_BYTES = _CHUNK_BYTES + 4096
"""a chunk that cannot be compressed takes a little more, with its checksum"""
_EMPTY = 2**64 - 1
"""Offset and length of a chunk that is not there: all of it is 0."""


def shard_key(spec_hash: str, number: int) -> str:
    """The object of shard `number`."""
    return f"{spec_hash}/records/c/{number}"


@functools.lru_cache(maxsize=64)
def metadata(spec: RobotSpec) -> dict[str, bytes]:
    """The metadata objects of the spec's group, by key."""
    attributes = {
        "format": FORMAT,
        "records": "wire.messages.gateway.Segment as MessagePack, behind one byte with the protocol's version",
        # as JSON would have it: plain names for enums
        "spec": msgspec.json.decode(msgspec.json.encode(spec)),
        "actors": list(ACTORS),
    }
    files: dict[str, Any] = {}
    zarr.create_group(MemoryStore(files), attributes=attributes).create_array(
        "records",
        shape=(_ALL_BYTES,),
        dtype="uint8",
        chunks=(_CHUNK_BYTES,),
        shards={"shape": (SHARD_BYTES,), "index_location": "start"},  # type: ignore[arg-type]
        compressors=[ZstdCodec(level=_LEVEL), Crc32cCodec()],
        fill_value=0,
    )
    return {f"{spec.hash}/{key}": bytes(value.to_bytes()) for key, value in files.items()}


def encode_shard(records: Sequence[bytes]) -> memoryview:
    """The object with these records, which are at most `SHARD_BYTES` together and not all zeros.

    zarr would write the same, but no other thread of the process could take segments in while it joins all of it.
    """
    size = sum(map(len, records))
    chunks = _joined(records, -(-size // _CHUNK_BYTES) * _CHUNK_BYTES).reshape(-1, _CHUNK_BYTES)
    parts, index, end = [b""], np.full((SHARD_BYTES // _CHUNK_BYTES, 2), _EMPTY, "<u8"), _INDEX_BYTES
    for number, chunk in enumerate(chunks):
        if chunk.any():
            parts.append(_with_checksum(zstd.compress(chunk, _LEVEL)))
            index[number] = end, len(parts[-1])
            end += len(parts[-1])
    parts[0] = _with_checksum(index.tobytes())
    return _joined(parts, end).data


def _joined(parts: Sequence[bytes], size: int) -> np.ndarray:
    """uint8[size]: the parts, then 0. Other threads run meanwhile, as they do not for `b"".join`."""
    found, at = np.zeros(size, np.uint8), 0
    for part in parts:
        found[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return found


def read_spans(objects: ObjectStore, spans: Sequence[Span], cached: bool = True) -> list[bytes]:
    """The bytes [first, end) of the records of shards, by key, for each of `spans`; `cached` as `ObjectStore.read`.

    All that is needed of their indexes is asked for at once, then all that is needed of their chunks. zarr would read
    the same, with a request for each chunk, and zeros where the object is gone. Raises `CorruptDataError` when anything
    of it is gone or damaged, `StorageError` when it cannot be asked for now.
    """
    for key, first, end in spans:
        if not 0 <= first <= end <= SHARD_BYTES:
            raise CorruptDataError(
                f"object {objects.place}/{key}: the ledger says that a record lies from byte {first} to {end}, a shard "
                f"has {SHARD_BYTES}. Restore the ledger from a backup."
            )
    keys = list(dict.fromkeys(key for key, _, _ in spans))
    heads = objects.read([(key, 0, _INDEX_BYTES) for key in keys], cached)
    index = {
        key: np.frombuffer(_checked(head, objects, key), "<u8").reshape(-1, 2)
        for key, head in zip(keys, heads, strict=True)
    }
    needed = dict.fromkeys((key, number) for key, first, end in spans for number in _numbers(first, end))
    at = {(key, number): index[key][number].tolist() for key, number in needed if index[key][number][0] != _EMPTY}
    for (key, number), (offset, length) in at.items():
        if length > _PACKED_BYTES or not 0 <= offset - _INDEX_BYTES <= len(index[key]) * _PACKED_BYTES:
            raise CorruptDataError(
                f"object {objects.place}/{key}: chunk {number} cannot be the {length} bytes from {offset} on. Restore "
                "it from a backup."
            )
    parts = objects.read([(key, offset, offset + length) for (key, _), (offset, length) in at.items()], cached)
    packed = dict(zip(at, parts, strict=True))

    def unpack(key: str, number: int) -> bytes:
        part = packed.get((key, number))
        return bytes(_CHUNK_BYTES) if part is None else _unpacked(_checked(part, objects, key), objects, key)

    found = [b""] * len(spans)
    chunks: dict[tuple[str, int], bytes] = {}
    for position in sorted(range(len(spans)), key=lambda position: spans[position]):
        key, first, end = spans[position]
        numbers = _numbers(first, end)
        # what was unpacked for the record before and is not needed any more goes: memory that is used again is faster
        chunks = {(key, number): chunks.get((key, number)) or unpack(key, number) for number in numbers}
        some = b"".join(chunks.values())
        found[position] = some[first - numbers.start * _CHUNK_BYTES : end - numbers.start * _CHUNK_BYTES]
    return found


def _numbers(first: int, end: int) -> range:
    """Of the chunks that hold these bytes."""
    return range(first // _CHUNK_BYTES, -(-end // _CHUNK_BYTES))


def _with_checksum(data: bytes) -> bytes:
    return data + google_crc32c.value(data).to_bytes(4, "little")


def _checked(data: bytes, objects: ObjectStore, key: str) -> bytes:
    """`data` without the CRC-32C behind it."""
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise CorruptDataError(
            f"object {objects.place}/{key}: a chunk of it does not match its CRC-32C. Restore it from a backup."
        )
    return data[:-4]


def _unpacked(data: bytes, objects: ObjectStore, key: str) -> bytes:
    # what a frame claims to unpack to would be allocated, were there no place for it
    if (size := _frame_bytes(data)) != _CHUNK_BYTES:
        raise CorruptDataError(f"object {objects.place}/{key}: a chunk of it has {size} bytes.")
    chunk = np.empty(_CHUNK_BYTES, np.uint8)
    try:
        zstd.decompress(data, chunk)
    except (RuntimeError, ValueError) as error:
        raise CorruptDataError(f"object {objects.place}/{key}: a chunk of it cannot be unpacked: {error}.") from error
    return chunk.tobytes()


def _frame_bytes(data: bytes) -> int:
    """What a zstd frame says that it unpacks to (RFC 8878, 3.1.1.1); 0 where it says nothing."""
    about = data[4] if len(data) > 4 else 0
    single, width = about >> 5 & 1, (0, 2, 4, 8)[about >> 6]
    begin = 6 - single + (0, 1, 2, 4)[about & 3]
    width = width or single
    return int.from_bytes(data[begin : begin + width], "little") + (256 if width == 2 else 0)
