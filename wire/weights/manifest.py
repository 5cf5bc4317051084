"""What a version is, signed with the key of the gateway that took it.

Chunks are addressed by what is in them and may come from anybody. They can only ever make the file whose hash the
manifest has, and the manifest only comes from the fleet: whoever passes chunks on can delay a version, not change it.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from wire.errors import WeightsError, storage_errors
from wire.types import PolicyVersion
from wire.untrusted import read_safetensors_header

CHUNK_BYTES = 1024 * 1024
HASH_BYTES = 32
RUNTIME = 1
"""what a process must understand to run a version: grows with the format of weights files"""
_KEY = "vla_fleet"
"""of the metadata in a weights file, see `policies.common.weights`"""
_PURPOSE = b"vla-fleet manifests of policy versions"


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a version."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """A version, all that has to be known before it is fetched."""

    version: PolicyVersion
    chunks: bytes
    """the sha256 of each `CHUNK_BYTES` of its file, one after the other"""
    parent_sha256: str = ""
    """of its parent's file, '' when that is not known here"""
    lineage: tuple[int, ...] = ()
    """its ancestors, the nearest first; not all of a long line"""
    tensors: tuple[TensorEntry, ...] = ()
    spec_hash: str = ""
    """of the robot it is for"""
    network: str = ""
    """the kind of policy"""
    runtime: int = RUNTIME
    """the least that whoever runs it must understand"""

    def require_runnable(self, spec_hash: str) -> None:
        """Raise `WeightsError` with the remedy if a robot of this spec cannot run it; '' for a spec nobody knows."""
        what = f"version {self.version.number}"
        if self.runtime > RUNTIME:
            raise WeightsError(
                f"{what} needs runtime {self.runtime}, this computer has {RUNTIME}: install the gateway's vla-fleet."
            )
        if spec_hash and self.spec_hash and self.spec_hash != spec_hash:
            raise WeightsError(
                f"{what} is for robot spec {self.spec_hash}, this robot's is {spec_hash}: start it with the fleet's "
                "recipe, or have it join the fleet it was made for."
            )


class DeltaForm(msgspec.Struct, frozen=True):
    """The file that makes a version of its parent, for whoever has that."""

    number: int
    """of the version it makes"""
    base: int
    base_sha256: str
    size_bytes: int
    chunks: bytes
    """as in `Manifest`, of the delta"""


class _Metadata(msgspec.Struct, frozen=True):
    network: str = ""
    spec_hash: str = ""
    format: int = RUNTIME


def describe(version: PolicyVersion, path: Path, parent_sha256: str, lineage: tuple[int, ...], chunks: bytes) -> bytes:
    """The encoded manifest of a version whose weights lie at `path`. Raises `StorageError`.

    A file that is no weights has no tensors in it: who runs it says why it is not to be had.
    """
    with storage_errors("weights file", path), path.open("rb") as file:
        try:
            header = read_safetensors_header(file, version.size_bytes, path.name)
        except WeightsError:
            return msgspec.msgpack.encode(Manifest(version, chunks, parent_sha256, lineage))
    try:
        metadata = msgspec.json.decode(header.metadata.get(_KEY, "{}"), type=_Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        metadata = _Metadata()
    tensors = tuple(TensorEntry(name, one.dtype, one.shape) for name, one in header.tensors.items())
    about = metadata.spec_hash, metadata.network, metadata.format
    return msgspec.msgpack.encode(Manifest(version, chunks, parent_sha256, lineage, tensors, *about))


def read_manifest(data: bytes, signature: bytes, key: bytes) -> Manifest:
    """The manifest that the holder of `key` (32 bytes, Ed25519) signed. Raises `WeightsError`."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError) as error:
        raise WeightsError(
            "a manifest that this fleet's gateway did not sign. Whoever sent it serves another fleet, or lies: connect "
            "this robot to its own fleet's gateway, or give it the keys of the other one."
        ) from error
    try:
        found = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise WeightsError(f"a manifest that cannot be read: {error}.") from error
    if len(found.chunks) != HASH_BYTES * count_chunks(found.version.size_bytes):
        raise WeightsError(f"a manifest of version {found.version.number} with hashes of other than all its chunks.")
    return found


class Signer:
    """Signs manifests. The key is made of the gateway's secret one: nothing more has to be kept or handed out."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: of a CURVE pair."""
        seed = HKDF(hashes.SHA256(), 32, None, _PURPOSE).derive(secret)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()
        """32 bytes"""

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


def count_chunks(size_bytes: int) -> int:
    """Of a file."""
    return -(-size_bytes // CHUNK_BYTES)


class ChunkHashes:
    """Hashes what is appended, in chunks."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open = hashlib.sha256()
        self._size = 0

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: CHUNK_BYTES - self._size]
            self._open.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size == CHUNK_BYTES:
                self._done.append(self._open.digest())
                self._open, self._size = hashlib.sha256(), 0

    def digest(self) -> bytes:
        """Of all that was appended."""
        return b"".join([*self._done, *([self._open.digest()] if self._size else [])])


def chunk_hashes(path: Path) -> bytes:
    """Of a file. Raises `OSError`."""
    found = ChunkHashes()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            found.append(data)
    return found.digest()


def hash_bytes(data: bytes) -> bytes:
    """As `chunk_hashes`, of bytes."""
    found, file = ChunkHashes(), io.BytesIO(data)
    while part := file.read(CHUNK_BYTES):
        found.append(part)
    return found.digest()
