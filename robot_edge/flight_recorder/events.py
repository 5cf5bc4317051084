"""What a recorded tick consists of, and how it becomes bytes and comes back. MessagePack, no pickle.

A tick is the list of calls the loop made across its borders, in order, each with what came of it. Small arrays stand in
the call itself. A large one (an image, a latent, a network) is a reference into a table of the tick, so that the
control thread never digests or copies it: the file keeps it once, or only its digest when it is an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import LoopConfig
from robot_edge.flight_recorder.borders import CALLS
from wire.errors import CorruptDataError
from wire.types import RobotSpec

INLINE_BYTES = 2048
"""arrays up to this size stand in the call"""
DIGEST_BYTES = 16
SAMPLE = 8
"""decisions may look at images (`robot_edge.control.observation_checks` does): whether two are equal, or every so many
pixels of them
"""


class FlightHeader(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The beginning of every flight file: all that is needed to build the same loop again."""

    name: str
    """of the robot"""
    session_id: str
    """names this start of the control process"""
    spec: RobotSpec
    config: LoopConfig
    chunking: ChunkingConfig
    recipe: str = ""
    """whose motion the robot has, which a file cannot hold"""
    operated: bool = False
    """whether the loop has a scripted operator"""
    program: str = ""
    """version of vla-fleet; filled in by the recorder"""
    started_unix_ns: int = 0
    """wall time of this start; filled in by the recorder"""
    file: int = 0
    """0 for the first file of a start, growing; filled in by the recorder"""
    recipe_config: str = ""
    """the file that the recipe was made from"""


class Raised(msgspec.Struct, frozen=True, array_like=True):
    """An exception, by the name of its class."""

    kind: str
    text: str


def raised(error: BaseException | None) -> Raised | None:
    """How an exception stands in the file."""
    return None if error is None else Raised(type(error).__name__, str(error))


class Call(msgspec.Struct, frozen=True, array_like=True, eq=False, gc=False):
    """A call across one of the loop's borders: what it was given, and what came back or was raised."""

    name: str
    """a key of `CALLS`"""
    given: tuple[Any, ...] = ()
    result: Any = None
    error: Raised | None = None


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """An image or a large array of a tick: its bytes lie elsewhere in the file, or nowhere when it is an image."""

    dtype: str
    shape: tuple[int, ...]
    digests: tuple[bytes, ...]
    """of the array; of an image also of every `SAMPLE`th pixel, of every `SAMPLE`th of those, and so on"""


class TickRecord(msgspec.Struct, frozen=True, array_like=True):
    """One tick in the file."""

    tick: int
    """1 for the first of a start of the process"""
    calls: list[bytes]
    """each a `Call`"""
    references: tuple[Reference, ...] = ()
    mode: str = ""
    reason: str = ""
    error: Raised | None = None
    """what the tick ended with instead of returning"""


class TickBlock(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Ticks that follow each other, compressed together."""

    ticks: list[TickRecord]


class StoredArray(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The bytes of a large array that is no image."""

    digest: bytes
    data: bytes


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What the loop knew after `tick`; 0 is before the first one."""

    tick: int
    state: bytes
    references: tuple[Reference, ...] = ()
    left_out: tuple[str, ...] = ()
    """what could not be noted: a replay that begins here has it as in a new loop"""


class PreviewFrame(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A camera frame for people."""

    tick: int
    camera: str
    time_ns: int
    jpeg: bytes


class Gap(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ticks [first, last] are missing, and why."""

    first: int
    last: int
    reason: str


def is_image(array: np.ndarray) -> bool:
    """Whether only its digest is kept."""
    return array.ndim == 3 and array.dtype == np.uint8


class CallEncoder:
    """Encodes calls, collecting the large arrays in `large`. Raises `TypeError` for what has no place in a file."""

    def __init__(self) -> None:
        self.large: list[np.ndarray] = []
        self._at: dict[int, int] = {}
        self.encode = msgspec.msgpack.Encoder(enc_hook=self._array).encode

    def clear(self) -> None:
        self.large, self._at = [], {}

    def _array(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf":
                raise TypeError(f"an array of dtype {value.dtype} cannot be recorded")
            small = value.nbytes <= INLINE_BYTES and not is_image(value)
            return value.dtype.str, value.shape, value.tobytes() if small else self._refer(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot be recorded")

    def _refer(self, value: np.ndarray) -> int:
        # A hosted robot's frames are closed to writing; what is not may soon hold something else.
        if value.flags.writeable:
            self.large.append(value.copy())
            return len(self.large) - 1
        index = self._at.get(id(value))
        if index is None:
            index = self._at[id(value)] = len(self.large)
            self.large.append(value)
        return index


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be compared")


_comparer = msgspec.msgpack.Encoder(enc_hook=_plain)


def same(a: Any, b: Any) -> bool:
    """Whether two messages, actions or observations are equal bit by bit (NaN equals NaN)."""
    return a is b or _comparer.encode(a) == _comparer.encode(b)


def plain(value: Any) -> Any:
    """`value` as dicts, lists and arrays, for naming differences."""
    return msgspec.to_builtins(value, enc_hook=lambda array: array, builtin_types=(bytes, np.ndarray))


def unpack(record: TickRecord, large: Sequence[np.ndarray]) -> list[Call]:
    """The calls of a tick; `large` are the arrays of `record.references`. Raises `CorruptDataError`."""
    read = array_reader(large)
    try:
        return [_typed(msgspec.msgpack.decode(data, type=Call), read) for data in record.calls]
    except (msgspec.DecodeError, LookupError, ValueError, TypeError) as error:
        raise CorruptDataError(f"tick {record.tick} of the flight cannot be read: {error}.") from error


def _typed(call: Call, read: Callable[[type, Any], Any]) -> Call:
    given_types, result_type = CALLS[call.name]
    given = tuple(
        msgspec.convert(value, kind, dec_hook=read) for value, kind in zip(call.given, given_types, strict=True)
    )
    result = None if call.result is None else msgspec.convert(call.result, result_type, dec_hook=read)
    return Call(call.name, given, result, call.error)


def array_reader(large: Sequence[np.ndarray]) -> Callable[[type, Any], Any]:
    """The msgspec hook that brings arrays back; they may be written to, as those of a driver may."""

    def read(_: type, value: Any) -> Any:
        dtype, shape, data = value
        if isinstance(data, int):
            return large[data]
        return np.frombuffer(data, dtype).reshape(shape).copy()

    return read


def refer(array: np.ndarray) -> Reference:
    """What is noted of an image or large array."""
    digests, part = [_digest(array)], array
    while is_image(array) and max(part.shape[:2]) > 1:
        part = part[::SAMPLE, ::SAMPLE]
        digests.append(_digest(part))
    return Reference(array.dtype.str, array.shape, tuple(digests))


def stand_in(reference: Reference) -> np.ndarray:
    """An array in place of an image that was not kept: equal to another one exactly when the images were equal, and
    every `SAMPLE`th pixel of it equal exactly when those of the images were."""
    image = np.empty(reference.shape, np.uint8)
    part = image
    for digest in reference.digests:
        part[...] = np.resize(np.frombuffer(digest, np.uint8), part.shape)
        part = part[::SAMPLE, ::SAMPLE]
    return image


def _digest(array: np.ndarray) -> bytes:
    """blake2b of dtype, shape and bytes; the bytes themselves when they are fewer."""
    data = np.ascontiguousarray(array)
    if data.nbytes <= DIGEST_BYTES:
        return data.tobytes()
    hashed = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=DIGEST_BYTES)
    hashed.update(data.data.cast("B"))
    return hashed.digest()
