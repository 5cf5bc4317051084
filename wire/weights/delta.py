"""Deltas between two weights files of the same tensors, small because they are quantised.

    trainer    target T, published P     P' = P + step * round((T - P) / step)     sends round(...), keeps P'
    robot      has P                     P' = P + step * round(...)                 the same bytes, by their hash

What rounding left out is in T - P' and so in the next delta: error feedback (Seide et al. 2014, "1-bit SGD", section
3.1; Karimireddy et al. 2019, arXiv 1901.09847) without a state of its own. A version *is* the rebuilt file; a value of
it is at most 0.6 steps from what was trained (further only after a change of more than 127). Sums and products are
float32 and one operation each, which IEEE 754 rounds alike everywhere.

A delta is a row of frames, each a length of 4 bytes and deflate's block of the pieces of up to 4 MiB of the file.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import IO, Annotated, Any

import msgspec
import numpy as np

from wire.errors import InvalidDataError, WeightsError
from wire.untrusted import MAX_HEADER_BYTES, SafetensorsHeader, read_safetensors_header

_SLICE = 1 << 20
"""elements that are looked at together: they fit a processor's cache, and other threads have their turn between two"""
_SMALL = 64
"""a tensor of fewer elements, such as a normaliser's, travels as it is"""
_SPARSE = 0.04
"""share of values that change below which their places cost less than the values that stay"""
_LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""of what a frame unpacks to"""
_MOST_PIECES = 4096
"""of a frame: each takes memory of its own"""
_MAX_FLOAT = float(np.finfo(np.float32).max)
STEP = 1.5
"""times a delta's root mean square: 1.4 bits a value, on versions of a training run"""
_ROUND = 0.4
"""a change of less than 1 - 0.4 of a step waits for the next version: a tenth fewer bits than with 0.5, at an error
that is an eighth larger"""


class Precision(StrEnum):
    """How a delta says what changed."""

    exact = "exact"
    """every bit"""
    bf16 = "bf16"
    """the difference, rounded to 8 bits of mantissa"""
    int8 = "int8"
    """the difference in whole steps, at most 127 of them"""


class _Kind(StrEnum):
    raw = "raw"
    """the bytes themselves"""
    xor = "xor"
    """of 32-bit words with those before, the first bytes of all words first"""
    bf16 = "bf16"
    """the differences' upper halves, laid out alike"""
    nibbles = "nibbles"
    """two steps of -8 to 7 in a byte"""
    sparse = "sparse"
    """distances of the values that change, then their steps in a byte each"""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the file from `offset` on become others."""

    offset: int
    count: int
    """of float32; of bytes for `raw`"""
    kind: _Kind
    data: bytes
    step: float = 0.0


_FRAME = msgspec.msgpack.Decoder(Annotated[tuple[_Piece, ...], msgspec.Meta(max_length=_MOST_PIECES)])


class WeightsLayout(msgspec.Struct, frozen=True):
    """Where the tensors of a safetensors file lie."""

    data_offset: int
    """of the first tensor's first byte"""
    header: SafetensorsHeader

    @classmethod
    def read(cls, file: IO[bytes], size: int, what: object) -> WeightsLayout:
        """Raises `WeightsError` for a file that is none."""
        header = read_safetensors_header(file, size, what)
        return cls(file.tell(), header)

    @classmethod
    def of(cls, data: np.ndarray, what: object = "weights") -> WeightsLayout:
        """As `read`, of a file in memory, uint8[size]."""
        length = min(MAX_HEADER_BYTES, int.from_bytes(data[:8].tobytes(), "little"))
        return cls.read(io.BytesIO(data[: 8 + length].tobytes()), len(data), what)


class DeltaStats(msgspec.Struct):
    """What a delta says of its two files."""

    values: int = 0
    """float32 of tensors that are quantised"""
    changed: int = 0
    """of those, values that the delta changes"""
    tensors: int = 0
    """tensors with a change"""


@np.errstate(over="ignore", invalid="ignore")
def encode(
    base: np.ndarray,
    target: np.ndarray,
    write: Callable[[bytes], Any],
    precision: Precision = Precision.int8,
    step: float = STEP,
    stats: DeltaStats | None = None,
) -> None:
    """Write the delta from `base` to `target`, uint8[size] each, and make `target` what it rebuilds.

    `step`: of `int8`, in root mean squares of a tensor's delta.

    Raises `WeightsError` when the files have other tensors, or bytes that are no weights; `InvalidDataError` naming the
    tensor for values that are not finite. `target` may then be changed in part.
    """
    layout, other = WeightsLayout.of(target), WeightsLayout.of(base)
    if layout.header.tensors != other.header.tensors or layout.data_offset != other.data_offset:
        raise WeightsError("two versions with other tensors: such a version travels whole.")
    stats = stats if stats is not None else DeltaStats()
    frame: list[_Piece] = []
    held = 0

    def flush() -> None:
        nonlocal held
        if frame:
            packed = _pack(msgspec.msgpack.encode(tuple(frame)))
            write(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed)
        frame.clear()
        held = 0

    def add(piece: _Piece) -> None:
        nonlocal held
        if held + len(piece.data) > 4 * _SLICE or len(frame) == _MOST_PIECES:
            flush()
        frame.append(piece)
        held += len(piece.data)

    _add_raw(0, base[: layout.data_offset], target[: layout.data_offset], add)
    for name, tensor in layout.header.tensors.items():
        begin, end = (layout.data_offset + at for at in tensor.data_offsets)
        if tensor.dtype != "F32" or end - begin < 4 * _SMALL:
            if tensor.dtype == "F32" and not np.isfinite(_floats(target[begin:end])).all():
                raise InvalidDataError(f"'{name}' is not finite.")
            stats.tensors += _add_raw(begin, base[begin:end], target[begin:end], add)
            continue
        before = stats.changed
        _add_floats(name, begin, base[begin:end], target[begin:end], precision, step, add, stats)
        stats.tensors += stats.changed > before
    flush()


