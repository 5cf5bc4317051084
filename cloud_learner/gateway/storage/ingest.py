"""Takes segments in: validate, put on disk, commit, and only then say that they may be forgotten.

What is not valid is kept as it came, in `quarantine/`, with the reason beside it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from cloud_learner.buffer.check import check_frames, check_names, check_order, check_steps, segment_bytes
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import HeldBy
from cloud_learner.buffer.store.quarantine import OF_CONTENT, QuarantineReason
from cloud_learner.buffer.store.store import SegmentStore, canonical
from cloud_learner.gateway.storage.histories import EpisodeHistories, HistoryPendingError
from cloud_learner.provenance.provenance import Doubt, Provenance, no_teaching
from wire import codec
from wire.clock import Clock, MonotonicClock
from wire.errors import DiskFullError, InvalidDataError, StorageError, WireError
from wire.identity.sealing import held_cameras, without_pictures
from wire.messages.gateway import Segment
from wire.transport.keys import Teaching
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_EPISODES_TOLD = 1024
_WRONG = (InvalidDataError, ValueError, TypeError, IndexError, OverflowError)
_DECODED = 1
"""picture of each camera and segment: to decode all of them costs three times what all else does, and a camera whose
pictures cannot be decoded is found by any of them"""
_MESSAGE_BYTES, _ITEM_BYTES = 4096, 64
"""what a record may have beyond its arrays and pictures, and for each of them; one that has more has something in it
that no message has, and is encoded anew"""


class ReceivedSegment(NamedTuple):
    """A segment that an authenticated robot sent, or sealed."""

    peer: str
    """the robot"""
    segment: Segment
    received_ns: int
    """by the gateway's clock"""
    data: bytes = b""
    """what it came as, b'': nobody knows"""
    offset_ns: int = 0
    """the gateway's time minus the robot's"""
    relay: str = ""
    """that brought it, '': the robot itself did"""
    body: str = ""
    """sha256 of what the robot sealed, where a relay brought it"""


class IngestOutcome(StrEnum):
    """What became of a segment. All but `retry` are to be acknowledged."""

    stored = "stored"
    duplicate = "duplicate"
    """it was stored before"""
    completed = "completed"
    """it was stored before, without pictures that came with it this time"""
    quarantined = "quarantined"
    retry = "retry"
    """it cannot be stored now"""


KNOWN = (IngestOutcome.duplicate, IngestOutcome.completed)
"""of what was stored before"""


class IngestResult(msgspec.Struct, frozen=True):
    """What became of a segment, and why."""

    outcome: IngestOutcome
    reason: str = ""
    """why it was quarantined, or must be sent again later"""
    row: int = 0
    """its ledger row, when it was stored just now"""
    record: bytes = b""
    """what it was stored as, when it was stored just now"""
    human_steps: int = 0
    """of its episode, when that ended with it"""
    fault: bool = False
    """with `retry`: disk, ledger or object store say no to everything, not to this one alone"""
    disk_full: bool = False
    """with `fault`: for want of room"""
    latency_s: float = 0.0
    """from the recording of its last step until its commit, when it was stored just now"""
    told: bool = False
    """the same was said of its episode before"""


