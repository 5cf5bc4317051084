"""Specs name a data stream and refuse nonsense with the field named."""

from __future__ import annotations

import struct

import msgspec
import pytest

from tests import samples
from wire.codec import decode, encode
from wire.errors import ConfigError, ProtocolError, SpecMismatchError
from wire.messages.gateway import Hello
from wire.types import CameraSpec, Dimension


def test_equal_specs_share_a_hash_and_others_do_not() -> None:
    assert samples.spec().hash == samples.spec().hash
    assert samples.spec().hash != samples.spec(control_hz=50.0).hash
    assert samples.spec().data_hash != samples.spec(control_hz=50.0).data_hash


def test_the_hash_survives_the_wire_when_limits_are_whole_numbers() -> None:
    whole = msgspec.structs.replace(samples.spec(), state=(Dimension("x", "m", -1, 1),))
    came = msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=type(whole))
    assert came.hash == whole.hash


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("state", (Dimension("x", "m", 1.0, -1.0),), "low 1.0 not below high -1.0"),
        ("state", (Dimension("x", "", -1.0, 1.0),), "has no unit"),
        ("action", (Dimension("x", "m", 0, 1), Dimension("x", "m", 0, 1)), "stands twice"),
        ("control_hz", 0.0, "control_hz is 0.0; it must be positive"),
        ("embodiment", " ", "embodiment is empty"),
        ("state", (Dimension("x", "m", float("nan"), 1.0),), "state 'x' has low nan not below"),
        ("state", (Dimension("x", "m", 0.0, float("nan")),), "state 'x' has low 0.0 not below high nan"),
        ("action", (Dimension("x", "m", 0.0, float("inf")),), "action 'x' has high inf; give a finite limit"),
        ("action", (Dimension("x", "m", 0.0, 0.0),), "action 'x' has low 0.0 not below high 0.0"),
        ("action", (Dimension("x", " ", 0.0, 1.0),), "action 'x' has no unit; '1' stands for none"),
        ("state", (Dimension("", "m", 0.0, 1.0),), "a state name is empty"),
        ("cameras", (CameraSpec("front", 8, 8, 20.0),) * 2, "camera name 'front' stands twice"),
        ("cameras", (CameraSpec("", 8, 8, 20.0),), "a camera name is empty"),
        ("cameras", (CameraSpec("front", 0, 8, 20.0),), "camera 'front' has height 0"),
        ("cameras", (CameraSpec("front", 8, -8, 20.0),), "camera 'front' has width -8"),
        ("cameras", (CameraSpec("front", 8, 8, 0.0),), "camera 'front': rate_hz is 0.0; it must be positive"),
        ("control_hz", float("nan"), "control_hz is nan; it must be positive"),
        ("control_hz", float("inf"), "control_hz is inf; it must be positive"),
        ("control_hz", 1e308, "from 0.001 to 100000 Hz"),
        ("control_hz", 1e-300, "from 0.001 to 100000 Hz"),
        ("control_hz", "fast", "control_hz is 'fast'; give a number"),
        ("embodiment", None, "embodiment is None; give it a name"),
        ("embodiment", "arm\n/", "printable"),
        ("embodiment", "x" * 101, "at most 100"),
        ("action", (), "action is empty"),
        ("action", (Dimension("x", None, 0.0, 1.0),), "action 'x' has no unit"),  # type: ignore[arg-type]
        ("action", (Dimension("x", "m", "0", 1.0),), "action 'x': low is '0'; give a number"),  # type: ignore[arg-type]
        ("cameras", (CameraSpec("front", 10**9, 8, 20.0),), "camera 'front' has height 1000000000"),
    ],
)
def test_bad_specs_are_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        msgspec.structs.replace(samples.spec(), **{field: value})


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"\xa1m", b"\xa1 ", "has no unit"),
        (b"\xa5front", b"\xa5     ", "a camera name is empty"),
    ],
)
def test_a_bad_spec_that_comes_over_the_wire_is_refused_by_its_field(old: bytes, new: bytes, words: str) -> None:
    good = encode(Hello("robot-0", "edge", "c", 1, spec=samples.spec()))
    assert isinstance(decode(good), Hello)
    assert old in good
    with pytest.raises(ProtocolError, match=words):
        decode(good.replace(old, new))


def test_a_limit_below_its_minimum_is_refused_on_the_wire() -> None:
    spec = samples.spec()
    low, high = (b"\xcb" + struct.pack(">d", limit) for limit in (spec.action[0].low, spec.action[0].high))
    good = encode(Hello("robot-0", "edge", "c", 1, spec=spec))
    assert low + b"\xa4high" + high in good
    with pytest.raises(ProtocolError, match=r"state 'x' has low 1\.0 not below high -1.0"):
        decode(good.replace(low + b"\xa4high" + high, high + b"\xa4high" + low))


def test_a_mismatch_names_both_sides_and_the_field() -> None:
    other = msgspec.structs.replace(samples.spec(), cameras=(CameraSpec("wrist", 8, 8, 20.0),))
    with pytest.raises(
        SpecMismatchError, match=r"the policy: made for .*'cameras' differs: \['front'\] against \['wrist'\]"
    ):
        samples.spec().require(other, "the policy")
    samples.spec().require(samples.spec(), "the policy")