def apply(target: np.ndarray, frames: Iterable[bytes]) -> None:
    """Make `target`, uint8[size] of the base, the version that the delta's `frames` are for.

    Its hash says whether it is: a delta of another base rebuilds something else. Raises `WeightsError` for a delta that
    cannot be one of this file; `target` may then be changed in part.
    """
    for packed in frames:
        try:
            pieces = _FRAME.decode(_unpack(packed))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, zlib.error) as error:
            raise WeightsError(f"a delta that cannot be read: {error}.") from error
        for piece in pieces:
            size = piece.count * (1 if piece.kind == _Kind.raw else 4)
            if not (0 <= piece.offset <= len(target) - size and 0 < size <= MAX_FRAME_BYTES):
                raise WeightsError(f"a delta for bytes {piece.offset} to {piece.offset + size} of {len(target)}.")
            place = target[piece.offset : piece.offset + size]
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    _apply(place, piece)
            except (ValueError, IndexError) as error:
                raise WeightsError(f"a delta whose piece at {piece.offset} is not whole: {error}.") from error


def read_frames(file: IO[bytes]) -> Iterator[bytes]:
    """The frames of a delta. Raises `WeightsError` for one that is torn, and `OSError`."""
    while head := file.read(_LENGTH_BYTES):
        size = int.from_bytes(head, "little")
        if len(head) < _LENGTH_BYTES or size > MAX_FRAME_BYTES or len(data := file.read(size)) < size:
            raise WeightsError("a delta that ends within a frame.")
        yield data


# --- one piece --------------------------------------------------------------------------------------------------------


def _add_raw(offset: int, before: np.ndarray, after: np.ndarray, add: Callable[[_Piece], None]) -> bool:
    if np.array_equal(before, after):
        return False
    for first in range(0, len(after), 4 * _SLICE):
        part = after[first : first + 4 * _SLICE]
        add(_Piece(offset + first, len(part), _Kind.raw, part.tobytes()))
    return True


def _add_floats(
    name: str,
    offset: int,
    before: np.ndarray,
    after: np.ndarray,
    precision: Precision,
    step: float,
    add: Callable[[_Piece], None],
    stats: DeltaStats,
) -> None:
    old, new = _floats(before), _floats(after)
    parts = [(first, old[first : first + _SLICE], new[first : first + _SLICE]) for first in range(0, len(new), _SLICE)]
    squares = 0.0
    for _, old_part, new_part in parts:
        difference = new_part - old_part
        squares += float(np.dot(difference, difference))
    if not math.isfinite(squares):
        if not np.isfinite(new).all():
            raise InvalidDataError(f"'{name}' is not finite.")
        precision = Precision.exact  # the differences are, though the values are not
    stats.values += len(new)
    if squares == 0.0 and np.array_equal(before, after):
        return
    width = np.float32(step * math.sqrt(squares / len(new))) if math.isfinite(squares) else np.float32(0)
    if precision == Precision.int8 and not width > 1e-30:
        precision = Precision.exact
    for first, old_part, new_part in parts:
        place, count = offset + 4 * first, len(new_part)
        if precision == Precision.exact:
            words = old_part.view(np.uint32) ^ new_part.view(np.uint32)
            changed = int(np.count_nonzero(words))
            if changed:
                add(_Piece(place, count, _Kind.xor, _planes(words)))
        elif precision == Precision.bf16:
            halves = _round_bf16(new_part - old_part)
            changed = int(np.count_nonzero(halves))
            if changed:
                add(_Piece(place, count, _Kind.bf16, _planes(halves)))
                _add_bf16(old_part, halves, new_part)
            else:
                new_part[:] = old_part
        else:
            steps = _round_steps((new_part - old_part) / width)
            changed = int(np.count_nonzero(steps))
            new_part[:] = old_part
            if changed:
                _add_steps(place, steps, float(width), new_part, add)
        stats.changed += changed


def _round_steps(values: np.ndarray) -> np.ndarray:
    whole = np.copysign(np.floor(np.abs(values) + np.float32(_ROUND)), values)
    return np.asarray(np.clip(whole, -127, 127), np.int8)


