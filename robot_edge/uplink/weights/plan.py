"""What is fetched to have a version: its file, or deltas one after the other, as one row of bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wire.types import PolicyVersion
from wire.weights.manifest import CHUNK_BYTES, HASH_BYTES, DeltaForm

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Blob:
    """A file that the gateway has."""

    number: int
    """of the version whose weights, or whose delta, it is"""
    delta: bool
    size_bytes: int
    chunks: bytes
    """the sha256 of each of its chunks; b"" when nobody said"""


class Offer(NamedTuple):
    """A version, and what is said of how it can be had."""

    version: PolicyVersion
    delta: DeltaForm | None
    """of its parent"""
    chunks: bytes
    """hashes of those of its file, b"" when nobody said"""
    manifest: bytes = b""
    signature: bytes = b""


class Part(NamedTuple):
    """Bytes of one chunk of one blob."""

    number: int
    delta: bool
    offset: int
    """within the blob"""
    size: int
    chunk: bytes
    """sha256 of the chunk, b"" when nobody said"""
    chunk_bytes: int
    ends_chunk: bool


class FetchPlan:
    """Positions count the bytes of all blobs together."""

    def __init__(self, blobs: Sequence[Blob], base: str = "") -> None:
        """`base`: the name of the file here that deltas are applied to, "" for a version that is fetched whole."""
        self.blobs = tuple(blobs)
        self.base = base
        self.size_bytes = sum(blob.size_bytes for blob in blobs)

    @classmethod
    def whole(cls, number: int, size_bytes: int, chunks: bytes) -> FetchPlan:
        return cls((Blob(number, False, size_bytes, chunks),))

    @classmethod
    def by(cls, deltas: Sequence[DeltaForm]) -> FetchPlan:
        """One after the other, from what the first one is a delta of."""
        blobs = [Blob(one.number, True, one.size_bytes, one.chunks) for one in deltas]
        return cls(blobs, file_name(deltas[0].base, deltas[0].base_sha256))

    def part(self, position: int, most: int) -> Part:
        """At most `most` bytes from there on, of one chunk."""
        blob, offset = self._find(position)
        index = offset // CHUNK_BYTES
        begin = index * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, blob.size_bytes)
        size = min(most, end - offset)
        chunk = blob.chunks[index * HASH_BYTES : (index + 1) * HASH_BYTES]
        return Part(blob.number, blob.delta, offset, size, chunk, end - begin, offset + size == end)

    def chunk_begin(self, position: int) -> int:
        """Where the chunk begins that `position` lies in."""
        _, offset = self._find(position)
        return position - offset % CHUNK_BYTES

    def _find(self, position: int) -> tuple[Blob, int]:
        for blob in self.blobs:
            if position < blob.size_bytes:
                return blob, position
            position -= blob.size_bytes
        raise IndexError(f"{position} bytes behind the end")


def file_name(number: int, sha256: str) -> str:
    """Of a version."""
    return f"{number:08d}-{sha256[:12]}.safetensors"


def is_held(held: Mapping[int, str], number: int, sha256: str) -> bool:
    """Whether this version is among those that are here, the first 12 digits of whose sha256 are known."""
    return held.get(number) == sha256[:12]


def is_possible(version: PolicyVersion) -> bool:
    """Whether there can be such a version."""
    return bool(_HASH.fullmatch(version.sha256)) and version.number > 0 and version.size_bytes > 0


def same(one: PolicyVersion, other: PolicyVersion) -> bool:
    """Whether both are one version."""
    return (one.number, one.sha256) == (other.number, other.sha256)
