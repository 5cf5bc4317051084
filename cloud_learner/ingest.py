"""Takes segments in: validate, put on disk, commit, and only then say that they may be forgotten.

What is not valid is kept as it came, in `quarantine/`, with the reason beside it. What cannot be stored now is refused,
so that the edge keeps it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict, deque
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from cloud_learner.buffer.check import check_frames, check_names, check_steps
from cloud_learner.buffer.files import make_directory, remove_leftovers, write_durably
from cloud_learner.buffer.ledger import Ledger
from cloud_learner.buffer.rows import SegmentRow
from cloud_learner.buffer.store import SegmentStore, encode_segment
from wire import codec
from wire.clock import Clock, MonotonicClock
from wire.errors import Corrupt, InvalidData, StorageError, storage_error
from wire.messages import Segment
from wire.types import RobotSpec

log = logging.getLogger(__name__)
_EPISODES_REMEMBERED = 256

Outcome = Literal["stored", "duplicate", "quarantined", "retry"]


class Result(msgspec.Struct, frozen=True):
    """What became of a segment. All but `retry` are to be acknowledged."""

    outcome: Outcome
    reason: str = ""
    """why it was quarantined, or must be sent again later"""


class Latency(msgspec.Struct, frozen=True):
    """From the recording of a segment's last step until its commit, over the newest segments."""

    count: int
    p50_s: float
    p99_s: float


class Ingest:
    """The one way into the buffer. One per gateway; not for several threads at once."""

    def __init__(
        self,
        data_dir: Path,
        ledger: Ledger,
        store: SegmentStore,
        clock: Clock | None = None,
        latencies: int = 4096,
    ) -> None:
        """`clock`: the gateway's, to which robots' clock offsets lead. `latencies`: how many are kept."""
        self._quarantine = data_dir / "quarantine"
        self._ledger = ledger
        self._store = store
        self._clock = clock or MonotonicClock()
        self._latencies: deque[float] = deque(maxlen=latencies)
        self._specs: dict[str, RobotSpec] = {}
        self._frames: OrderedDict[str, _Brought] = OrderedDict()

    def open(self) -> None:
        """Create the quarantine directory, or remove what a crash left half-written in it."""
        try:
            make_directory(self._quarantine)
        except OSError as error:
            raise storage_error(error, "quarantine", self._quarantine) from error
        remove_leftovers(self._quarantine, "quarantine")

    def accept(self, peer_robot: str, segment: Segment, received_ns: int) -> Result:
        """Store `segment`, sent by the authenticated `peer_robot` and received at `received_ns` of the gateway's clock.

        When this returns anything but `retry`, the data is on the device, once.
        """
        try:
            check_names(segment, peer_robot)
            check_steps(segment, self._spec(segment))
            data = encode_segment(segment)
            known = self._ledger.segment(segment.id)
            if known is not None:
                return self._again(segment, known, data)
            check_frames(segment, self._spec(segment), self._known_frames(segment))
            return self._take(segment, data, received_ns)
        except InvalidData as error:
            return self._set_aside(peer_robot, segment, str(error))
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            # Arrays of a type or shape that no edge makes: typed on the wire, but nonsense together.
            return self._set_aside(peer_robot, segment, f"malformed: {type(error).__name__}: {error}")
        except StorageError as error:
            log.error("segment %s of robot '%s' cannot be stored now: %s", segment.id, peer_robot, error)
            return Result("retry", str(error))

    def latency(self) -> Latency:
        """Percentiles over the newest segments; zeros before the first."""
        if not self._latencies:
            return Latency(0, 0.0, 0.0)
        p50, p99 = np.percentile(np.array(self._latencies), [50, 99]).tolist()
        return Latency(len(self._latencies), p50, p99)

    def _take(self, segment: Segment, data: bytes, received_ns: int) -> Result:
        # A commit that fails may still have reached the disk, so its file stays: a resend overwrites it with the same.
        stored = self._store.write(segment, data)
        committed_ns = self._clock.now_ns()
        try:
            fresh = self._ledger.commit_segment(segment, stored, received_ns, committed_ns)
        except InvalidData:
            self._store.remove(stored)
            raise
        if not fresh:
            return Result("duplicate")
        robot = self._ledger.robot(segment.episode.robot)
        offset_ns = robot.clock_offset_ns if robot else 0
        self._latencies.append((self._clock.now_ns() - segment.closed_ns - offset_ns) / 1e9)
        if segment.episode.id in self._frames:
            self._frames[segment.episode.id].add(segment)
        if segment.last:
            self._frames.pop(segment.episode.id, None)
        return Result("stored")

    def _again(self, segment: Segment, known: SegmentRow, data: bytes) -> Result:
        """A segment whose id is in the ledger: stored once, unless it says something else this time."""
        if hashlib.sha256(data).hexdigest() != known.sha256:
            raise InvalidData(f"id {segment.id!r} was stored before with other content.")
        if not self._store.has(known.path, known.bytes):
            log.error("segment %s was in the ledger but its file was gone or torn; written again.", segment.id)
            self._store.write(segment, data)
        return Result("duplicate")

    def _spec(self, segment: Segment) -> RobotSpec:
        spec_hash = segment.episode.spec_hash
        spec = self._specs.get(spec_hash) or self._ledger.spec(spec_hash)
        if spec is None:
            raise InvalidData(f"robot spec {spec_hash} is unknown: the robot must say hello with it first.")
        self._specs[spec_hash] = spec
        return spec

    def _known_frames(self, segment: Segment) -> dict[str, frozenset[int]] | None:
        """Frames of the episode's stored segments, or None when some before this one have not come or were invalid."""
        if segment.index == 0:
            return {}
        episode = segment.episode.id
        brought = self._frames.get(episode)
        if brought is None:
            brought = _Brought()
            for row in self._ledger.segments_of(episode):
                try:
                    brought.add(self._store.read(row.path, row.sha256))
                except Corrupt as error:
                    log.error("segment %s cannot be read back: %s", row.id, error)
            self._frames[episode] = brought
            if len(self._frames) > _EPISODES_REMEMBERED:
                self._frames.popitem(last=False)
        self._frames.move_to_end(episode)
        if not all(index in brought.indices for index in range(segment.index)):
            return None
        return {camera: frozenset(times) for camera, times in brought.times.items()}

    def _set_aside(self, peer: str, segment: Segment, reason: str) -> Result:
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
            return Result("retry", str(error))
        log.warning("segment %r of robot '%s' quarantined as %s.msg: %s", segment.id, peer, name, reason)
        return Result("quarantined", reason)


class _Brought:
    """What the stored segments of one episode brought: their indices, and frame times by camera."""

    def __init__(self) -> None:
        self.indices: set[int] = set()
        self.times: dict[str, set[int]] = {}

    def add(self, segment: Segment) -> None:
        self.indices.add(segment.index)
        for camera, frames in segment.frames.items():
            self.times.setdefault(camera, set()).update(frames.times_ns.tolist())
