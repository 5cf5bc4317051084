"""Whether an announced version is from this fleet, and for this robot."""

from __future__ import annotations

from wire.errors import WeightsError
from wire.messages.gateway import VersionAvailable
from wire.weights.manifest import read_manifest


class OfferCheck:
    """Only what comes from the gateway itself is checked here, which says its key before it announces anything."""

    def __init__(self) -> None:
        self.key = b""
        """that manifests are signed by, b"" while it is not known"""
        self.spec_hash = ""
        """what versions must be for, "" while that is not known"""

    def chunks_of(self, message: VersionAvailable) -> bytes:
        """The hashes of its chunks, b"" where nothing is signed: it is then fetched from the gateway alone. Raises
        `WeightsError`."""
        if not message.signature:
            return b""
        manifest = read_manifest(message.manifest, message.signature, self.key)
        if manifest.version != message.version:
            raise WeightsError(f"version {message.version.number}: a manifest of another version.")
        manifest.require_runnable(self.spec_hash)
        return manifest.chunks
