"""Takes segments in: validate, put on disk, commit, and only then say that they may be forgotten.

What is not valid is kept as it came, in `quarantine/`, with the reason beside it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum

import msgspec

from cloud_learner.buffer.check import check_frames, check_names, check_order, check_steps
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.quarantine import OF_CONTENT, QuarantineReason
from cloud_learner.buffer.store.store import SegmentStore, canonical
from cloud_learner.gateway.histories import EpisodeHistories, HistoryPendingError
from cloud_learner.provenance.provenance import Doubt, Provenance, no_teaching
from wire import codec
from wire.clock import Clock, MonotonicClock
from wire.errors import InvalidDataError, StorageError, WireError
from wire.messages.gateway import Segment
from wire.transport.keys import Teaching
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_EPISODES_TOLD = 1024
_WRONG = (InvalidDataError, ValueError, TypeError, IndexError, OverflowError)


class IngestOutcome(StrEnum):
    """What became of a segment. All but `retry` are to be acknowledged."""

    stored = "stored"
    duplicate = "duplicate"
    """it was stored before"""
    quarantined = "quarantined"
    retry = "retry"
    """it cannot be stored now"""


class IngestResult(msgspec.Struct, frozen=True):
    """What became of a segment, and why."""

    outcome: IngestOutcome
    reason: str = ""
    """why it was quarantined, or must be sent again later"""
    row: int = 0
    """its ledger row, when it was stored just now"""
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
        return self.accept_all([(peer_robot, segment)], received_ns)[0]

    def accept_all(self, segments: Sequence[tuple[str, Segment]], received_ns: int) -> list[IngestResult]:
        """Store segments, each sent by an authenticated robot, received at `received_ns` of the gateway's clock.

        They are flushed and committed together. When this returns anything but `retry` for one, its data is on the
        device, once. One that is bad is put aside and does not keep the others from being stored; nor does an object
        store that is slow to say what an episode began with: segments of that episode are told `retry` meanwhile.
        """
        found: list[IngestResult | None] = []
        batch: dict[str, tuple[int, str, Segment]] = {}
        for peer, segment in segments:
            if segment.id in batch:
                self._store_batch(batch, found, received_ns)
            result = self._checked(peer, segment)
            if result is None:
                batch[segment.id] = (len(found), peer, segment)
            found.append(result)
        self._store_batch(batch, found, received_ns)
        return [result for result in found if result is not None]

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
        if result.outcome in (IngestOutcome.stored, IngestOutcome.duplicate):
            detail = f"{segment.id} was admitted by {author or 'somebody'}: {entry.reason}"
            self._ledger.add_event(self._clock.now_ns(), entry.robot, "quarantine", detail)
            self._store.quarantine.remove(name)
        return result

    def _checked(self, peer: str, segment: Segment) -> IngestResult | None:
        """What becomes of a segment that is not to be stored; None for one that is."""
        try:
            check_names(segment, peer)
            spec = self._store.spec(segment.episode.spec_hash)
            check_steps(segment, spec)
            known = self._ledger.segment(segment.id)
            if known is not None:
                return self._check_duplicate(segment, spec, known.sha256)
            history = self._histories.get(segment.episode.id)
            check_order(segment, history)
            check_frames(segment, spec, history.frames_until(segment.index))
            doubts = self._provenance.doubts(segment, spec, self._clock.now_ns())
            if doubts := tuple(doubt for doubt in doubts if doubt.reason not in self._overruled):
                return self._set_aside(peer, segment, doubts)
            # what comes behind it in the batch is checked against it
            history.add(segment)
        except Exception as error:  # noqa: BLE001 - whatever one robot sends, the others are served
            return self._turn_away(peer, segment, error)
        return None

    def _store_batch(
        self, batch: dict[str, tuple[int, str, Segment]], found: list[IngestResult | None], received_ns: int
    ) -> None:
        """Store what passed the checks, note in `found` what became of it, and empty the batch."""
        some = list(batch.values())
        batch.clear()
        if not some:
            return
        try:
            robots = {peer: self._ledger.robot(peer) for _, peer, _ in some}
            rows = self._store.append_all([(segment, received_ns) for _, _, segment in some], self._clock.now_ns())
        except Exception as error:  # noqa: BLE001 - each is tried by itself
            for _, _, segment in some:
                self._histories.take_back(segment)
            for at, peer, segment in some:
                if isinstance(error, StorageError) or len(some) == 1:
                    found[at] = self._turn_away(peer, segment, error)
                else:
                    # nobody knows which it was: each by itself, checked without those that are refused
                    found[at] = self.accept(peer, segment, received_ns)
            return
        now_ns = self._clock.now_ns()
        for (at, peer, segment), row in zip(some, rows, strict=True):
            if segment.last or row is None:
                self._histories.forget(segment.episode.id)
            found[at] = IngestResult(IngestOutcome.duplicate)
            if row is not None:
                offset_ns = robot.clock_offset_ns if (robot := robots[peer]) else 0
                latency_s = (now_ns - segment.closed_ns - offset_ns) / 1e9
                found[at] = IngestResult(IngestOutcome.stored, row=row, latency_s=latency_s)

    def _turn_away(self, peer: str, segment: Segment, error: Exception) -> IngestResult:
        """Put a segment aside that is wrong; one that only cannot be stored now comes again."""
        if isinstance(error, _WRONG):
            # Arrays of a type or shape that no edge makes: typed on the wire, but nonsense together.
            nonsense = "" if isinstance(error, InvalidDataError) else f"malformed: {type(error).__name__}: "
            reason = f"{nonsense}{error}"
            try:
                name = self._store.quarantine.put(segment.id, codec.encode(segment), reason, peer)
            except StorageError as full:
                error = full
            else:
                log.warning("segment %r of robot '%s' quarantined as %s: %s", segment.id, peer, name, reason)
                return IngestResult(IngestOutcome.quarantined, reason)
        # what nobody thought of is traced, and the others are served
        trace = None if isinstance(error, StorageError) else error
        level = logging.INFO if isinstance(error, HistoryPendingError) else logging.ERROR
        log.log(level, "segment %r of robot '%s' cannot be stored now: %s", segment.id, peer, error, exc_info=trace)
        return IngestResult(IngestOutcome.retry, str(error))

    def _set_aside(self, peer: str, segment: Segment, doubts: tuple[Doubt, ...]) -> IngestResult:
        """Keep apart what is valid and not believed. Raises `StorageError`."""
        reasons = (*sorted(self._overruled), *(doubt.reason for doubt in doubts))
        reason = " Also: ".join(doubt.text for doubt in doubts)
        name = self._store.quarantine.put(segment.id, codec.encode(segment), reason, peer, reasons)
        known = (segment.episode.id, reasons)
        told = known in self._doubted
        self._doubted[known] = None
        if len(self._doubted) > _EPISODES_TOLD:
            self._doubted.popitem(last=False)
        level = logging.DEBUG if told else logging.WARNING
        log.log(level, "segment %r of robot '%s' is kept apart as %s: %s", segment.id, peer, name, reason)
        return IngestResult(IngestOutcome.quarantined, f"{', '.join(reasons)}: {segment.id}: {reason}", told=told)

    def _check_duplicate(self, segment: Segment, spec: RobotSpec, sha256: str) -> IngestResult:
        """A segment whose id is in the ledger: stored once, unless it says something else this time."""
        if hashlib.sha256(codec.encode(canonical(segment, spec))).hexdigest() != sha256:
            raise InvalidDataError(f"id {segment.id!r} was stored before with other content.")
        self._histories.note_stored(segment)
        return IngestResult(IngestOutcome.duplicate)
