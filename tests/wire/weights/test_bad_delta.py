"""A delta from the net says what it likes: whatever it is, that is a `WeightsError` or another hash."""

from __future__ import annotations

import contextlib
import io
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.weights.files import applied, delta_of, floats, frame, frame_of, mapped, walk
from wire.errors import WeightsError
from wire.weights.delta import MAX_FRAME_BYTES, Precision, WeightsLayout, apply, read_frames

BASE, NEXT = (floats(w=values, n=values[:8]) for values in walk(500, 2))
DELTAS = {precision: delta_of(BASE, NEXT, precision) for precision in Precision}


def refuse(*deltas: bytes) -> None:
    """Refused by its kind of error, with little memory, and silently."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError), np.errstate(all="raise"):
            applied(BASE, *deltas)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_FRAME_BYTES
    finally:
        tracemalloc.stop()


@given(st.sampled_from(list(Precision)), st.data())
def test_a_torn_delta_is_refused(precision: Precision, data: st.DataObject) -> None:
    made, _ = DELTAS[precision]
    with pytest.raises(WeightsError):
        applied(BASE, made[: data.draw(st.integers(1, len(made) - 1))])


@given(st.sampled_from(list(Precision)), st.data())
def test_a_damaged_delta_raises_nothing_else(precision: Precision, data: st.DataObject) -> None:
    made, _ = DELTAS[precision]
    turned = bytearray(made)
    for place in data.draw(st.lists(st.integers(0, 8 * len(made) - 1), min_size=1, max_size=3, unique=True)):
        turned[place // 8] ^= 1 << place % 8
    with contextlib.suppress(WeightsError):
        applied(BASE, bytes(turned))


WHOLE = st.integers(-(2**63), 2**64 - 1) | st.integers(-8, 5000)
PIECE = st.tuples(
    WHOLE,
    WHOLE,
    st.sampled_from(["raw", "xor", "bf16", "nibbles", "sparse", "other", ""]),
    st.binary(max_size=64),
    st.floats(),
)


@given(st.lists(PIECE, max_size=4))
def test_pieces_that_claim_anything_raise_nothing_else(pieces: list[tuple[object, ...]]) -> None:
    with contextlib.suppress(WeightsError), np.errstate(all="raise"):
        applied(BASE, frame_of(*pieces))


@given(st.binary(max_size=200))
def test_bytes_that_are_anything_raise_nothing_else(data: bytes) -> None:
    for one in (data, frame(data)):
        with contextlib.suppress(WeightsError):
            applied(BASE, one)


@pytest.mark.parametrize(
    "piece",
    [
        (-4, 4, "raw", b"abcd"),
        (len(BASE) - 3, 4, "raw", b"abcd"),
        (2**63, 4, "raw", b"abcd"),
        (0, -4, "raw", b"abcd"),
        (0, 0, "raw", b""),
        (0, 2**62, "nibbles", b"", 1.0),
        # of another number of values than there are bytes for
        (0, 100, "raw", b"x"),
        (0, 4, "raw", b"abcde"),
        (0, 2, "xor", b"x" * 4),
        (0, 2, "xor", b"x" * 16),
        (0, 2, "bf16", b"x" * 2),
        (0, 2, "bf16", b"x" * 8),
        (0, 4, "nibbles", b"x", 1.0),
        (0, 1, "nibbles", b"", 1.0),
        (0, 4, "nibbles", b"xxx", 1.0),
        (0, 2, "sparse", b"", 1.0),
        (0, 2, "sparse", b"\xff\xff\xff\xff", 1.0),
        (0, 2, "sparse", b"\1\0\0\0\5\1", 1.0),
        (0, 2, "sparse", b"\1\0\0\0\0", 1.0),
        (0, 2, "sparse", b"\1\0\0\0\0\1\1", 1.0),
        # no width of a step
        (0, 2, "nibbles", b"x", float("nan")),
        (0, 2, "nibbles", b"x", float("inf")),
        (0, 2, "nibbles", b"x", 1e300),
    ],
)
def test_a_piece_that_cannot_be_is_refused(piece: tuple[object, ...]) -> None:
    refuse(frame_of(piece))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # four billion pieces
        b"\x91\x94\x00\x01\xa2\xff\xfe\xc4\x00",  # a kind that is no text
        b"\x91\x96\x00\x01\xa3raw\xc4\x01x\xcb" + bytes(8) + b"\x91" * 100_000,  # nested without an end
        b"\xdd" + (10**6).to_bytes(4, "big") + msgspec.msgpack.encode((0, 1, "raw", b"x")) * 10**6,
        bytes(2 * MAX_FRAME_BYTES),
        bytes(8 * MAX_FRAME_BYTES),
    ],
    ids=["nothing", "claims", "no text", "nested", "a million pieces", "large", "bomb"],
)
def test_a_frame_that_claims_more_than_it_has_is_refused_with_little_memory(data: bytes) -> None:
    refuse(frame(data))


@pytest.mark.parametrize("head", [MAX_FRAME_BYTES + 1, 2**32 - 1, 100])
def test_a_frame_that_claims_another_length_is_refused(head: int) -> None:
    refuse(head.to_bytes(4, "little") + b"x" * 50)


def test_bytes_behind_a_frame_are_refused() -> None:
    made = frame_of((0, 1, "raw", b"x"))
    refuse((len(made) - 4 + 1).to_bytes(4, "little") + made[4:] + b"x")


def test_a_delta_of_many_pieces_is_one_that_can_be_read() -> None:
    count = 10_000
    old = floats(**{f"t{number}": np.zeros(4, np.float32) for number in range(count)})
    new = floats(**{f"t{number}": np.full(4, number + 1, np.float32) for number in range(count)})
    made, published = delta_of(old, new)
    assert applied(old, made) == published == new
    assert len(list(read_frames(io.BytesIO(made)))) > 1


def test_a_delta_of_another_base_makes_another_file() -> None:
    made, published = DELTAS[Precision.int8]
    other = mapped(BASE)
    other[-100] ^= 1
    apply(other, read_frames(io.BytesIO(made)))
    assert other.tobytes() != published


def test_a_header_that_claims_to_be_the_whole_file_is_not_copied() -> None:
    large = np.zeros(64 * 1024 * 1024, np.uint8)
    large[:8] = np.frombuffer((len(large) - 8).to_bytes(8, "little"), np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match="cap"):
            WeightsLayout.of(large)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
