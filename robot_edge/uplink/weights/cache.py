"""The versions on this disk: which of them stay, and which one acted last."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import deque
from collections.abc import Container
from pathlib import Path

import msgspec

from robot_edge.uplink.weights.plan import Offer, file_name
from wire.errors import WeightsError, storage_errors
from wire.transport.keys import write_atomically
from wire.types import PolicyVersion

COMING, REBUILT = ".part", ".tmp"
_NOTE, _DIGEST_BYTES = "acting", 32
STAYS_FREE_BYTES = 64 * 1024 * 1024
"""of the disk, for others"""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{12})\.safetensors")


class ActedVersion(msgspec.Struct, frozen=True):
    """A version that acted, with what its gateway said of it. On the disk behind a sha256 of its own."""

    version: PolicyVersion
    manifest: bytes
    signature: bytes
    key: bytes
    """of the gateway; b"" where nothing is signed"""


class WeightCache:
    """For the thread that may wait for the disk. Raises `OSError`.

    The `keep` versions stay that were used last. Whatever else is used meanwhile, so do the one that acts and the
    `loading` last ones that have been handed out since it was.
    """

    def __init__(self, directory: Path, keep: int = 3, loading: int = 1) -> None:
        """`loading`: so many versions may be handed out before one of the first acts. Raises `StorageError`."""
        self.directory = directory
        self.note = directory / _NOTE
        self._keep = keep
        self._handed_out: deque[Offer] = deque(maxlen=loading)
        """since the one that acts, the newest last"""
        self._acting: Offer | None = None
        self._noted: Offer | None = None
        """the same, unless it could not be noted"""
        with storage_errors("preparing the weight cache", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for stale in directory.glob(f"*{REBUILT}"):
                stale.unlink()

    def path(self, offer: Offer) -> Path:
        """Of a version's file, whether it is here or not."""
        return self.directory / file_name(offer.version.number, offer.version.sha256)

    def held(self) -> dict[int, str]:
        """The first 12 hexadecimal digits of the sha256 of versions that are here, by number."""
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return {int(found[1]): found[2] for found in names if found}

    def hand_out(self, offer: Offer) -> None:
        """Its file is here, and right: whoever is to load it may do so from now on. Older ones go."""
        # A version that was called back to is younger than those that were rolled back.
        os.utime(self.path(offer))
        self._handed_out.append(offer)
        count = len(list(self.directory.glob("*.safetensors")))
        for old in self._superseded()[: max(0, count - self._keep)]:
            old.unlink()

    def make_room(self, size_bytes: int, besides: Container[str]) -> bool:
        """Have so many bytes free, beside those that stay free. Superseded versions go for that, but not in vain, and
        none whose file's name is in `besides`."""
        going = [path for path in self._superseded() if path.name not in besides]
        size_bytes += STAYS_FREE_BYTES
        if self.free_bytes() + sum(path.stat().st_size for path in going) >= size_bytes:
            while going and self.free_bytes() < size_bytes:
                going.pop(0).unlink()
        return self.free_bytes() >= size_bytes

    def free_bytes(self) -> int:
        """Of the disk."""
        return shutil.disk_usage(self.directory).free

    def on_activated(self, number: int, key: bytes) -> None:
        """One that was handed out acts: it is noted, and those before it are waited for no more."""
        found = next((index for index, offer in enumerate(self._handed_out) if offer.version.number == number), None)
        if found is None:
            return
        for _ in range(found):
            self._handed_out.popleft()
        self._acting = offer = self._handed_out.popleft()
        note = msgspec.msgpack.encode(ActedVersion(offer.version, offer.manifest, offer.signature, key))
        # A note that outlives a power cut names a file that does.
        _sync(self.path(offer))
        _sync(self.directory)
        write_atomically(self.note, hashlib.sha256(note).digest() + note, 0o600)
        _sync(self.directory)
        self._noted = offer

    def acted(self) -> tuple[ActedVersion, Path] | None:
        """The version that acted last, and its file, which is what it was; None when none did.

        Raises `WeightsError` where note or file are damaged.
        """
        try:
            data = self.note.read_bytes()
        except FileNotFoundError:
            return None
        digest, note = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        try:
            found = msgspec.msgpack.decode(note, type=ActedVersion)
        except (msgspec.DecodeError, UnicodeDecodeError):
            found = None
        if found is None or hashlib.sha256(note).digest() != digest:
            raise WeightsError(f"{self.note}, which names the version that acted last, is damaged.")
        offer = Offer(found.version, None, b"", found.manifest, found.signature)
        path = self.path(offer)
        if not path.exists() or _sha256(path) != found.version.sha256:
            raise WeightsError(f"version {found.version.number} acted last, and {path} is not what it was then.")
        self._acting = self._noted = offer
        return found, path

    def _superseded(self) -> list[Path]:
        """Files that nobody needs now, those first that were used longest ago."""
        needed = {self.path(offer) for offer in (self._noted, self._acting, *self._handed_out) if offer is not None}
        others = set(self.directory.glob("*.safetensors")) - needed
        return sorted(others, key=lambda path: path.stat().st_mtime_ns)


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
