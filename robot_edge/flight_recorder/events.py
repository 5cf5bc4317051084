"""What a recorded tick consists of, and how it becomes bytes and comes back. MessagePack, no pickle.

A tick is the list of calls the loop made across its borders, in order, each with what came of it. Small arrays stand in
the event itself. A large one (an image, a latent, a network) is a reference into a table of the tick, so that the
control thread never digests or copies it: the file keeps it once, or only its digest when it is an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from hal.interfaces.robot import Feedback
from wire.codec import AnyMessage
from wire.errors import CorruptDataError
from wire.types import Observation, PolicyCapabilities, RobotSpec

FORMAT = 2
INLINE_BYTES = 2048
"""arrays up to this size stand in the event"""
DIGEST_BYTES = 16
SAMPLE = 8
"""decisions may look at images (`robot_edge.control.observation_monitor` does): whether two are equal, or every so many
pixels of them
"""
UPLINK, INFERENCE = 0, 1
LINES = ("uplink", "inference")
"""`SendEvent.line` and `Received.line` index this"""


class FlightHeader(msgspec.Struct, frozen=True):
    """The beginning of every flight file: all that is needed to build the same loop again."""

    name: str
    """of the robot"""
    session_id: str
    """names this start of the control process"""
    spec: RobotSpec
    config: dict[str, Any]
    """`LoopConfig` as plain values"""
    strategy: str
    """name of the chunking strategy"""
    settings: dict[str, Any] = {}
    """whatever else `make_loop` needs: the chunk scheduler's settings, gate, safety limits, motion"""
    trained: PolicyCapabilities = PolicyCapabilities()
    operated: bool = False
    """whether the loop has a scripted operator"""
    program: str = ""
    """version of vla-fleet; filled in by the recorder"""
    clock: str = ""
    """whose nanoseconds these are; filled in by the recorder"""
    started_unix_ns: int = 0
    """wall time of this start; filled in by the recorder"""
    file: int = 0
    """0 for the first file of a start, growing; filled in by the recorder"""
    format: int = FORMAT


class _Event(msgspec.Struct, frozen=True, array_like=True, eq=False, gc=False):
    pass


class Raised(msgspec.Struct, frozen=True, array_like=True):
    """An exception, by the name of its class."""

    kind: str
    text: str


def raised(error: BaseException | None) -> Raised | None:
    """How an exception stands in the file."""
    return None if error is None else Raised(type(error).__name__, str(error))


class SleepEvent(_Event, frozen=True, array_like=True, eq=False, tag=0):
    deadline_ns: int


class ClockEvent(_Event, frozen=True, array_like=True, eq=False, tag=1):
    now_ns: int


class Received(_Event, frozen=True, array_like=True, eq=False, tag=2):
    line: int
    message: AnyMessage | None


class SendEvent(_Event, frozen=True, array_like=True, eq=False, tag=3):
    line: int
    accepted: bool
    message: AnyMessage


class Read(_Event, frozen=True, array_like=True, eq=False, tag=4):
    observation: Observation | None
    error: Raised | None = None


class WriteEvent(_Event, frozen=True, array_like=True, eq=False, tag=5):
    action: np.ndarray
    feedback: Feedback | None
    error: Raised | None = None


class Reset(_Event, frozen=True, array_like=True, eq=False, tag=6):
    task: str
    seed: int
    error: Raised | None = None


class Proposed(_Event, frozen=True, array_like=True, eq=False, tag=7):
    action: np.ndarray | None
    error: Raised | None = None


class Progressed(_Event, frozen=True, array_like=True, eq=False, tag=8):
    left: float
    error: Raised | None = None


class Connected(_Event, frozen=True, array_like=True, eq=False, tag=9):
    error: Raised | None = None


Event = SleepEvent | ClockEvent | Received | SendEvent | Read | WriteEvent | Reset | Proposed | Progressed | Connected


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
    count: int
    events: bytes
    """`count` events one after the other"""
    references: tuple[Reference, ...]
    mode: str
    reason: str
    error: Raised | None
    """what the tick ended with instead of returning"""


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the loop knew after `tick`; 0 is before the first one."""

    tick: int
    state: bytes
    references: tuple[Reference, ...]
    left_out: tuple[str, ...] = ()
    """what could not be noted: a replay that begins here has it as in a new loop"""


class PreviewFrame(msgspec.Struct, frozen=True, array_like=True):
    """A camera frame for people."""

    tick: int
    camera: str
    time_ns: int
    jpeg: bytes


class Gap(msgspec.Struct, frozen=True, array_like=True):
    """Ticks [first, last] are missing, and why."""

    first: int
    last: int
    reason: str


def is_image(array: np.ndarray) -> bool:
    """Whether only its digest is kept."""
    return array.ndim == 3 and array.dtype == np.uint8


_names: dict[np.dtype, str] = {}
"""`dtype.str` is made anew whenever it is asked for"""


class EventEncoder:
    """Encodes events, collecting the large arrays in `large`."""

    def __init__(self) -> None:
        self.large: list[np.ndarray] = []
        self.copies: dict[int, np.ndarray] = {}
        """of images, by the id of what they are a copy of; kept from tick to tick by whoever made them"""
        self._at: dict[int, int] = {}
        self.encode_into = msgspec.msgpack.Encoder(enc_hook=self._array).encode_into

    def clear(self) -> None:
        self.large, self._at = [], {}

    def into(self, value: Any, buffer: bytearray) -> None:
        """Append `value`. Raises `TypeError` for what has no place in a file."""
        self.encode_into(value, buffer, -1)

    def _array(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = _names.get(value.dtype)
            if name is None:
                if value.dtype.kind not in "biuf":
                    raise TypeError(f"an array of dtype {value.dtype} cannot be recorded")
                name = _names[value.dtype] = value.dtype.str
            if value.nbytes <= INLINE_BYTES and not is_image(value):
                return name, value.shape, value.tobytes()
            return name, value.shape, self._refer(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__name__} cannot be recorded")

    def _refer(self, value: np.ndarray) -> int:
        index = self._at.get(id(value))
        if index is None:
            index = self._at[id(value)] = len(self.large)
            # A frame is captured once and never written to; anything else may be, unless it is closed to writing.
            kept = self.copies.get(id(value), value) if is_image(value) or not value.flags.writeable else value.copy()
            self.large.append(kept)
            if kept is not value:
                del self._at[id(value)]
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


def unpack(record: TickRecord, large: Sequence[np.ndarray]) -> list[Event]:
    """The events of a tick; `large` are the arrays of `record.references`. Raises `CorruptDataError`."""
    data = b"\xdd" + record.count.to_bytes(4, "big") + record.events
    try:
        return msgspec.msgpack.decode(data, type=list[Event], dec_hook=array_reader(large))
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise CorruptDataError(f"tick {record.tick} of the flight cannot be read: {error}.") from error


def array_reader(large: Sequence[np.ndarray]) -> Callable[[type, Any], Any]:
    """The msgspec hook that brings arrays back; they may be written to, as those of a driver may."""

    def read(kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise TypeError(f"no decoder for {kind.__name__}")
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
