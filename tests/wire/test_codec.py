"""Messages survive the trip; what is not a message is refused with words."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import samples
from wire import codec
from wire.codec import decode, encode
from wire.errors import MessageTooLargeError, ProtocolError
from wire.messages.gateway import Ack, Heartbeat, Hello, RecordedChunk, Segment, TerminalObservation, WeightBytes
from wire.messages.local import ChunkReply, ChunkRequest, EpisodeEnded, StepRecorded
from wire.messages.recording import FlowTrace
from wire.types import Observation

GOLDEN_SEGMENT = "743d3aac89149b88"


def whole_segment() -> Segment:
    return msgspec.structs.replace(
        samples.segment(),
        terminal=TerminalObservation(4, np.ones(4, np.float32), {"front": 0}),
        chunks=(RecordedChunk(0, 1, samples.chunk(0).actions, 0, 2**31, np.nan),),
    )


def request(seen: Observation | None = None) -> ChunkRequest:
    seen = seen or samples.observation()
    return ChunkRequest(5, seen, 6, seen.state)


def test_a_segment_comes_back_equal() -> None:
    sent = samples.segment()
    came = decode(encode(sent))
    assert isinstance(came, Segment)
    for field in ("times_ns", "state", "actor", "chunk_tick", "delay_ticks", "reward", "terminated"):
        before, after = getattr(sent, field), getattr(came, field)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
    assert came.episode == sent.episode
    assert came.frames["front"].encoded == (b"jpeg",)


def test_what_an_episode_led_to_and_the_chunks_it_was_made_of_come_along() -> None:
    came = decode(encode(whole_segment()))
    assert isinstance(came, Segment) and came.terminal is not None
    assert (came.terminal.time_ns, came.terminal.frame_times_ns) == (4, {"front": 0})
    assert came.terminal.state.tolist() == [1, 1, 1, 1]
    (chunk,) = came.chunks
    assert (chunk.first_tick, chunk.version, chunk.observed_ns, chunk.seed) == (0, 1, 0, 2**31)
    assert np.isnan(chunk.log_prob) and np.array_equal(chunk.actions, samples.chunk(0).actions)
    recorded = encode(StepRecorded("e", samples.step(0), chunk)), encode(EpisodeEnded("e", "success", 5, came.terminal))
    step, end = map(decode, recorded)
    assert isinstance(step, StepRecorded) and step.chunk is not None and step.chunk.seed == 2**31
    assert isinstance(end, EpisodeEnded) and end.terminal is not None


def test_how_a_chunk_came_about_travels_and_what_was_recorded_before_has_none() -> None:
    trace = FlowTrace(0, 1, np.arange(128, dtype=np.float32).reshape(2, 64), np.ones(4, np.float32), 2.5)
    plain = whole_segment()
    explored = msgspec.structs.replace(plain, traces=(trace,))
    (came,) = decode(encode(explored)).traces
    assert (came.first_tick, came.step, came.age_ticks) == (0, 1, 2.5)
    assert np.array_equal(came.points, trace.points) and np.array_equal(came.state, trace.state)
    assert len(encode(explored)) - len(encode(plain)) < 4 * (128 + 4) + 60
    assert decode(encode(plain)).traces is msgspec.UNSET and b"traces" not in encode(plain)


def test_a_segment_recorded_before_there_were_terminal_observations_is_read() -> None:
    old = msgspec.msgpack.decode(encode(samples.segment())[1:])
    del old["terminal"], old["chunks"]
    came = decode(b"\x02" + msgspec.msgpack.encode(old), stored=True)
    assert isinstance(came, Segment)
    assert (came.terminal, came.chunks) == (None, ())


def test_what_nobody_recovers_in_is_the_same_bytes_as_before_people_could_say_so() -> None:
    plain = samples.segment()
    assert b"recovery" not in encode(plain)
    came = decode(encode(plain))
    assert isinstance(came, Segment) and came.recovery is msgspec.UNSET
    marked = decode(encode(msgspec.structs.replace(plain, recovery=np.array([False, True, True, False]))))
    assert isinstance(marked, Segment) and isinstance(marked.recovery, np.ndarray)
    assert (marked.recovery.dtype, marked.recovery.tolist()) == (np.bool_, [False, True, True, False])


def test_images_are_not_copied_when_they_arrive() -> None:
    came = decode(encode(request()))
    assert isinstance(came, ChunkRequest)
    picture = came.observation.images["front"].image
    assert not picture.flags.owndata
    assert np.array_equal(picture, samples.image())


def test_optional_parts() -> None:
    reply = decode(encode(ChunkReply(None, "late")))
    assert isinstance(reply, ChunkReply)
    assert (reply.chunk, reply.error) == (None, "late")
    came = decode(encode(StepRecorded("e", samples.step(3, frame_ns=7))))
    assert isinstance(came, StepRecorded)
    assert came.step.frames == {"front": 7}


def test_golden_bytes_of_the_wire() -> None:
    """Bytes that peers of this protocol version rely on; a change here needs a new PROTOCOL_VERSION."""
    assert codec.PROTOCOL_VERSION == 6
    assert encode(Heartbeat(5)) == bytes.fromhex(
        "0684a474797065a9486561727462656174a773656e745f6e7305a76563686f5f6e7300a96563686f65645f6e7300"
    )
    digest = hashlib.sha256(encode(whole_segment())).hexdigest()
    assert digest[:16] == GOLDEN_SEGMENT


def test_another_protocol_version_says_which_side_to_upgrade() -> None:
    with pytest.raises(ProtocolError, match="protocol 7, newer than this side's 6: upgrade vla-fleet here"):
        decode(b"\x07" + encode(Heartbeat(1))[1:])
    with pytest.raises(ProtocolError, match="protocol 5, older than this side's 6: upgrade vla-fleet there"):
        decode(b"\x05" + encode(Heartbeat(1))[1:])


@pytest.mark.parametrize("data", [b"", b"\x06", b"\x06\xc1", b"\x06" + b"\x91" * 2000, encode(Ack(("a",)))[:-1]])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_a_message(data: bytes) -> None:
    try:
        decode(b"\x06" + data)
    except ProtocolError as error:
        assert str(error)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_never_crashes(position: int, value: int) -> None:
    data = bytearray(encode(samples.segment()))
    data[1 + position % (len(data) - 1)] = value
    try:
        decode(bytes(data))
    except ProtocolError as error:
        assert str(error)


@pytest.mark.parametrize(
    "array",
    [["<f4", [2], b"1234"], ["<f4", [-1], b""], ["|O", [1], b"12345678"], ["<f4", [1]], "text", ["<f4", ["x"], b""]],
)
def test_arrays_that_do_not_fit_are_refused(array: object) -> None:
    good = msgspec.msgpack.decode(encode(request())[1:])
    good["observation"]["state"] = array
    with pytest.raises(ProtocolError):
        decode(b"\x06" + msgspec.msgpack.encode(good))


def test_unknown_dtype_is_not_sent() -> None:
    bad = samples.observation()
    bad = type(bad)(bad.time_ns, bad.state.astype(np.complex64), bad.images, bad.task)
    with pytest.raises(ProtocolError, match="complex64"):
        encode(request(bad))


def test_too_large_is_refused_on_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(WeightBytes(1, 0, bytes(5000)))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(MessageTooLargeError, match="send it in parts"):
        encode(WeightBytes(1, 0, bytes(5000)))
    with pytest.raises(MessageTooLargeError):
        decode(data)


def test_a_spec_that_makes_no_sense_is_no_message() -> None:
    """Its own check must not reach whoever receives it as anything but a refused message."""
    hello = msgspec.msgpack.decode(encode(Hello("r", "edge", "c", 1, 1, samples.spec()))[1:])
    hello["spec"]["state"][0]["low"] = 5.0
    with pytest.raises(ProtocolError, match="not below high"):
        decode(b"\x06" + msgspec.msgpack.encode(hello))


@pytest.mark.parametrize("shape", [[3] * 100_000, [0, 2**63], [2**40], [-1], 5])
def test_an_array_whose_shape_cannot_be_is_refused_at_once(shape: object) -> None:
    tree = msgspec.msgpack.decode(encode(samples.segment())[1:])
    tree["state"] = ["<f4", shape, b""]
    with pytest.raises(ProtocolError, match="array") as refused:
        decode(encode(Heartbeat(1))[:1] + msgspec.msgpack.encode(tree))
    assert len(str(refused.value)) < 1000


def test_each_type_has_a_cap_which_is_looked_at_before_the_message_is_read() -> None:
    picture, text = b"x" * 1_000_000, "x" * 1_000_000
    assert isinstance(decode(encode(WeightBytes(1, 0, picture))), WeightBytes)
    for small in (Ack((text,)), Hello("robot-0", "edge", text, 1)):
        with pytest.raises(MessageTooLargeError, match=f"a {type(small).__name__} of 1000"):
            decode(encode(small))
    with pytest.raises(MessageTooLargeError, match="cap"):
        decode(b"\x06" + b"\xc1" * 1_000_000)


def test_a_message_that_is_handed_on_is_looked_at_no_further_than_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = encode(samples.segment())
    later = codec.decode_unless(segment, {Segment})
    assert later == codec.Undecoded(Segment, segment)
    assert isinstance(codec.decode_unless(segment, {WeightBytes}), Segment)
    assert isinstance(codec.decode_unless(encode(Heartbeat(1)), {Segment}), Heartbeat)
    # what comes behind is for whoever decodes it; what it may not be at all is refused now
    assert isinstance(codec.decode_unless(segment[:-5], {Segment}), codec.Undecoded)
    for wrong in (b"", b"\x06", b"\x63" + segment[1:], b"\x06nonsense"):
        with pytest.raises(ProtocolError):
            codec.decode_unless(wrong, {Segment})
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(MessageTooLargeError):
        codec.decode_unless(segment, {Segment})
