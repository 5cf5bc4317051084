"""The thread that stores: segments into the buffer, and what else the gateway notes in its ledger.

All that waits when a step begins is stored by it: segments with one flush and one commit, notes in one transaction. An
answer comes back when what it is about is on the device, or cannot be put there now.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.notes import Note
from cloud_learner.gateway.storage.credit import ONE_PEER_BYTES, QUEUE_BYTES
from cloud_learner.gateway.storage.ingest import Ingest, IngestOutcome, IngestResult, ReceivedSegment
from wire.codec import decode
from wire.errors import FleetError, MessageTooLargeError, ProtocolError, StorageError
from wire.identity.sealing import SealOpener, held_cameras
from wire.messages.gateway import SealedSegment, Segment
from wire.task_thread import TaskThread

log = logging.getLogger(__name__)

SEGMENTS_AT_ONCE = 32
BYTES_AT_ONCE = 4 * 1024 * 1024
"""what one step stores: the others wait for the answer so long"""
MOST_DROPPABLE = 5000
_SILENT_S = 3.0
"""a step that takes longer waits for something that is away"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_PROBE = "probe", Note(lambda: None, key="probe")
"""finds out that the ledger is back"""


class SegmentAnswer(msgspec.Struct, frozen=True):
    """What became of the bytes that somebody sent as a segment."""

    peer: str
    """who sent it: its robot, or a relay"""
    bytes: int
    segment: Segment | None = None
    """None: it is none, or was not looked at"""
    result: IngestResult = IngestResult(IngestOutcome.retry)
    invalid: ProtocolError | MessageTooLargeError | None = None
    """why it is no segment"""
    refused: str = ""
    """id of one that a relay brought and that its robot did not seal"""


class _WaitingSegment(msgspec.Struct, frozen=True):
    peer: str
    data: bytes
    received_ns: int
    offset_ns: int


class _WaitingNote(msgspec.Struct, frozen=True):
    note: Note
    after: int
    """how many segments had come before it"""


