"""Policy versions on disk: published in parts, kept whole, served in ranges.

A version is a file `<number>-<sha12>.safetensors`; it exists when its ledger row does. Numbers grow by one. Beside it
lie `.manifest`, which says what it is, and perhaps `.delta`, which makes it of its parent's file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from cloud_learner.buffer.files import open_directory, write_durably
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.buffer.store.objects import ObjectStore
from cloud_learner.gateway.storage.weight_exchange import WeightExchange
from cloud_learner.gateway.storage.weight_fit import require_fit
from cloud_learner.gateway.storage.weight_pruning import FetchedVersions, prune_files, remove_overtaken
from cloud_learner.gateway.storage.weight_upload import WeightUpload, delta_path, manifest_path
from wire.errors import (
    CorruptDataError,
    FleetError,
    InvalidDataError,
    NumberTakenError,
    RejectedError,
    storage_error,
    storage_errors,
)
from wire.messages.gateway import Deltas, FetchDeltas, FetchWeights, Publish, WeightBytes
from wire.types import PolicyVersion
from wire.weights.manifest import DeltaForm, Manifest, Signer, chunk_hashes, describe

log = logging.getLogger(__name__)
MAX_PART_BYTES = 4 * 1024 * 1024
"""The most that one answer to `FetchWeights` carries."""
MAX_WEIGHTS_BYTES = 64 * 1024**3
_REMEMBERED = 100
_MOST_DELTAS = 64
"""in a row; the whole is not far from as small by then"""
_LINEAGE = 64
_LEAST_DIGITS = 12
"""of a sha256 that a robot has to know: so many are in the names of its files"""


class VersionFiles(NamedTuple):
    """What is here of a version."""

    here: bool
    delta_bytes: int


class VersionOffer(NamedTuple):
    """What whoever is to run a version is told of it."""

    version: PolicyVersion
    manifest: bytes
    """encoded"""
    signature: bytes
    """of that"""
    delta: DeltaForm | None
    """of its parent, where one is here"""

    @property
    def whole_here(self) -> bool:
        """Whether its file is here, and not on its way from another gateway."""
        return bool(self.manifest)


class WeightStore:
    """The weights directory. Takes one upload at a time: a new `Publish` gives up an unfinished one, so that whoever
    calls lets one trainer publish at a time. One thread may `serve` while another one does all else."""

    def __init__(
        self, root: Path, ledger: Ledger, exchange: WeightExchange | None = None, signer: Signer | None = None
    ) -> None:
        """`exchange`: by which gateways that share ledger and object store have each other's versions; `signer`: of
        manifests."""
        self.exchange = exchange
        self._signer = signer
        self._root = root
        self._ledger = ledger
        self._upload: WeightUpload | None = None
        self._rows: OrderedDict[int, VersionRow] = OrderedDict()
        """of the versions that were asked for last: what is committed does not change"""
        self._offers: OrderedDict[int, VersionOffer] = OrderedDict()
        self._fetched = FetchedVersions()
        self._here: dict[int, VersionRow] = {}
        """whose files were here at the last `prune`"""

    @classmethod
    def open(
        cls, root: Path, ledger: Ledger, objects: ObjectStore | None = None, signer: Signer | None = None
    ) -> WeightStore:
        """Remove what a crash left half-written in the directory, and make sure that there is one that can be written.

        For the one writer. `objects`: where shards lie; where these are on other machines versions go there, too.
        """
        open_directory(root, "weights")
        remove_overtaken(root, ledger)
        shared = objects is not None and objects.remote and ledger.shared
        exchange = WeightExchange(root, ledger, objects) if objects is not None and shared else None
        return cls(root, ledger, exchange, signer)

    @property
    def signing_key(self) -> bytes:
        """That manifests are checked by, b"" when they are not signed."""
        return self._signer.public if self._signer is not None else b""

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
            raise NumberTakenError(
                f"policy version {version.number} is taken by {known.version.sha256[:12]}, "
                f"{version.sha256[:12]} cannot replace it: publish it as {self._next()}."
            )
        if version.number != self._next():
            raise RejectedError(f"policy version {version.number} does not follow: the next is {self._next()}.")
        if not 0 <= version.parent < version.number:
            raise RejectedError(f"policy version {version.number}: its parent, {version.parent}, is none before it.")
        if len(version.sha256) != 64 or set(version.sha256) - set("0123456789abcdef"):
            raise RejectedError(f"policy version {version.number}: {version.sha256[:80]!r} is no sha256.")
        if not 0 < version.size_bytes <= MAX_WEIGHTS_BYTES:
            raise RejectedError(
                f"policy version {version.number}: {version.size_bytes} bytes; 1 to {MAX_WEIGHTS_BYTES} are taken."
            )
        base = self._base(publish) if publish.base else None
        name = f"{version.number}-{version.sha256[:12]}.safetensors"
        with storage_errors(f"weights of version {version.number}", self._root / name):
            self._upload = WeightUpload(publish, self._root / name, base)
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
        if upload.received + len(part.data) > upload.size_bytes:
            self._give_up("too long")
            raise RejectedError(
                f"weights of version {version.number} are longer than the {upload.size_bytes} bytes offered."
            )
        try:
            upload.append(part.data)
            if upload.received < upload.size_bytes:
                return None
            chunks = upload.finish()
            manifest = self._describe(version, upload.path, chunks)
            self._require_fit(version, manifest)
            write_durably(manifest_path(upload.path), manifest, "a manifest")
        except OSError as error:
            self._give_up(str(error))
            raise storage_error(error, f"weights of version {version.number}", upload.path) from error
        except FleetError as error:
            self._give_up(str(error))
            raise
        self._upload = None
        try:
            self._ledger.commit_version(version, upload.path.name, upload.trained)
        except InvalidDataError as error:
            # A trainer at another gateway was faster, or this one reads another ledger.
            upload.drop()
            raise NumberTakenError(str(error)) from error
        self._remember(VersionRow(version, upload.path.name))
        return version

    def serve(self, request: FetchWeights) -> WeightBytes | None:
        """Bytes [offset, offset + size) of a version or its delta, or fewer at its end and above `MAX_PART_BYTES`; None
        while it is on its way from another gateway.

        Raises `RejectedError` for an unknown version, one whose file is gone or a range outside it, and
        `CorruptDataError` if that is torn.
        """
        row = self._row(request.number)
        if row is None:
            raise RejectedError(f"there is no policy version {request.number}; the newest is {self._next() - 1}.")
        path = self._root / row.path
        if request.delta:
            path = delta_path(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size if request.delta else row.version.size_bytes
                if not 0 <= request.offset < size or request.size < 1:
                    raise RejectedError(
                        f"weights of version {request.number}: no bytes [{request.offset}, +{request.size}) in {size}."
                    )
                wanted = min(request.size, size - request.offset, MAX_PART_BYTES)
                file.seek(request.offset)
                data = file.read(wanted)
        except FileNotFoundError as error:
            if request.delta:
                self._offers.pop(request.number, None)
                raise RejectedError(f"version {request.number} has no delta here: fetch the whole.") from error
            if self.exchange is not None:
                self.exchange.fetch(row)
                return None
            raise RejectedError(f"version {request.number}: its file is gone, as only the newest are kept.") from error
        except OSError as error:
            raise storage_error(error, "weights file", path) from error
        self._fetched.note(request.number)
        if len(data) != wanted:
            raise CorruptDataError(f"weights file {path} ends before its {size} bytes. Restore it from a backup.")
        return WeightBytes(request.number, request.offset, data, request.delta)

    def offer(self, number: int) -> VersionOffer | None:
        """What whoever is to run a version is told of it; None when there is no such version.

        Its manifest is b"" while its file is on its way from another gateway. Raises `StorageError`.
        """
        if (known := self._offers.get(number)) is not None:
            return known
        if (row := self._row(number)) is None:
            return None
        if not (manifest := self._manifest(row)):
            return VersionOffer(row.version, b"", b"", None)
        signature = self._signer.sign(manifest) if self._signer is not None else b""
        offer = self._offers[number] = VersionOffer(row.version, manifest, signature, self._delta(row))
        if len(self._offers) > _REMEMBERED:
            self._offers.popitem(last=False)
        return offer

    def request(self, number: int) -> VersionOffer | None:
        """`offer`; its file, if it is not here, is fetched from other gateways. Raises `RejectedError` when nobody has
        it, and `StorageError`."""
        offer, row = self.offer(number), self._row(number)
        if offer is not None and row is not None and not offer.whole_here:
            if self.exchange is None:
                raise RejectedError(
                    f"version {number}: its weights are gone, as only the newest are kept. Choose a newer version."
                )
            self.exchange.fetch(row)
        return offer

    def sizes(self, number: int) -> VersionFiles:
        """What is here of a version. Raises `StorageError`."""
        row = self._row(number)
        path = self._root / row.path if row is not None else self._root / "none"
        delta = delta_path(path)
        with storage_errors("weights file", path):
            return VersionFiles(path.exists(), delta.stat().st_size if delta.exists() else 0)

    def is_gone(self, number: int) -> bool:
        """Whether its file was here, and nobody has it any more. Raises `StorageError`."""
        return self.exchange is None and self._row(number) is not None and not self.sizes(number).here

    def prune(self, removable: Callable[[Mapping[int, int]], list[int]], room_bytes: float = 0.0) -> list[int]:
        """While all that is here takes more than `room_bytes`, delete files of the versions that `removable` names, of
        those by number with their parents that are here, and that nobody fetches; which. Raises `StorageError`."""
        numbers = (path.name.partition("-")[0] for path in self._root.glob("*.safetensors"))
        here = sorted({int(number) for number in numbers if number.isdecimal()})
        # Asked for once: there may be thousands, and each new version prunes.
        known = ((number, self._here.get(number) or self._row(number)) for number in here)
        self._here = {number: row for number, row in known if row is not None}
        gone = prune_files(self._root, self._here, removable, room_bytes, self._fetched.now())
        for number in gone:
            self._offers.pop(number, None)
        return gone

    def deltas(self, request: FetchDeltas) -> Deltas:
        """The deltas that make a version of one that whoever asks holds, if they are smaller than the whole."""
        found: list[DeltaForm] = []
        number, size = request.number, 0
        whole = row.version.size_bytes if (row := self._row(number)) is not None else 0
        while len(found) < _MOST_DELTAS:
            offer = self.offer(number)
            if offer is None or offer.delta is None:
                break
            found.append(offer.delta)
            size, number = size + offer.delta.size_bytes, offer.delta.base
            if size >= whole:
                break
            held = request.held.get(number, "")
            if len(held) >= _LEAST_DIGITS and offer.delta.base_sha256.startswith(held):
                return Deltas(request.number, tuple(reversed(found)))
        return Deltas(request.number, ())

    def version(self, number: int) -> PolicyVersion | None:
        """The version of this number, None when there is none."""
        row = self._row(number)
        return row.version if row is not None else None

    def newest(self) -> VersionOffer | None:
        """The newest version, None when there is none. Raises `StorageError`."""
        row = self._ledger.newest_version()
        return self.offer(self._remember(row).version.number) if row is not None else None

    def _base(self, publish: Publish) -> Path:
        """The file that a delta is of. Raises `RejectedError` when it cannot be used: the whole is to be published."""
        number, base = publish.version.number, publish.base
        row, whole = self._row(base), "Publish the whole."
        if base != publish.version.parent or row is None or row.version.size_bytes != publish.version.size_bytes:
            raise RejectedError(f"policy version {number}: a delta of {base}, which is not its like. {whole}")
        if not 0 < publish.delta_bytes < publish.version.size_bytes:
            raise RejectedError(f"policy version {number}: a delta of {publish.delta_bytes} bytes. {whole}")
        path = self._root / row.path
        if not path.exists():
            raise RejectedError(f"policy version {number}: version {base}, which it is a delta of, is gone. {whole}")
        return path

    def _describe(self, version: PolicyVersion, path: Path, chunks: bytes) -> bytes:
        """The manifest of a version."""
        parent = self._row(version.parent) if version.parent else None
        return describe(version, path, parent.version.sha256 if parent else "", self._lineage(version), chunks)

    def _manifest(self, row: VersionRow) -> bytes:
        """The manifest of a version that is committed, made again if it was lost; b"" while its file is not here."""
        path = self._root / row.path
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            known = manifest_path(path).read_bytes()
            if msgspec.msgpack.decode(known, type=Manifest).version == row.version:
                return known
        if not path.exists():
            return b""
        with storage_errors("weights file", path):
            manifest = self._describe(row.version, path, chunk_hashes(path))
        write_durably(manifest_path(path), manifest, "a manifest")
        return manifest

    def _require_fit(self, version: PolicyVersion, manifest: bytes) -> None:
        """Raises `RejectedError` for a version that its parent, or the newest one if that is not here, shows to be none
        for this fleet."""
        offer = self.offer(version.parent) if version.parent else None
        if offer is None or not offer.manifest:
            offer = self.newest()
        mine, parent = (
            msgspec.msgpack.decode(one, type=Manifest) if one else None
            for one in (manifest, offer.manifest if offer is not None else b"")
        )
        assert mine is not None
        require_fit(mine, parent, {one.spec_hash for one in self._ledger.robots() if one.spec_hash})

    def _lineage(self, version: PolicyVersion) -> tuple[int, ...]:
        found: list[int] = []
        number = version.parent
        while number and number not in found and len(found) < _LINEAGE:
            found.append(number)
            row = self._row(number)
            number = row.version.parent if row is not None else 0
        return tuple(found)

    def _delta(self, row: VersionRow) -> DeltaForm | None:
        path, base = delta_path(self._root / row.path), self._row(row.version.parent)
        if base is None or not path.exists():
            return None
        with storage_errors("weights file", path):
            size, chunks = path.stat().st_size, chunk_hashes(path)
        return DeltaForm(row.version.number, base.version.number, base.version.sha256, size, chunks)

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
