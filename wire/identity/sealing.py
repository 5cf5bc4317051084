"""Seals segments, so that they may pass through anybody's hands: the gateway alone can tell whose they are.

Robot and gateway make the same key, each of its own secret one and of the other's public one (X25519, RFC 7748), which
both have anyway: nothing is handed out for it, and a key that is revoked seals nothing any more. What is sealed has a
hash in the place of each picture, so that it holds without them, and with them whenever they come.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping

import msgspec
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from wire.codec import decode, encode
from wire.errors import ProtocolError, SealError
from wire.identity.permissions import RECORDERS
from wire.messages.gateway import CameraFrames, SealedSegment, Segment
from wire.transport.keys import KeyRecord

HASH_BYTES = 32
_PURPOSE = b"vla-fleet segments by way of a relay"


class Sealer:
    """Of one robot, for one gateway."""

    def __init__(self, secret: bytes, gateway: bytes) -> None:
        """The robot's secret key and the gateway's public one, as in a `KeyPair`."""
        self._key = _shared_key(secret, gateway)

    def seal(self, segment: Segment) -> SealedSegment:
        body = encode(without_pictures(segment))
        pictures = {camera: frames.encoded for camera, frames in segment.frames.items() if frames.encoded}
        return SealedSegment(segment.id, segment.episode.robot, body, _seal(self._key, body), pictures)


class SealOpener:
    """Of one gateway. For any thread."""

    def __init__(self, secret: bytes = b"", record: Callable[[str], KeyRecord | None] = lambda name: None) -> None:
        """`secret`: the gateway's key; `record(name)`: that of the key which this name has now."""
        self._secret, self._record = secret, record
        self._keys: dict[str, bytes] = {}
        """by public key"""

    def open(self, sealed: SealedSegment) -> Segment:
        """The segment, without the pictures that did not come with it. Raises `SealError`."""
        what, remedy = f"segment {sealed.id[:200]!r}", "The relay that sent it lies, or is another fleet's."
        record = self._record(sealed.robot)
        if record is None or record.role not in RECORDERS:
            raise SealError(
                f"{what} is from {sealed.robot[:64]!r}, and no robot of this fleet has a key of that name now. If it "
                "joins again under its old key, start the relay again: it then sends it once more."
            )
        if not hmac.compare_digest(_seal(self._key(record.public), sealed.body), sealed.seal):
            raise SealError(f"{what} was not sealed by '{record.name}' for this gateway. {remedy}")
        try:
            segment = decode(sealed.body, stored=True)
        except ProtocolError as error:
            raise SealError(f"{what}, as '{record.name}' sealed it, cannot be read: {error}") from error
        if not isinstance(segment, Segment) or (segment.id, segment.episode.robot) != (sealed.id, sealed.robot):
            raise SealError(f"{what} is another one by what '{record.name}' sealed. {remedy}")
        return with_pictures(segment, sealed.pictures)

    def _key(self, public: str) -> bytes:
        if (key := self._keys.get(public)) is None:
            key = self._keys[public] = _shared_key(self._secret, public.encode())
        return key


def without_pictures(segment: Segment, cameras: Collection[str] | None = None) -> Segment:
    """`segment` with hashes in the place of the pictures of these `cameras`, None: of all."""
    held = {
        name: CameraFrames(
            frames.times_ns,
            (b"",) * len(frames.encoded),
            b"".join(hashlib.sha256(picture).digest() for picture in frames.encoded),
        )
        for name, frames in segment.frames.items()
        if frames.encoded and not frames.sha256 and (cameras is None or name in cameras)
    }
    return msgspec.structs.replace(segment, frames={**segment.frames, **held})


def with_pictures(segment: Segment, pictures: Mapping[str, tuple[bytes, ...]]) -> Segment:
    """`segment` with these pictures, by camera, in the place of their hashes. Raises `SealError` for others."""
    frames = dict(segment.frames)
    for camera, encoded in pictures.items():
        held = frames.get(camera)
        found = b"".join(hashlib.sha256(picture).digest() for picture in encoded)
        if held is None or not hmac.compare_digest(found, held.sha256):
            raise SealError(
                f"segment {segment.id[:200]!r}: pictures of camera {camera[:64]!r} are not those that its robot sealed."
            )
        frames[camera] = CameraFrames(held.times_ns, encoded)
    return msgspec.structs.replace(segment, frames=frames)


def held_cameras(segment: Segment) -> tuple[str, ...]:
    """Cameras whose pictures are held back."""
    return tuple(name for name, frames in segment.frames.items() if frames.sha256)


def _seal(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")


def _shared_key(secret: bytes, public: bytes) -> bytes:
    """Raises `SealError` for a public key that is none."""
    try:
        ours = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        shared = ours.exchange(X25519PublicKey.from_public_bytes(z85.decode(public)))
    except ValueError as error:
        raise SealError(f"no key to seal with can be made: {error}. Look at the files in the key directory.") from error
    return HKDF(hashes.SHA256(), 32, None, _PURPOSE).derive(shared)
