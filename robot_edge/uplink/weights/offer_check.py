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
        """The hashes of its chunks, b"" where nobody signs: it is then fetched from the gateway alone. Raises
        `WeightsError`."""
        number = message.version.number
        if not message.signature and not self.key:
            return b""
        if not message.signature:
            raise WeightsError(
                f"version {number} was announced without a signature, and this fleet's gateway signs what may act: "
                "wait until its file has reached the gateway, which announces it then. If that does not come, its log "
                "says why; `vla-fleet versions promote` has another version act."
            )
        manifest = read_manifest(message.manifest, message.signature, self.key)
        if manifest.version != message.version:
            raise WeightsError(f"version {number}: a manifest of another version.")
        manifest.require_runnable(self.spec_hash)
        return manifest.chunks
