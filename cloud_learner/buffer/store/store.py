"""The store of segments: journal first, shards later, and one way to read both.

A segment is taken by `append_all`: its record is on the device, then its ledger row is committed. Sealing moves records
into a shard. A reader asks the ledger where a record lies each time, so it sees it in one place or the other, and when
it was moved between the question and the answer it asks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import HeldBy, SegmentRow
from cloud_learner.buffer.store.journal import Journal
from cloud_learner.buffer.store.objects import ObjectStore
from cloud_learner.buffer.store.quarantine import Quarantine
from cloud_learner.buffer.store.shard import FORMAT, encode_shard, metadata, read_spans, shard_key
from wire import codec
from wire.errors import (
    CorruptDataError,
    FormatError,
    InvalidDataError,
    MessageTooLargeError,
    ProtocolError,
    StorageError,
)
from wire.messages.gateway import CameraFrames, Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
MARK = "store.json"
"""The object that says which format the store has."""
_MOVES = 8
"""How often a segment may have been moved while it was being read."""
_NO_FRAMES = CameraFrames(np.zeros(0, np.int64), ())


class Records(msgspec.Struct, frozen=True):
    """What `SegmentStore.read_records` found. A row that is in none of these was forgotten."""

    payloads: dict[int, bytes]
    """by ledger row: the encoded segments, with the SHA-256 that the ledger has"""
    damaged: dict[int, str]
    """rows that cannot be read, with the reason"""
    elsewhere: tuple[int, ...] = ()
    """rows in the journal of another machine or gateway; they can be read when they have been sealed"""


class ReadResult(msgspec.Struct, frozen=True):
    """What `SegmentStore.read` found; as `Records`, decoded."""

    segments: dict[int, Segment]
    damaged: dict[int, str]
    elsewhere: tuple[int, ...] = ()
    labels: dict[int, np.ndarray] = {}
    """float32[T, L] by row, where they were asked for as well"""


class SegmentStore:
    """Journal, objects and ledger together. Readers construct it; who writes uses `open`. For several threads."""

    def __init__(self, journal_dir: Path, objects: ObjectStore, ledger: Ledger) -> None:
        self.journal = Journal(journal_dir)
        self.quarantine = Quarantine(journal_dir.parent / "quarantine")
        self.objects = objects
        self.ledger = ledger
        self._specs: dict[str, RobotSpec] = {}
        self._described: set[str] = set()
        """specs of which this process wrote the metadata, which never change"""
        self._appending = threading.Lock()

    @classmethod
    def open(cls, journal_dir: Path, objects: ObjectStore, ledger: Ledger, name: str = "") -> SegmentStore:
        """The store for one that writes: what a crash left half-done is removed, unless somebody else is at work.

        `name`: of the gateway whose journal it is; '': as it is called already, or as this machine. Raises
        `StorageError` when the store has another format, or another journal has that name.
        """
        store = cls(journal_dir, objects, ledger)
        store.require_there()
        # before anything is removed: by it the ledger says which files of the journal are needed
        ledger.gateway = ledger.claim_journal(store.journal.claim(), name or socket.gethostname(), bool(name))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(ledger.exclusive(wait_s=0))
            except StorageError as error:
                log.info("leftovers of a crash, if any, are not removed now: %s", error)
                return store
            store._check_format()
            store.clean()
        return store

    def close(self) -> None:
        """Give the open journal file up. The ledger stays open."""
        self.journal.close()

    # --- writing --------------------------------------------------------------------------------------------------

    def append_all(
        self,
        segments: Sequence[tuple[Segment, int]],
        committed_ns: int,
        records: Sequence[bytes] = (),
        held: Mapping[str, HeldBy] = {},
    ) -> list[int | None]:
        """Take segments, each with when it was received: all on the device and committed when this returns, or none.
        `records`: what `encode` makes of them, if that is known; `held`: by id, who holds back the pictures of some.

        Their ledger rows, None for one that was there. Raises `InvalidDataError` when the ledger refuses one of them or
        one is too large, and `DiskFullError`, `NotWritableError` or `StorageError`; then none is stored, or, if only
        the answer of a commit was lost, they are found to be there the next time.
        """
        payloads = records or [self.encode(segment) for segment, _ in segments]
        # one batch after the other: `Journal.remove_unused` relies on it
        with self._appending:
            places = self.journal.append_all(payloads)
            return self.ledger.commit_segments(
                [(segment, at, ns) for (segment, ns), at in zip(segments, places, strict=True)], committed_ns, held
            )

    def complete(self, row: int, segment: Segment, now_ns: int) -> None:
        """Have the segment of a ledger row with the pictures that were held back: durable when this returns. Raises
        `InvalidDataError` and `StorageError`."""
        record = self.encode(segment)
        with self._appending:
            (at,) = self.journal.append_all([record])
            self.ledger.complete_segment(row, at, now_ns)

    def encode(self, segment: Segment) -> bytes:
        """The record of a segment: it in its canonical form. Raises `InvalidDataError` for one that is too large."""
        try:
            return codec.encode(canonical(segment, self.spec(segment.episode.spec_hash)))
        except MessageTooLargeError as error:
            raise InvalidDataError(f"segment {segment.id[:200]!r}: {error} Close segments more often.") from error

    def write_shard(self, spec_hash: str, records: dict[int, bytes], created_ns: int) -> int:
        """Move these records, by ledger row and in this order, into a new shard; how many were moved.

        They are at most `SHARD_BYTES` together. For the holder of `ledger.exclusive`. After an error every record
        lies in one place or the other, and what was begun is removed now or by the next `clean`.
        """
        number = self.ledger.reserve_shard(spec_hash, created_ns)
        try:
            if spec_hash not in self._described:
                for key, described in metadata(self.spec(spec_hash)).items():
                    self.objects.put(key, described)
                self._described.add(spec_hash)
            data = encode_shard(list(records.values()))
            self.objects.put(shard_key(spec_hash, number), data)
            ends = np.cumsum([len(record) for record in records.values()]).tolist()
            offsets = dict(zip(records, [0, *ends[:-1]], strict=True))
            return self.ledger.commit_shard(
                spec_hash, number, offsets, ends[-1], len(data), hashlib.sha256(data).hexdigest()
            )
        except StorageError:
            # at once, if that can be: a full disk needs the room
            with contextlib.suppress(StorageError):
                self.clean()
            raise

    def clean(self) -> None:
        """Remove shards that were never committed or are being dropped, half-written files, unused journal files, and
        what is left of pruned episodes.

        For the holder of `ledger.exclusive`.
        """
        self.ledger.finish_pruning()
        self.objects.clean()
        for shard in self.ledger.shards():
            if shard.state != "sealed":
                self.remove_shard(shard.spec_hash, shard.number)
        self.journal.remove_unused(self.ledger.journals)

    def remove_shard(self, spec_hash: str, number: int) -> None:
        """Delete the objects of a shard that no segment lies in, then its ledger row."""
        self.objects.delete(shard_key(spec_hash, number))
        self.ledger.forget_shard(spec_hash, number)

    def journal_is_here(self, gateway: int | None = None) -> bool:
        """Whether what is in the journal of a gateway, by default of this one, can be read on this machine."""
        if not self.ledger.gateway and (owner := self.journal.owner()):
            self.ledger.gateway = self.ledger.gateway_of(owner)
        return gateway in (None, self.ledger.gateway) and self.journal.is_here()

    def require_there(self) -> None:
        """Raises `StorageError` when the ledger names shards and the store is not there, unmounted or another one."""
        if any(shard.state == "sealed" for shard in self.ledger.shards()):
            self._check_format()

    def _check_format(self) -> None:
        try:
            found = msgspec.json.decode(self.objects.get(MARK), type=dict[str, int]).get("format")
        except CorruptDataError as error:
            if any(shard.state == "sealed" for shard in self.ledger.shards()):
                raise StorageError(
                    f"the store {self.objects.place} is not where its shards are, or not whole. Mount it, or give the "
                    f"bucket and prefix it was written to. {error}"
                ) from error
            self.objects.put(MARK, msgspec.json.encode({"format": FORMAT}) + b"\n")
            return
        except msgspec.DecodeError as error:
            raise StorageError(f"{self.objects.place}/{MARK}: {error}. Is this a store of vla-fleet?") from error
        if found != FORMAT:
            raise FormatError(
                f"store {self.objects.place} has format {found}, this vla-fleet reads format {FORMAT}: "
                "install the vla-fleet that wrote it, or choose another --store."
            )

    # --- reading --------------------------------------------------------------------------------------------------

    def spec(self, spec_hash: str) -> RobotSpec:
        """The robot spec of this hash. Raises `InvalidDataError` if the ledger does not know it."""
        if spec_hash not in self._specs:
            self._specs[spec_hash] = self.ledger.spec(spec_hash)
        return self._specs[spec_hash]

    def read(self, rows: Sequence[int]) -> ReadResult:
        """The segments of these ledger rows, equal to the last bit to the canonical ones that were taken.

        Raises `StorageError` when an object store or disk cannot be asked now.
        """
        found = self.read_records(rows)
        segments: dict[int, Segment] = {}
        damaged = dict(found.damaged)
        for row, payload in found.payloads.items():
            try:
                segment = codec.decode(payload, stored=True)
            except ProtocolError as error:
                damaged[row] = f"the record of row {row}: {error}"
                continue
            if isinstance(segment, Segment):
                segments[row] = segment
            else:
                damaged[row] = f"the record of row {row} holds something else than a segment."
        return ReadResult(segments, damaged, found.elsewhere)

    def read_records(self, rows: Sequence[int], cached: bool = True) -> Records:
        """As `read`, without decoding; unless `cached`, from where they lie for good."""
        payloads: dict[int, bytes] = {}
        damaged: dict[int, str] = {}
        elsewhere: list[int] = []
        failed: dict[int, tuple[SegmentRow, str]] = {}
        rest: list[int] = list(dict.fromkeys(rows))
        for _ in range(_MOVES):
            places = self.ledger.places(rest)
            todo = []
            for row, place in places.items():
                before = failed.get(row)
                if place.damaged:
                    damaged[row] = f"segment {place.id} was set aside as damaged."
                elif before is not None and before[0] == place:
                    damaged[row] = before[1]
                elif place.journal is not None and not self.journal_is_here(place.gateway):
                    elsewhere.append(row)
                else:
                    todo.append(place)
            failed = {}
            sealed = [place for place in todo if place.shard is not None]
            # each journaled record alone, all that lies in shards at once
            for group in [*([place] for place in todo if place.shard is None), *([sealed] if sealed else [])]:
                for place, found in self._read_group(group, cached):
                    if isinstance(found, bytes):
                        payloads[place.row] = found
                    else:
                        # it may have been moved meanwhile, or forgotten: the ledger is asked again
                        failed[place.row] = place, str(found)
            rest = list(failed)
            if not rest:
                break
        damaged.update((row, failed[row][1]) for row in rest)
        return Records(payloads, damaged, tuple(elsewhere))

    def _read_group(
        self, places: Sequence[SegmentRow], cached: bool
    ) -> list[tuple[SegmentRow, bytes | CorruptDataError]]:
        """The records in shards, or one of the journal, or why one cannot be read."""
        by_shard: dict[tuple[object, ...], list[SegmentRow]] = {}
        for place in places:
            by_shard.setdefault((place.spec_hash, place.shard), []).append(place)
        if self.objects.remote or len(by_shard) == 1:
            try:
                return list(zip(places, self._payloads(places, cached), strict=True))
            except CorruptDataError as error:
                if len(places) == 1 and not cached:
                    return [(places[0], error)]
            # one of them, or more, or only what is cached of it: the others are to be had
        if len(by_shard) > 1:
            return [found for group in by_shard.values() for found in self._read_group(group, cached)]
        return [found for place in places for found in self._read_group([place], cached=False)]

    def _payloads(self, places: Sequence[SegmentRow], cached: bool) -> list[bytes]:
        if (at := places[0].journaled) is not None:
            return [self.journal.read(at)]
        keys = [shard_key(place.spec_hash, place.shard) for place in places if place.shard is not None]
        spans = [(key, at.offset, at.offset + at.bytes) for key, at in zip(keys, places, strict=True)]
        payloads = read_spans(self.objects, spans, cached)
        for key, place, payload in zip(keys, places, payloads, strict=True):
            if hashlib.sha256(payload).hexdigest() != place.sha256:
                raise CorruptDataError(
                    f"object {self.objects.place}/{key}: the record of segment {place.id} is not the one that was "
                    "taken. Ledger and store must be of one backup."
                )
        return payloads


def canonical(segment: Segment, spec: RobotSpec) -> Segment:
    """The segment with every camera of the spec in its dicts, in the spec's order: as it is hashed, stored and read.

    Raises `InvalidDataError` if it names another camera, or does not say which frames of a camera its steps saw.
    """
    names = [camera.name for camera in spec.cameras]
    if list(segment.frame_times_ns) == names and list(segment.frames) == names:
        return segment
    if set(segment.frame_times_ns) != set(names) or not set(segment.frames) <= set(names):
        raise InvalidDataError(
            f"segment {segment.id[:200]!r} has frames of {sorted({*segment.frame_times_ns, *segment.frames})[:20]}; "
            f"the cameras of its robot are {names}."
        )
    return msgspec.structs.replace(
        segment,
        frame_times_ns={name: segment.frame_times_ns[name] for name in names},
        frames={name: segment.frames.get(name, _NO_FRAMES) for name in names},
    )