class Ingest:
    """The one way into the buffer. One per gateway; not for several threads at once."""

    def __init__(
        self,
        ledger: Ledger,
        store: SegmentStore,
        clock: Clock | None = None,
        may_teach: Callable[[str], Collection[Teaching]] = no_teaching,
    ) -> None:
        """`clock`: the gateway's, to which robots' clock offsets lead; `may_teach`: as in `Provenance`."""
        self._ledger = ledger
        self._store = store
        self._clock = clock or MonotonicClock()
        self._histories = EpisodeHistories(ledger, store)
        self._provenance = Provenance(ledger, may_teach)
        self._doubted: OrderedDict[tuple[str, tuple[QuarantineReason, ...]], None] = OrderedDict()
        """episodes of which somebody was told that they are not believed, and why, the newest last"""
        self._overruled: frozenset[QuarantineReason] = frozenset()
        """what a person has decided of the segment that is taken now"""

    def open(self) -> None:
        """Remove what a crash left half-written in the quarantine, and make sure that it can be written."""
        self._store.quarantine.open()

    def accept(self, peer_robot: str, segment: Segment, received_ns: int) -> IngestResult:
        """As `accept_all`, for one segment."""
        return self.accept_all([ReceivedSegment(peer_robot, segment, received_ns)])[0]

    def accept_all(self, segments: Sequence[ReceivedSegment]) -> list[IngestResult]:
        """Store segments.

        They are flushed and committed together. When this returns anything but `retry` for one, its data is on the
        device, once. One that is bad is put aside and does not keep the others from being stored; nor does an object
        store that is slow to say what an episode began with: segments of that episode are told `retry` meanwhile.
        """
        found: list[IngestResult | None] = []
        batch: dict[str, _Checked] = {}
        for received in segments:
            if received.segment.id in batch:
                self._store_batch(batch, found)
            checked = self._checked(len(found), received)
            if isinstance(checked, _Checked):
                batch[received.segment.id] = checked
            found.append(None if isinstance(checked, _Checked) else checked)
        self._store_batch(batch, found)
        results = [result for result in found if result is not None]
        return [self._with_episode(*pair) for pair in zip(segments, results, strict=True)]

    def admit(self, name: str, received_ns: int, author: str) -> IngestResult:
        """Take what lies in quarantine under this id as if it came now; it stays there until it is stored. `author`, a
        person, believes it: that is not asked again, and the ledger keeps who said so.

        Raises `InvalidDataError` for an unknown id, and for what is no segment that somebody sent; `StorageError` when
        what is stored of its episode cannot be read now.
        """
        entry, data = self._store.quarantine.read(name)
        try:
            segment = codec.decode(data, stored=True)
        except WireError as error:
            raise InvalidDataError(f"{name} in quarantine is no segment that can be stored: {error}") from error
        if not isinstance(segment, Segment):
            raise InvalidDataError(f"{name} in quarantine is a {type(segment).__name__}, not a segment.")
        # nobody else is kept waiting here
        self._histories.get(segment.episode.id, wait=True)
        self._overruled = frozenset(entry.reasons) & frozenset(OF_CONTENT)
        try:
            result = self.accept(entry.robot, segment, received_ns)
        finally:
            self._overruled = frozenset()
        if result.outcome in (IngestOutcome.stored, *KNOWN):
            detail = f"{segment.id} was admitted by {author or 'somebody'}: {entry.reason}"
            self._ledger.add_event(self._clock.now_ns(), entry.robot, "quarantine", detail)
            self._store.quarantine.remove(name)
        return result

    def _checked(self, at: int, received: ReceivedSegment) -> _Checked | IngestResult:
        """The `at`th of those that came together, if it is to be stored; else what becomes of it."""
        segment = received.segment
        try:
            check_names(segment, received.peer)
            spec = self._store.spec(segment.episode.spec_hash)
            check_steps(segment, spec)
            # asked only about what may be stored: of an episode that is being recorded that is known
            if self._histories.may_have(segment) and (known := self._ledger.segment(segment.id)) is not None:
                return self._check_duplicate(received, spec, known.sha256)
            history = self._histories.get(segment.episode.id)
            check_order(segment, history)
            check_frames(segment, spec, history.frames_until(segment.index), _DECODED)
            doubts = self._provenance.doubts(segment, spec, self._clock.now_ns(), received.offset_ns)
            if doubts := tuple(doubt for doubt in doubts if doubt.reason not in self._overruled):
                # what a person has admitted, in another process, is no question any more
                known = self._ledger.segment(segment.id)
                return self._set_aside(received, doubts) if known is None else self._compare(received)
            checked = _Checked(at, received, self._record(received, spec))
            # what comes behind it in the batch is checked against it
            history.add(segment)
        except Exception as error:  # noqa: BLE001 - whatever one robot sends, the others are served
            return self._turn_away(received, error)
        return checked

    def _record(self, received: ReceivedSegment, spec: RobotSpec) -> bytes:
        """What a segment is stored as: the bytes it came as, where a canonical one is encoded like that."""
        segment, data = received.segment, received.data
        items = sum(len(frames.encoded) for frames in segment.frames.values()) + len(segment.chunks)
        most = segment_bytes(segment) + _MESSAGE_BYTES + _ITEM_BYTES * (items + 4 * len(spec.cameras))
        if data and len(data) <= most and canonical(segment, spec) is segment:
            return data
        return self._store.encode(segment)

    def _store_batch(self, batch: dict[str, _Checked], found: list[IngestResult | None]) -> None:
        """Store what passed the checks, note in `found` what became of it, and empty the batch."""
        some = list(batch.values())
        batch.clear()
        if not some:
            return
        try:
            rows = self._store.append_all(
                [(one.received.segment, one.received.received_ns) for one in some],
                self._clock.now_ns(),
                [one.record for one in some],
                {one.received.segment.id: HeldBy(one.received.relay, one.received.body) for one in some},
            )
        except Exception as error:  # noqa: BLE001 - each is tried by itself
            for one in some:
                self._histories.take_back(one.received.segment)
            for one in some:
                if isinstance(error, StorageError) or len(some) == 1:
                    found[one.at] = self._turn_away(one.received, error)
                else:
                    # nobody knows which it was: each by itself, checked without those that are refused
                    (found[one.at],) = self.accept_all([one.received])
            return
        now_ns = self._clock.now_ns()
        for one, row in zip(some, rows, strict=True):
            segment = one.received.segment
            if segment.last:
                self._histories.forget(segment.episode.id)
            if row is None:
                found[one.at] = self._compare(one.received)
                continue
            latency_s = (now_ns - segment.closed_ns - one.received.offset_ns) / 1e9
            found[one.at] = IngestResult(IngestOutcome.stored, row=row, latency_s=latency_s, record=one.record)

    def _with_episode(self, received: ReceivedSegment, result: IngestResult) -> IngestResult:
        """With what is to be known of an episode that has ended. If that cannot be read now, its last segment has to
        come again."""
        ended = received.segment.last and result.outcome in (IngestOutcome.stored, *KNOWN)
        if not ended:
            return result
        try:
            episode = self._ledger.episode(received.segment.episode.id)
        except StorageError as error:
            return self._turn_away(received, error)
        return msgspec.structs.replace(result, human_steps=episode.human_steps if episode else 0)

    def _turn_away(self, received: ReceivedSegment, error: Exception) -> IngestResult:
        """Put a segment aside that is wrong; one that only cannot be stored now comes again."""
        peer, segment = received.peer, received.segment
        if isinstance(error, _WRONG):
            # Arrays of a type or shape that no edge makes: typed on the wire, but nonsense together.
            nonsense = "" if isinstance(error, InvalidDataError) else f"malformed: {type(error).__name__}: "
            reason = f"{nonsense}{error}"
            try:
                data = received.data or codec.encode(segment)
                name = self._store.quarantine.put(segment.id, data, reason, peer)
            except StorageError as full:
                error = full
            else:
                log.warning("segment %r of robot '%s' quarantined as %s: %s", segment.id, peer, name, reason)
                return IngestResult(IngestOutcome.quarantined, reason)
        # what nobody thought of is traced, and the others are served
        trace = None if isinstance(error, StorageError) else error
        pending = isinstance(error, HistoryPendingError)
        level = logging.INFO if pending else logging.ERROR
        log.log(level, "segment %r of robot '%s' cannot be stored now: %s", segment.id, peer, error, exc_info=trace)
        fault = isinstance(error, StorageError) and not pending
        return IngestResult(IngestOutcome.retry, str(error), fault=fault, disk_full=isinstance(error, DiskFullError))

    def _set_aside(self, received: ReceivedSegment, doubts: tuple[Doubt, ...]) -> IngestResult:
        """Keep apart what is valid and not believed. Raises `StorageError`."""
        peer, segment = received.peer, received.segment
        reasons = (*sorted(self._overruled), *(doubt.reason for doubt in doubts))
        reason = " Also: ".join(doubt.text for doubt in doubts)
        data = received.data or codec.encode(segment)
        name = self._store.quarantine.put(segment.id, data, reason, peer, reasons)
        known = (segment.episode.id, reasons)
        told = known in self._doubted
        self._doubted[known] = None
        if len(self._doubted) > _EPISODES_TOLD:
            self._doubted.popitem(last=False)
        level = logging.DEBUG if told else logging.WARNING
        log.log(level, "segment %r of robot '%s' is kept apart as %s: %s", segment.id, peer, name, reason)
        return IngestResult(IngestOutcome.quarantined, f"{', '.join(reasons)}: {segment.id}: {reason}", told=told)

    def _compare(self, received: ReceivedSegment) -> IngestResult:
        """One that was stored before, though its history says otherwise: by another gateway, or by a commit whose
        answer was lost."""
        segment = received.segment
        try:
            known = self._ledger.segment(segment.id)
            spec = self._store.spec(segment.episode.spec_hash)
            return self._check_duplicate(received, spec, known.sha256 if known is not None else "")
        except Exception as error:  # noqa: BLE001 - as above
            self._histories.forget(segment.episode.id)
            return self._turn_away(received, error)

    def _check_duplicate(self, received: ReceivedSegment, spec: RobotSpec, sha256: str) -> IngestResult:
        """A segment whose id is in the ledger: stored once, unless it says something else this time."""
        segment = received.segment
        # as it came it is hashed without being encoded again; another order of its cameras says nothing else
        for record in (lambda: received.data, lambda: codec.encode(canonical(segment, spec))):
            if hashlib.sha256(record()).hexdigest() == sha256:
                self._histories.note_stored(segment)
                return IngestResult(IngestOutcome.duplicate)
        return IngestResult(self._compare_pictures(received, canonical(segment, spec), spec))

    def _compare_pictures(self, received: ReceivedSegment, segment: Segment, spec: RobotSpec) -> IngestOutcome:
        """The same but for pictures, which were held back when it was stored, or are this time: a whole one is stored.

        Raises `InvalidDataError` where anything else differs, `HistoryPendingError` when nobody can tell now."""
        known = self._ledger.segment(segment.id)
        held = self._ledger.held_segment(known.row) if known is not None else None
        if known is None or (held is None and not held_cameras(segment)):
            raise _other_content(segment)
        if held is None or not received.body or held.body != received.body:
            self._compare_stored(segment, known.row)
        if held is None or held_cameras(segment):
            return IngestOutcome.duplicate
        check_frames(segment, spec, None, _DECODED)
        self._store.complete(known.row, segment, self._clock.now_ns())
        return IngestOutcome.completed

    def _compare_stored(self, segment: Segment, row: int) -> None:
        """Raise `InvalidDataError` if what is stored differs in more than pictures."""
        found = self._store.read([row])
        if row in found.elsewhere:
            raise HistoryPendingError(f"segment {segment.id!r} lies at another gateway, which has not sealed it yet.")
        before = found.segments.get(row)
        if before is None or codec.encode(without_pictures(before)) != codec.encode(without_pictures(segment)):
            raise _other_content(segment)


def _other_content(segment: Segment) -> InvalidDataError:
    return InvalidDataError(f"id {segment.id!r} was stored before with other content.")


class _Checked(NamedTuple):
    """A segment that may be stored."""

    at: int
    """its place among those that came together"""
    received: ReceivedSegment
    record: bytes
    """what it is stored as"""
