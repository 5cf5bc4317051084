"""Policy versions on disk: published in parts, kept whole, served in ranges.

A version is one file `<number>-<sha12>.safetensors`; it exists when its ledger row does. Numbers grow by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import OrderedDict
from pathlib import Path

from cloud_learner.buffer.files import TEMPORARY, move_durably, open_directory, remove_quietly
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.buffer.store.objects import ObjectStore
from cloud_learner.gateway.storage.weight_exchange import WeightExchange
from wire.errors import CorruptDataError, InvalidDataError, RejectedError, storage_error, storage_errors
from wire.messages.gateway import FetchWeights, Publish, WeightBytes
from wire.types import PolicyVersion

log = logging.getLogger(__name__)
MAX_PART_BYTES = 4 * 1024 * 1024
"""The most that one answer to `FetchWeights` carries."""
MAX_WEIGHTS_BYTES = 64 * 1024**3
_REMEMBERED = 100
_SYNC_BYTES = 16 * 1024**2
"""A gigabyte synced at its end would keep everybody waiting for seconds; so much of it at a time does not."""


class WeightStore:
    """The weights directory. Takes one upload at a time: a new `Publish` gives up an unfinished one."""

    def __init__(self, root: Path, ledger: Ledger, exchange: WeightExchange | None = None) -> None:
        """`exchange`: by which gateways that share ledger and object store have each other's versions."""
        self.exchange = exchange
        self._root = root
        self._ledger = ledger
        self._upload: _Upload | None = None
        self._rows: OrderedDict[int, VersionRow] = OrderedDict()
        """of the versions that were asked for last: what is committed does not change"""

    @classmethod
    def open(cls, root: Path, ledger: Ledger, objects: ObjectStore | None = None) -> WeightStore:
        """Remove what a crash left half-written in the directory, and make sure that there is one that can be written.

        For the one writer. `objects`: where shards lie; where these are on other machines versions go there, too.
        """
        open_directory(root, "weights")
        shared = objects is not None and objects.remote and ledger.shared
        return cls(root, ledger, WeightExchange(root, ledger, objects) if objects is not None and shared else None)

    def begin(self, publish: Publish) -> PolicyVersion | None:
        """Start to receive a version.

        Returns the version if it is stored already, with the same hash: it can be confirmed at once, and its parts,
        which come nevertheless, are dropped. Raises `RejectedError` when the number, hash or size cannot be, and
        `StorageError` when nothing can be written.
        """
        version = publish.version
        self._give_up(f"version {version.number} is offered instead")
        if (known := self._ledger.version(version.number)) is not None:
            if known.version.sha256 == version.sha256:
                return known.version
            raise RejectedError(
                f"policy version {version.number} is taken by {known.version.sha256[:12]}, "
                f"{version.sha256[:12]} cannot replace it: publish it as {self._next()}."
            )
        if version.number != self._next():
            raise RejectedError(f"policy version {version.number} does not follow: the next is {self._next()}.")
        if len(version.sha256) != 64 or set(version.sha256) - set("0123456789abcdef"):
            raise RejectedError(f"policy version {version.number}: {version.sha256[:80]!r} is no sha256.")
        if not 0 < version.size_bytes <= MAX_WEIGHTS_BYTES:
            raise RejectedError(
                f"policy version {version.number}: {version.size_bytes} bytes; 1 to {MAX_WEIGHTS_BYTES} are taken."
            )
        name = f"{version.number}-{version.sha256[:12]}.safetensors"
        with storage_errors(f"weights of version {version.number}", self._root / name):
            self._upload = _Upload(version, publish.trained, self._root / name)
        return None

    def receive(self, part: WeightBytes) -> PolicyVersion | None:
        """Take the next part; the version when it was the last one and everything is on disk and committed.

        Raises `RejectedError` for a part out of order, of another version, or when the whole does not match its hash,
        and `DiskFullError` and the like; the upload is then given up and may be offered again.
        """
        upload = self._upload
        if upload is None or part.number != upload.version.number:
            if self._ledger.version(part.number) is not None:
                return None
            raise RejectedError(f"weights of version {part.number} were not offered, or their upload was given up.")
        version = upload.version
        if part.offset != upload.received:
            self._give_up("a part is missing")
            raise RejectedError(
                f"weights of version {version.number}: byte {upload.received} expected, got {part.offset}."
            )
        if upload.received + len(part.data) > version.size_bytes:
            self._give_up("too long")
            raise RejectedError(
                f"weights of version {version.number} are longer than the {version.size_bytes} bytes offered."
            )
        try:
            upload.append(part.data)
            if upload.received < version.size_bytes:
                return None
            if (found := upload.digest.hexdigest()) != version.sha256:
                self._give_up("wrong hash")
                raise RejectedError(
                    f"weights of version {version.number}: sha256 {found[:12]} instead of {version.sha256[:12]}."
                )
            upload.finish()
        except OSError as error:
            self._give_up(str(error))
            raise storage_error(error, f"weights of version {version.number}", upload.path) from error
        self._upload = None
        try:
            self._ledger.commit_version(version, upload.path.name, upload.trained)
        except InvalidDataError as error:
            # A trainer at another gateway was faster, or this one reads another ledger.
            raise RejectedError(str(error)) from error
        self._remember(VersionRow(version, upload.path.name))
        return version

    def serve(self, request: FetchWeights) -> WeightBytes | None:
        """Bytes [offset, offset + size) of a version, or fewer at its end and above `MAX_PART_BYTES`; None while it is
        on its way from another gateway.

        Raises `RejectedError` for an unknown version or a range outside it, `CorruptDataError` if its file is gone or
        torn.
        """
        row = self._row(request.number)
        if row is None:
            raise RejectedError(f"there is no policy version {request.number}; the newest is {self._next() - 1}.")
        size = row.version.size_bytes
        if not 0 <= request.offset < size or request.size < 1:
            raise RejectedError(
                f"weights of version {request.number}: no bytes [{request.offset}, +{request.size}) in {size}."
            )
        wanted = min(request.size, size - request.offset, MAX_PART_BYTES)
        path = self._root / row.path
        try:
            with open(path, "rb") as file:
                file.seek(request.offset)
                data = file.read(wanted)
        except FileNotFoundError as error:
            if self.exchange is not None:
                self.exchange.fetch(row)
                return None
            raise CorruptDataError(f"weights file {path} is gone. Restore it from a backup.") from error
        except OSError as error:
            raise storage_error(error, "weights file", path) from error
        if len(data) != wanted:
            raise CorruptDataError(f"weights file {path} ends before its {size} bytes. Restore it from a backup.")
        return WeightBytes(request.number, request.offset, data)

    def version(self, number: int) -> PolicyVersion | None:
        """The version of this number, None when there is none."""
        row = self._row(number)
        return row.version if row is not None else None

    def newest(self) -> PolicyVersion | None:
        """The newest version, None when there is none."""
        row = self._ledger.newest_version()
        return self._remember(row).version if row is not None else None

    def _row(self, number: int) -> VersionRow | None:
        """Asked for once: robots fetch a version in parts, and also while the ledger is away."""
        row = self._rows.get(number) or self._ledger.version(number)
        return self._remember(row) if row is not None else None

    def _remember(self, row: VersionRow) -> VersionRow:
        self._rows[row.version.number] = row
        if len(self._rows) > _REMEMBERED:
            self._rows.popitem(last=False)
        return row

    def _next(self) -> int:
        newest = self._ledger.newest_version()
        return newest.version.number + 1 if newest else 1

    def _give_up(self, why: str) -> None:
        if self._upload is not None:
            log.warning("upload of policy version %d given up: %s.", self._upload.version.number, why)
            self._upload.drop()
            self._upload = None


class _Upload:
    """A version whose parts are coming in."""

    def __init__(self, version: PolicyVersion, trained: tuple[int, ...], path: Path) -> None:
        self.version = version
        self.trained = trained
        self.path = path
        self.received = 0
        self._synced = 0
        self.digest = hashlib.sha256()
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._file = open(self._temporary, "wb")  # noqa: SIM115  closed by finish or drop

    def append(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.received += len(data)
        if self.received - self._synced >= _SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._synced = self.received

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        move_durably(self._temporary, self.path)

    def drop(self) -> None:
        # closing flushes, which fails again on a full disk
        with contextlib.suppress(OSError):
            self._file.close()
        remove_quietly(self._temporary)
