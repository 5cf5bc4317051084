"""Specs name a data stream and refuse nonsense with the field named."""

from __future__ import annotations

import msgspec
import pytest

from tests import samples
from wire.errors import ConfigError, SpecMismatch
from wire.types import CameraSpec, Dimension


def test_equal_specs_share_a_hash_and_others_do_not() -> None:
    assert samples.spec().hash == samples.spec().hash
    assert samples.spec().hash != samples.spec(control_hz=50.0).hash


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
        ("control_hz", 0.0, "control_hz must be positive"),
    ],
)
def test_bad_specs_are_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        msgspec.structs.replace(samples.spec(), **{field: value})


def test_a_mismatch_names_both_sides_and_the_field() -> None:
    other = msgspec.structs.replace(samples.spec(), cameras=(CameraSpec("wrist", 8, 8, 20.0),))
    with pytest.raises(
        SpecMismatch, match=r"the policy: made for .*'cameras' differs: \['front'\] against \['wrist'\]"
    ):
        samples.spec().require(other, "the policy")
    samples.spec().require(samples.spec(), "the policy")
