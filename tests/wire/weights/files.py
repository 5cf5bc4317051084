"""Weights files and deltas of them, made by the tests."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from wire.types import PolicyVersion
from wire.weights.delta import STEP, DeltaStats, Precision, apply, encode, read_frames

DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "BF16": "<u2"}


def pack(tensors: Mapping[str, tuple[str, np.ndarray]], metadata: Mapping[str, str] | None = None) -> bytes:
    """A weights file of (dtype, values) by name; those of BF16 are the upper halves of float32."""
    head: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    body = b""
    for name, (dtype, values) in tensors.items():
        data = np.asarray(values, DTYPES[dtype]).tobytes()
        head[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(head).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text + body


def floats(**tensors: np.ndarray) -> bytes:
    """A weights file of float32."""
    return pack({name: ("F32", values) for name, values in tensors.items()})


def mapped(data: bytes) -> np.ndarray:
    """uint8[size], which may be changed."""
    return np.frombuffer(bytearray(data), np.uint8)


def delta_of(
    base: bytes,
    target: bytes,
    precision: Precision = Precision.int8,
    step: float = STEP,
    stats: DeltaStats | None = None,
) -> tuple[bytes, bytes]:
    """The delta, and the version that it makes of `base`."""
    parts: list[bytes] = []
    made = mapped(target)
    encode(mapped(base), made, parts.append, precision, step, stats)
    return b"".join(parts), made.tobytes()


def applied(base: bytes, *deltas: bytes) -> bytes:
    made = mapped(base)
    apply(made, read_frames(io.BytesIO(b"".join(deltas))))
    return made.tobytes()


def frame(data: bytes) -> bytes:
    """A delta's frame of whatever somebody may have put together."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(data) + packer.flush()
    return len(packed).to_bytes(4, "little") + packed


def frame_of(*pieces: Sequence[object]) -> bytes:
    return frame(msgspec.msgpack.encode(pieces))


def version_of(number: int, data: bytes, parent: int | None = None) -> PolicyVersion:
    parent = number - 1 if parent is None else parent
    return PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), parent, 10 * number, 5, 3, 99)


def walk(count: int, versions: int, *, rate: float = 1e-3, seed: int = 0) -> Sequence[np.ndarray]:
    """What a trainer has at each of so many versions."""
    random = np.random.default_rng(seed)
    values = [random.standard_normal(count, np.float32)]
    for _ in range(versions - 1):
        values.append(values[-1] + rate * random.standard_normal(count, np.float32))
    return values