class StorageThread(TaskThread):
    """The only one that calls ledger and ingest once the gateway is at work. `submit_segment` and `submit` never wait.

    It keeps `Notes` for the dispatcher.
    """

    def __init__(
        self,
        ledger: Ledger,
        ingest: Ingest,
        on_answer: Callable[[SegmentAnswer], None],
        on_fault: Callable[[StorageError], None],
        on_step_s: Callable[[float], None],
        seals: SealOpener | None = None,
        offset_ns: Callable[[str], int] = lambda robot: 0,
    ) -> None:
        """`seals`: opens what relays bring, None: nothing; `offset_ns(robot)`: the gateway's time minus the robot's, 0
        when it is not known now.

        In the loop, `on_answer` gets what became of each segment, and `on_fault` why notes could not be stored; in
        the thread, `on_step_s` how long it took to store the segments of a step."""
        super().__init__("storage")
        self._ledger, self._ingest = ledger, ingest
        self._on_answer, self._on_fault, self._on_step_s = on_answer, on_fault, on_step_s
        self._seals, self._offset_ns = seals or SealOpener(), offset_ns
        self._segments: deque[_WaitingSegment] = deque()
        self._came = 0
        self._notes: OrderedDict[str, _WaitingNote] = OrderedDict()
        self._numbers = itertools.count()
        self._droppable = 0
        self._held: Counter[str] = Counter()
        """by peer: bytes of segments that were not answered yet"""
        self._pause_s, self._retry_s = 0.0, 0.0
        self._note_fault, self._segment_fault = "", ""
        self.queued_bytes = 0
        self.dropped = 0
        """notes that were dropped because too many waited"""

    # --- for the loop -------------------------------------------------------------------------------------------

    def submit_segment(self, peer: str, data: bytes, received_ns: int, offset_ns: int = 0) -> bool:
        """Have an encoded segment stored; False when there is no room for it. `offset_ns`: the gateway's time minus the
        robot's."""
        room = min(QUEUE_BYTES - self.queued_bytes, ONE_PEER_BYTES - self._held[peer])
        # A robot of which nothing waits has its turn, as long as not all of them have it at once.
        first = not self._held[peer] and self.queued_bytes + len(data) <= 2 * QUEUE_BYTES
        if len(data) > room and not first:
            return False
        with self.lock:
            self._segments.append(_WaitingSegment(peer, data, received_ns, offset_ns))
            self._came += 1
            self.lock.notify()
        self._held[peer] += len(data)
        self.queued_bytes += len(data)
        return True

    def release(self, answer: SegmentAnswer) -> None:
        """What was held for a segment is not any more. To be called with each answer."""
        self._held[answer.peer] -= answer.bytes
        self.queued_bytes -= answer.bytes
        if self._held[answer.peer] <= 0:
            del self._held[answer.peer]

    def submit(self, note: Note) -> None:
        with self.lock:
            key = note.key or f"\0{next(self._numbers)}"
            self._droppable += note.droppable and key not in self._notes
            before = self._notes.get(key)
            # segments that came since the older one may rely on it
            self._notes[key] = _WaitingNote(note, before.after if before is not None else self._came)
            if self._droppable > MOST_DROPPABLE:
                oldest = next(key for key, waiting in self._notes.items() if waiting.note.droppable)
                del self._notes[oldest]
                self._droppable -= 1
                self.dropped += 1
            self.lock.notify()

    @property
    def fault(self) -> str:
        """Why nothing can be noted now, '' when it can."""
        busy_s = self.busy_s
        silent = f"disk or database have not answered for {busy_s:.0f} s." if busy_s > _SILENT_S else ""
        return self._note_fault or silent

    @property
    def segment_fault(self) -> str:
        """Why no segment can be stored now, '' when they can."""
        return self.fault or self._segment_fault

    # --- the thread ---------------------------------------------------------------------------------------------

    def pause_s(self) -> float | None:
        if self._segments:
            return 0.0
        if not self._notes:
            return None
        return max(0.0, self._retry_s - time.monotonic()) if self._note_fault else 0.0

    def step(self) -> bool:
        went_on = False
        if self._note_fault:
            if self.inline or time.monotonic() >= self._retry_s:
                went_on = self._store_notes(self._take_notes()) and not self._note_fault
            with self.lock:
                relied_on = any(waiting.note.ordered for waiting in self._notes.values())
            if self._note_fault and relied_on:
                return self._refuse_segments(self._note_fault)
        segments = self._take_segments()
        if segments:
            self._store_segments(segments)
        if not self._note_fault:
            went_on = self._store_notes(self._take_notes()) or went_on
        return bool(segments) or went_on

    def _take_segments(self) -> list[_WaitingSegment]:
        """What is to be stored together: up to the next note that has to come between."""
        taken: list[_WaitingSegment] = []
        size = 0
        with self.lock:
            stored = self._came - len(self._segments)
            barrier = min((one.after for one in self._notes.values() if one.note.ordered), default=self._came)
            most = 1 if self.segment_fault else SEGMENTS_AT_ONCE
            while len(taken) < min(most, barrier - stored):
                size += len(self._segments[0].data)
                if taken and size > BYTES_AT_ONCE:
                    break
                taken.append(self._segments.popleft())
        return taken

    def _take_notes(self) -> list[tuple[str, Note]]:
        """The next ones, but none that has to wait for segments, nor what comes behind it."""
        taken = []
        with self.lock:
            stored = self._came - len(self._segments)
            for key, waiting in list(self._notes.items()):
                if waiting.note.ordered and waiting.after > stored:
                    break
                taken.append((key, waiting.note))
                del self._notes[key]
                self._droppable -= waiting.note.droppable
        return taken

    def _refuse_segments(self, reason: str) -> bool:
        """Say of all that wait that they have to come again."""
        with self.lock:
            waiting = list(self._segments)
            self._segments.clear()
        refused = IngestResult(IngestOutcome.retry, reason, fault=True)
        answers = (SegmentAnswer(one.peer, len(one.data), result=refused) for one in waiting)
        self.hand_back(*(functools.partial(self._on_answer, answer) for answer in answers))
        return bool(waiting)

    def _store_segments(self, waiting: Sequence[_WaitingSegment]) -> None:
        answers: list[SegmentAnswer | None] = []
        received = []
        began_s = time.monotonic()
        for one in waiting:
            refused = body = ""
            try:
                found = decode(one.data)
                if isinstance(found, SealedSegment):
                    refused, body = found.id, hashlib.sha256(found.body).hexdigest()
                    found = self._seals.open(found)
                if not isinstance(found, Segment):
                    raise ProtocolError(f"a {type(found).__name__} that says to be a segment.")
                received.append(self._received(one, found, body))
                answers.append(None)
            except (ProtocolError, MessageTooLargeError) as error:
                answers.append(SegmentAnswer(one.peer, len(one.data), invalid=error, refused=refused))
        try:
            results: Iterator[IngestResult] = iter(self._ingest.accept_all(received))
        except Exception:
            log.exception("%d segments could not be stored; their robots send them again.", len(received))
            failed = IngestResult(IngestOutcome.retry, "it could not be stored; the gateway's log says why.")
            results = itertools.repeat(failed)
        took_s = time.monotonic() - began_s
        kept = iter(received)
        for at, one in enumerate(waiting):
            if answers[at] is None:
                answers[at] = SegmentAnswer(one.peer, len(one.data), next(kept).segment, next(results))
        done = [answer for answer in answers if answer is not None]
        faults = [answer.result.reason for answer in done if answer.result.fault]
        if faults or any(answer.result.outcome != IngestOutcome.retry for answer in done):
            self._segment_fault = faults[0] if faults else ""
        if received:
            self._on_step_s(took_s)
        self.hand_back(*(functools.partial(self._on_answer, answer) for answer in done))
        if faults:
            self._keep([_PROBE])
            self._refuse_segments(faults[0])

    def _received(self, one: _WaitingSegment, segment: Segment, body: str) -> ReceivedSegment:
        """As if it had come from its robot itself, whoever brought it; `body`: of one that a relay brought."""
        if not body:
            if held_cameras(segment):
                raise ProtocolError(f"segment {segment.id[:200]!r} came without pictures, and not by a relay.")
            return ReceivedSegment(one.peer, segment, one.received_ns, one.data, one.offset_ns)
        robot = segment.episode.robot
        return ReceivedSegment(robot, segment, one.received_ns, b"", self._offset_ns(robot), one.peer, body)

    def _store_notes(self, notes: Sequence[tuple[str, Note]]) -> bool:
        """Whether there were any."""
        if not notes:
            return False
        try:
            with self._ledger.together():
                found = [note.run() for _, note in notes]
        except StorageError as error:
            self._fail(notes, error)
        except Exception as error:  # noqa: BLE001 - whatever one of them is, the others are noted
            if len(notes) == 1:
                self._drop(notes[0][1], error)
                return True
            for at, one in enumerate(notes):
                self._store_notes([one])
                if self._note_fault:
                    self._keep(notes[at + 1 :])
                    break
        else:
            if self._note_fault:
                log.info("storage is back.")
                self._segment_fault = ""
            self._note_fault, self._pause_s = "", 0.0
            self.hand_back(*(functools.partial(note.done, one) for (_, note), one in zip(notes, found, strict=True)))
        return True

    def _fail(self, notes: Sequence[tuple[str, Note]], error: StorageError) -> None:
        if str(error) != self._note_fault:
            log.error("%s It is tried again.", error)
        self._note_fault = str(error)
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._retry_s = time.monotonic() + self._pause_s
        self._keep([*notes, _PROBE])
        self.hand_back(
            functools.partial(self._on_fault, error), *(functools.partial(note.failed, error) for _, note in notes)
        )

    def _keep(self, notes: Sequence[tuple[str, Note]]) -> None:
        """Those that last wait again, before all others, unless there is a newer one under the same key."""
        with self.lock:
            for key, note in reversed(notes):
                if note.lasting and key not in self._notes:
                    # what they were to come after is stored, or was refused
                    self._notes[key] = _WaitingNote(note, 0)
                    self._notes.move_to_end(key, last=False)
                    self._droppable += note.droppable

    def _drop(self, note: Note, error: Exception) -> None:
        """It can never be noted."""
        if not isinstance(error, FleetError):
            log.error("something could not be noted.", exc_info=error)
        self.hand_back(functools.partial(note.failed, error))
