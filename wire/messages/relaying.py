"""How segments pass through the hands of a site's relay, and how pictures that it holds back are asked for."""

from __future__ import annotations

from typing import ClassVar

from wire.messages import LARGE_BYTES, Message


class SealedSegment(Message, frozen=True, eq=False):
    """A segment that its robot sealed for the gateway: whoever passes it on can read it, and change nothing of it."""

    max_bytes: ClassVar[int] = LARGE_BYTES
    id: str
    """`Segment.id`"""
    robot: str
    body: bytes
    """the encoded `Segment`, with a hash in the place of each picture"""
    seal: bytes
    """of `body`, by `wire.identity.sealing`"""
    pictures: dict[str, tuple[bytes, ...]]
    """by camera, those that the hashes stand for, in their order; none of a camera that is held back"""


class FetchPictures(Message, frozen=True, eq=False):
    """To the gateway: pictures of these segments are wanted that a relay holds back. To that relay: send them."""

    segments: tuple[str, ...]
    """ids"""


class PicturesGone(Message, frozen=True, eq=False):
    """A relay that was asked for these segments has their pictures no more."""

    segments: tuple[str, ...]
    """ids"""