def _add_steps(offset: int, steps: np.ndarray, width: float, values: np.ndarray, add: Callable[[_Piece], None]) -> None:
    """Change `values` by so many steps, as whoever has the pieces will."""
    low = np.clip(steps, -8, 7)
    if np.count_nonzero(low) < _SPARSE * len(steps):
        low, far = np.zeros_like(steps), steps
    else:
        codes = (low + 8).astype(np.uint8)
        if len(codes) % 2:
            codes = np.append(codes, np.uint8(8))
        piece = _Piece(offset, len(steps), _Kind.nibbles, (codes[::2] | codes[1::2] << 4).tobytes(), width)
        add(piece)
        np.add(values, low.astype(np.float32) * np.float32(width), out=values)
        far = steps - low
    if (where := np.flatnonzero(far)).size:
        add(_Piece(offset, len(steps), _Kind.sparse, _distances(where) + far[where].tobytes(), width))
        values[where] = values[where] + far[where].astype(np.float32) * np.float32(width)


def _apply(place: np.ndarray, piece: _Piece) -> None:
    """Raises `ValueError` or `IndexError` for data of another length."""
    count, data = piece.count, np.frombuffer(piece.data, np.uint8)
    if piece.kind != _Kind.sparse and len(data) != (size := _size_of(piece.kind, count)):
        raise ValueError(f"{len(data)} bytes where {size} were expected")
    if not abs(piece.step) <= _MAX_FLOAT:
        raise ValueError(f"a step of {piece.step}")
    if piece.kind == _Kind.raw:
        place[:] = data
        return
    values = _floats(place)
    match piece.kind:
        case _Kind.xor:
            words = place.view(np.uint32)
            words ^= _from_planes(data, count, np.uint32)
        case _Kind.bf16:
            _add_bf16(values.copy(), _from_planes(data, count, np.uint16), values)
        case _Kind.sparse:
            where, steps = _read_distances(piece.data)
            values[where] = values[where] + steps.astype(np.float32) * np.float32(piece.step)
        case _:
            pairs = np.empty(2 * len(data), np.uint8)
            pairs[::2], pairs[1::2] = data & 15, data >> 4
            steps = pairs[:count].astype(np.int8) - np.int8(8)
            np.add(values, steps.astype(np.float32) * np.float32(piece.step), out=values)


def _size_of(kind: _Kind, count: int) -> int:
    """Bytes of so many values."""
    match kind:
        case _Kind.raw:
            return count
        case _Kind.xor:
            return 4 * count
        case _Kind.bf16:
            return 2 * count
    return -(-count // 2)


def _floats(data: np.ndarray) -> np.ndarray:
    """float32 of bytes, which safetensors lays out little-endian and, our own, aligned."""
    floats: np.ndarray = data.view("<f4")
    return floats


def _planes(words: np.ndarray) -> bytes:
    """All first bytes, all second ones and so on: the upper ones of values that hardly changed are alike."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1).T).tobytes()


def _from_planes(data: np.ndarray, count: int, kind: type[np.unsignedinteger[Any]]) -> np.ndarray:
    bytes_of_each = np.ascontiguousarray(data.reshape(-1, count).T)
    return np.asarray(bytes_of_each.view(kind)[:, 0])


def _round_bf16(values: np.ndarray) -> np.ndarray:
    """uint16: the upper half of each float32, rounded to the nearest (ties up)."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _add_bf16(values: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    np.add(values, (halves.astype(np.uint32) << np.uint32(16)).view(np.float32), out=out)


def _distances(where: np.ndarray) -> bytes:
    """Distances of the growing numbers `where` in one byte each; 255 adds so much to the next."""
    gaps = np.diff(where, prepend=-1) - 1
    escapes = gaps // 255
    coded = np.full(len(gaps) + int(escapes.sum()), 255, np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = gaps % 255
    return len(coded).to_bytes(4, "little") + coded.tobytes()


def _read_distances(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Places and steps."""
    length = int.from_bytes(data[:4], "little")
    if not 0 < length < len(data) - 4:
        raise ValueError(f"places in {length} of {len(data)} bytes")
    coded, steps = np.frombuffer(data, np.uint8)[4 : 4 + length], np.frombuffer(data, np.int8)[4 + length :]
    ends = np.flatnonzero(coded != 255)
    sums = np.cumsum(coded.astype(np.int64))[ends]
    if len(sums) != len(steps):
        raise ValueError(f"{len(sums)} places for {len(steps)} steps")
    return sums + np.arange(len(sums)), steps


def _pack(data: bytes) -> bytes:
    """Steps are drawn as if by dice: nothing repeats, and a code for each byte is all there is to gain. On versions of
    a training run deflate's is within 3 percent of their entropy, and an eighth smaller than zstd at any level."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(data) + packer.flush()


def _unpack(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    data = unpacker.decompress(packed, MAX_FRAME_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise WeightsError(f"a delta's frame that is torn, or unpacks to more than {MAX_FRAME_BYTES} bytes.")
    return data
