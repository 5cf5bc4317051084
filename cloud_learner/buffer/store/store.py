"""The store of segments: journal first, shards later, and one way to read both.

A segment is taken by `append`: its record is on the device, then its ledger row is committed. The sealer moves it into
a shard. A reader asks the ledger where a segment lies each time, so it sees it in one place or the other, and when it
was moved between the question and the answer it asks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cloud_learner.buffer.files import write_durably
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled, ObjectRow, Place
from cloud_learner.buffer.store import arrays
from cloud_learner.buffer.store.gather import read_segments
from cloud_learner.buffer.store.journal import Journal
from cloud_learner.buffer.store.objects import ObjectStore, put_all
from cloud_learner.buffer.store.shard import EncodedShard, canonical, require_room
from wire import codec
from wire.errors import CorruptDataError, InvalidDataError, ProtocolError, StorageError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
MARK = "store.json"
"""The object that says which format the store has."""
_MOVES = 8
"""How often a segment may have been moved while it was being read."""


class ReadResult(msgspec.Struct, frozen=True):
    """What `SegmentStore.read` found. A row that is in none of these was forgotten."""

    segments: dict[int, Segment]
    """by ledger row"""
    damaged: dict[int, str]
    """rows that cannot be read, with the reason"""
    elsewhere: tuple[int, ...] = ()
    """rows in the journal of another machine; they can be read when they have been sealed"""


class SegmentStore:
    """Journal, objects and ledger together. Readers construct it; who writes uses `open`. For several threads."""

    def __init__(self, journal_dir: Path, objects: ObjectStore, ledger: Ledger) -> None:
        self.journal = Journal(journal_dir)
        self.objects = objects
        self.ledger = ledger
        self._specs: dict[str, RobotSpec] = {}
        self._appending = threading.Lock()
        self._owner = ""

    @classmethod
    def open(cls, journal_dir: Path, objects: ObjectStore, ledger: Ledger) -> SegmentStore:
        """The store for one that writes: what a crash left half-done is removed, unless somebody else is at work.

        Raises `StorageError` when the store has another format.
        """
        store = cls(journal_dir, objects, ledger)
        store.require_there()
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

    def append(self, segment: Segment, received_ns: int, committed_ns: int) -> int | None:
        """Take a segment: on the device and committed when this returns. Its ledger row, or None if it was there.

        Raises `InvalidDataError` when the ledger refuses it or it is too large for any shard, and `DiskFullError`,
        `NotWritableError` or `StorageError`; then it is not stored, or, if only the answer of a commit was lost, it is
        found to be there the next time.
        """
        spec = self.spec(segment.episode.spec_hash)
        segment = canonical(segment, spec)
        require_room(segment, spec)
        payload = codec.encode(segment)
        # one after the other: `Journal.remove_unused` relies on it
        with self._appending:
            at = self.journal.append(payload)
            return self.ledger.commit_segment(segment, at, received_ns, committed_ns)

    def write_shard(self, spec: RobotSpec, number: int, encoded: EncodedShard) -> int:
        """Store a reserved shard and commit it; how many segments moved into it. For the holder of `ledger.exclusive`.

        After an error the shard is in state 'writing' or, if only the answer was lost, 'sealed'; `clean` tells.
        """
        put_all(self.objects, encoded.objects.items())
        # the arrays grow when what they grow by is there
        put_all(self.objects, encoded.metadata.items())
        rows = tuple(
            ObjectRow(key, len(data), hashlib.sha256(data).hexdigest()) for key, data in encoded.objects.items()
        )
        return self.ledger.commit_shard(spec.hash, number, rows, encoded.placed, encoded.bytes)

    def clean(self) -> None:
        """Remove shards that were never committed or are being dropped, half-written files and unused journal files.

        For the holder of `ledger.exclusive`.
        """
        self.objects.clean()
        for shard in self.ledger.shards():
            if shard.state != "sealed":
                self.remove_shard(shard.spec_hash, shard.number)
        self.journal.remove_unused(self.ledger.journals)

    def remove_shard(self, spec_hash: str, number: int) -> None:
        """Delete the objects of a shard that no segment lies in, then its ledger row."""
        keys = {row.key for row in self.ledger.objects_of(spec_hash, number)}
        for key in sorted(keys.union(arrays.shard_keys(self.spec(spec_hash), number))):
            self.objects.delete(key)
        self.ledger.forget_shard(spec_hash, number)

    def set_aside(self, name: str, data: bytes) -> None:
        """Keep a copy of damaged bytes in `quarantine/`, next to the journal's directory."""
        safe = re.sub(r"[^A-Za-z0-9_.=-]", "-", name)[-200:]
        write_durably(self.journal.directory.parent / "quarantine" / safe, data, "quarantine")

    def journal_is_here(self) -> bool:
        """Whether what is not sealed yet can be read on this machine."""
        self._owner = self._owner or self.ledger.journal_owner()
        return self.journal.is_here(self._owner)

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
                    f"the store {self.objects.place} is not where its shards are: {MARK} is missing. Mount it, or give "
                    "the bucket and prefix it was written to."
                ) from error
            self.objects.put(MARK, msgspec.json.encode({"format": arrays.FORMAT}) + b"\n")
            return
        except msgspec.DecodeError as error:
            raise StorageError(f"{self.objects.place}/{MARK}: {error}. Is this a store of vla-fleet?") from error
        if found != arrays.FORMAT:
            raise StorageError(
                f"store {self.objects.place} has format {found}, this vla-fleet reads format {arrays.FORMAT}: "
                "install the vla-fleet that wrote it, or choose another --store."
            )

    # --- reading --------------------------------------------------------------------------------------------------

    def spec(self, spec_hash: str) -> RobotSpec:
        """The robot spec of this hash. Raises `InvalidDataError` if the ledger does not know it."""
        spec = self._specs.get(spec_hash) or self.ledger.spec(spec_hash)
        if spec is None:
            raise InvalidDataError(f"robot spec {spec_hash} is unknown: the robot must say hello with it first.")
        self._specs[spec_hash] = spec
        return spec

    def read(self, rows: Sequence[int], verify: bool = False) -> ReadResult:
        """The segments of these ledger rows, equal to the last bit to the canonical ones that were taken.

        Checksums of records and chunks are always checked; `verify` compares each segment's SHA-256 as well. Raises
        `StorageError` when an object store or disk cannot be asked now.
        """
        segments: dict[int, Segment] = {}
        damaged: dict[int, str] = {}
        elsewhere: list[int] = []
        failed: dict[int, tuple[Place, str]] = {}
        rest: list[int] = list(dict.fromkeys(rows))
        for _ in range(_MOVES):
            places = self.ledger.places(rest)
            todo = []
            for row, place in places.items():
                before = failed.get(row)
                if place.damaged:
                    damaged[row] = f"segment {place.id} was set aside as damaged."
                elif before is not None and _where(before[0]) == _where(place):
                    damaged[row] = before[1]
                elif place.journal is not None and not self.journal_is_here():
                    elsewhere.append(row)
                else:
                    todo.append(place)
            found, reasons = self._read_places(todo, verify)
            segments.update(found)
            # what failed may have been moved meanwhile, or forgotten: the ledger is asked again
            failed = {place.row: (place, reasons[place.row]) for place in todo if place.row in reasons}
            rest = list(failed)
            if not rest:
                break
        damaged.update((row, failed[row][1]) for row in rest)
        return ReadResult(segments, damaged, tuple(elsewhere))

    def _read_places(self, places: Sequence[Place], verify: bool) -> tuple[dict[int, Segment], dict[int, str]]:
        """The segments at these places by row, and why some could not be read."""
        segments: dict[int, Segment] = {}
        reasons: dict[int, str] = {}
        for group in _together(places):
            try:
                segments.update(self._read_group(group))
                continue
            except CorruptDataError as error:
                reasons[group[0].row] = str(error)
            # one of them, or more: the others are to be had
            for place in group if len(group) > 1 else ():
                reasons.pop(place.row, None)
                try:
                    segments.update(self._read_group([place]))
                except CorruptDataError as error:
                    reasons[place.row] = str(error)
        for place in places if verify else ():
            if place.row in segments and record_sha256(segments[place.row]) != place.sha256:
                del segments[place.row]
                reasons[place.row] = f"segment {place.id} is not the one that was taken: its SHA-256 differs."
        return segments, reasons

    def _read_group(self, places: Sequence[Place]) -> dict[int, Segment]:
        """The segments of one shard, or one of the journal, by row. Raises `CorruptDataError`."""
        first = places[0]
        if first.shard is None:
            return {first.row: self.read_journaled(first)}
        return read_segments(self.objects, self.spec(first.spec_hash), first.shard, places)

    def read_journaled(self, place: Place) -> Segment:
        """The segment of a record. Raises `CorruptDataError`."""
        assert place.journal is not None
        payload = self.journal.read(Journaled(place.journal, place.offset, place.bytes, place.sha256))
        return decode_record(payload, place.id)


def decode_record(payload: bytes, segment_id: str) -> Segment:
    """The segment in the payload of a journal record. Raises `CorruptDataError` if it is another one."""
    try:
        segment = codec.decode(payload)
    except ProtocolError as error:
        raise CorruptDataError(f"journal: the record of segment {segment_id}: {error}") from error
    if not isinstance(segment, Segment) or segment.id != segment_id:
        raise CorruptDataError(f"journal: the record of segment {segment_id} holds something else.")
    return segment


def record_sha256(segment: Segment) -> str:
    """The SHA-256 of a canonical segment's record, as the ledger has it."""
    return hashlib.sha256(codec.encode(segment)).hexdigest()


def _together(places: Sequence[Place]) -> list[list[Place]]:
    """Groups that are read at once: what lies in one shard, in its order; each journaled segment alone."""
    groups: dict[tuple[object, ...], list[Place]] = {}
    for place in places:
        key = (place.spec_hash, place.shard) if place.shard is not None else (place.row,)
        groups.setdefault(key, []).append(place)
    return [sorted(group, key=lambda place: place.first_row) for group in groups.values()]


def _where(place: Place) -> tuple[object, ...]:
    return place.journal, place.offset, place.shard, place.first_row
