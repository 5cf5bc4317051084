"""Deletes files of versions that nobody needs; what somebody is fetching is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.gateway.storage.weight_upload import delta_path, manifest_path
from wire.errors import StorageError, storage_errors

log = logging.getLogger(__name__)

FETCHED_S = 60.0
"""without a request for so long nobody fetches a version"""


class FetchedVersions:
    """Versions that were asked for of late. Whoever fetches slowly would otherwise never have one whole."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._lock = threading.Lock()
        """one thread serves, another one prunes"""

    def note(self, number: int) -> None:
        """A part of it was asked for."""
        with self._lock:
            self._at_s[number] = time.monotonic()

    def now(self) -> set[int]:
        """Those that are being fetched."""
        now_s = time.monotonic()
        with self._lock:
            self._at_s = {number: at_s for number, at_s in self._at_s.items() if now_s - at_s < FETCHED_S}
            return set(self._at_s)


def prune_files(
    root: Path,
    rows: Mapping[int, VersionRow],
    removable: Callable[[Mapping[int, int]], list[int]],
    room_bytes: float,
    stay: Collection[int],
) -> list[int]:
    """As `WeightStore.prune`. rows: of the versions whose files are in `root`; `stay`: those that stay all the same."""
    gone: list[int] = []
    taken = sum(row.version.size_bytes for row in rows.values())
    for number in removable({number: row.version.parent for number, row in rows.items()}):
        if taken <= room_bytes:
            break
        if number in stay:
            continue
        gone.append(number)
        taken -= rows[number].version.size_bytes
        _delete(root / rows[number].path)
    return gone


def remove_overtaken(root: Path, ledger: Ledger) -> None:
    """Delete what a gateway that was killed had received and not committed, where another version has its number by
    now. Raises `StorageError`."""
    for path in root.glob("*.safetensors"):
        number = path.name.partition("-")[0]
        row = ledger.version(int(number)) if number.isdecimal() else None
        if row is not None and row.path != path.name:
            _delete(path)


def _delete(path: Path) -> None:
    with storage_errors("weights file", path):
        # the last one first: without its weights a version is not offered
        for one in (path, delta_path(path), manifest_path(path)):
            one.unlink(missing_ok=True)


def log_not_pruned(error: Exception) -> None:
    """Old versions stay until the next time. Raises what is no `StorageError`."""
    if not isinstance(error, StorageError):
        raise error
    log.warning("old versions stay: %s", error)
