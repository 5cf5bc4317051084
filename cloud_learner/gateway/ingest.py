"""Takes segments in: validate, put on disk, commit, and only then say that they may be forgotten.

What is not valid is kept as it came, in `quarantine/`, with the reason beside it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from enum import StrEnum
from pathlib import Path

import msgspec

from cloud_learner.buffer.check import CommittedHistory, check_frames, check_names, check_order, check_steps
from cloud_learner.buffer.files import open_directory, write_durably
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.store.store import SegmentStore, canonical
from wire import codec
from wire.clock import Clock, MonotonicClock
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_EPISODES_REMEMBERED = 256


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


class Ingest:
    """The one way into the buffer. One per gateway; not for several threads at once."""

    def __init__(
        self,
        data_dir: Path,
        ledger: Ledger,
        store: SegmentStore,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: the gateway's, to which robots' clock offsets lead."""
        self._quarantine = data_dir / "quarantine"
        self._ledger = ledger
        self._store = store
        self._clock = clock or MonotonicClock()
        self._specs: dict[str, RobotSpec] = {}
        self._histories: OrderedDict[str, CommittedHistory] = OrderedDict()

    def open(self) -> None:
        """Remove what a crash left half-written in the quarantine, and make sure that it can be written."""
        open_directory(self._quarantine, "quarantine")

    def accept(self, peer_robot: str, segment: Segment, received_ns: int) -> IngestResult:
        """Store `segment`, sent by the authenticated `peer_robot` and received at `received_ns` of the gateway's clock.

        When this returns anything but `retry`, the data is on the device, once.
        """
        try:
            check_names(segment, peer_robot)
            spec = self._spec(segment)
            check_steps(segment, spec)
            known = self._ledger.segment(segment.id)
            if known is not None:
                return self._check_duplicate(segment, spec, known.sha256)
            history = self._history(segment)
            check_order(segment, history)
            check_frames(segment, spec, history.frames_until(segment.index))
            return self._store_segment(segment, received_ns)
        except InvalidDataError as error:
            return self._quarantine_segment(peer_robot, segment, str(error))
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            # Arrays of a type or shape that no edge makes: typed on the wire, but nonsense together.
            return self._quarantine_segment(peer_robot, segment, f"malformed: {type(error).__name__}: {error}")
        except StorageError as error:
            log.error("segment %s of robot '%s' cannot be stored now: %s", segment.id, peer_robot, error)
            return IngestResult(IngestOutcome.retry, str(error))

    def _store_segment(self, segment: Segment, received_ns: int) -> IngestResult:
        row = self._store.append(segment, received_ns, self._clock.now_ns())
        if row is None:
            return IngestResult(IngestOutcome.duplicate)
        robot = self._ledger.robot(segment.episode.robot)
        offset_ns = robot.clock_offset_ns if robot else 0
        latency_s = (self._clock.now_ns() - segment.closed_ns - offset_ns) / 1e9
        if segment.last:
            self._histories.pop(segment.episode.id, None)
        else:
            self._histories[segment.episode.id].add(segment)
        return IngestResult(IngestOutcome.stored, row=row, latency_s=latency_s)

    def _check_duplicate(self, segment: Segment, spec: RobotSpec, sha256: str) -> IngestResult:
        """A segment whose id is in the ledger: stored once, unless it says something else this time."""
        if hashlib.sha256(codec.encode(canonical(segment, spec))).hexdigest() != sha256:
            raise InvalidDataError(f"id {segment.id!r} was stored before with other content.")
        return IngestResult(IngestOutcome.duplicate)

    def _spec(self, segment: Segment) -> RobotSpec:
        spec_hash = segment.episode.spec_hash
        spec = self._specs.get(spec_hash) or self._ledger.spec(spec_hash)
        if spec is None:
            raise InvalidDataError(f"robot spec {spec_hash} is unknown: the robot must say hello with it first.")
        self._specs[spec_hash] = spec
        return spec

    def _history(self, segment: Segment) -> CommittedHistory:
        """What is stored of the segment's episode; read back when this gateway has not seen it."""
        episode = segment.episode.id
        history = self._histories.get(episode)
        if history is None:
            history = CommittedHistory()
            found = self._store.read([row.row for row in self._ledger.segments_of(episode)])
            for stored in found.segments.values():
                history.add(stored)
            for row, reason in found.damaged.items():
                log.error("segment row %d of episode %s cannot be read back: %s", row, episode, reason)
            self._histories[episode] = history
            if len(self._histories) > _EPISODES_REMEMBERED:
                self._histories.popitem(last=False)
        self._histories.move_to_end(episode)
        return history

    def _quarantine_segment(self, peer: str, segment: Segment, reason: str) -> IngestResult:
        data = codec.encode(segment)
        # the id may be anything here: it only labels the file, the hash makes it unique
        label = re.sub(r"[^A-Za-z0-9_-]", "_", segment.id)[:100]
        name = f"{label}-{hashlib.sha256(data).hexdigest()[:12]}"
        note = f"segment {segment.id!r} sent by {peer!r}\n{reason}\n"
        try:
            write_durably(self._quarantine / f"{name}.txt", note.encode(), "quarantine")
            write_durably(self._quarantine / f"{name}.msg", data, "quarantine")
        except StorageError as error:
            log.error("segment %r of robot '%s' cannot be quarantined now: %s", segment.id, peer, error)
            return IngestResult(IngestOutcome.retry, str(error))
        log.warning("segment %r of robot '%s' quarantined as %s.msg: %s", segment.id, peer, name, reason)
        return IngestResult(IngestOutcome.quarantined, reason)
