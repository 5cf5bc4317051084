"""What a robot sealed is opened by its gateway alone, as it was, with or without pictures."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import zmq

from tests import samples
from wire.codec import decode, encode
from wire.errors import SealError
from wire.identity.sealing import Sealer, SealOpener, held_cameras, with_pictures, without_pictures
from wire.messages.gateway import CameraFrames, SealedSegment, Segment
from wire.transport.keys import KeyRecord, now
from wire.types import Role

ROBOT, OTHER, GATEWAY = (zmq.curve_keypair() for _ in range(3))
RECORDS = {
    name: KeyRecord(name, role, pair[0].decode(), now())
    for name, role, pair in (
        ("robot-0", Role.edge, ROBOT),
        ("robot-1", Role.edge, OTHER),
        ("trainer", Role.trainer, OTHER),
    )
}
OPENER = SealOpener(GATEWAY[1], RECORDS.get)
SEALER = Sealer(ROBOT[1], GATEWAY[0])


def segment() -> Segment:
    frames = {
        "front": CameraFrames(np.array([1, 2], np.int64), (b"one", b"two")),
        "wrist": CameraFrames(np.array([3], np.int64), (b"three",)),
        "none": CameraFrames(np.zeros(0, np.int64), ()),
    }
    return msgspec.structs.replace(samples.segment(), frames=frames)


def test_it_is_opened_as_it_was() -> None:
    sealed = decode(encode(SEALER.seal(segment())))
    assert isinstance(sealed, SealedSegment)
    assert encode(OPENER.open(sealed)) == encode(segment())
    assert b"three" not in sealed.body and set(sealed.pictures) == {"front", "wrist"}


def test_pictures_that_are_left_out_come_later() -> None:
    sealed = SEALER.seal(segment())
    some = OPENER.open(msgspec.structs.replace(sealed, pictures={"front": (b"one", b"two")}))
    assert held_cameras(some) == ("wrist",) and some.frames["wrist"].encoded == (b"",)
    assert encode(without_pictures(some)) == sealed.body == encode(without_pictures(segment()))
    assert encode(with_pictures(some, {"wrist": (b"three",)})) == encode(segment())
    assert encode(without_pictures(segment(), ["wrist"])) == encode(some)


def test_without_anything_held_back_a_segment_is_encoded_as_ever() -> None:
    assert b"sha256" not in encode(segment())


LIES: dict[str, Callable[[SealedSegment], SealedSegment]] = {
    "another body": lambda one: msgspec.structs.replace(one, body=one.body.replace(b"reach", b"retch")),
    "another seal": lambda one: msgspec.structs.replace(one, seal=bytes(32)),
    "sealed by another robot": lambda one: Sealer(OTHER[1], GATEWAY[0]).seal(segment()),
    "sealed for another gateway": lambda one: Sealer(ROBOT[1], OTHER[0]).seal(segment()),
    "another robot": lambda one: msgspec.structs.replace(one, robot="robot-1"),
    "no robot": lambda one: msgspec.structs.replace(one, robot="robot-9"),
    "a trainer": lambda one: msgspec.structs.replace(one, robot="trainer"),
    "another id": lambda one: msgspec.structs.replace(one, id="x/0"),
    "other pictures": lambda one: msgspec.structs.replace(one, pictures={"front": (b"two", b"one")}),
    "fewer pictures": lambda one: msgspec.structs.replace(one, pictures={"front": (b"one",)}),
    "more pictures": lambda one: msgspec.structs.replace(one, pictures={"front": (b"one", b"two", b"three")}),
    "another camera": lambda one: msgspec.structs.replace(one, pictures={"rear": (b"one", b"two")}),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_was_changed_is_refused(lie: str) -> None:
    with pytest.raises(SealError, match=r"robot-0-boot-000000/0|x/0"):
        OPENER.open(LIES[lie](SEALER.seal(segment())))


def test_what_a_robot_sealed_in_anothers_name_is_refused() -> None:
    theirs = msgspec.structs.replace(segment(), episode=samples.episode("robot-1"))
    with pytest.raises(SealError, match="another one"):
        OPENER.open(msgspec.structs.replace(SEALER.seal(theirs), robot="robot-0"))


def test_a_gateway_without_keys_opens_nothing() -> None:
    with pytest.raises(SealError, match="no robot of this fleet"):
        SealOpener().open(SEALER.seal(segment()))


def test_a_key_that_is_none_is_named() -> None:
    with pytest.raises(SealError, match="key directory"):
        Sealer(b"x" * 40, GATEWAY[0][:35])
