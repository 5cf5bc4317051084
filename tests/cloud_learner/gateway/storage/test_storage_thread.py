"""The thread that stores: in which order, what belongs together, what is tried again, and what it keeps in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.dispatch.notes import Note
from cloud_learner.gateway.storage import storage_thread
from cloud_learner.gateway.storage.credit import ONE_AT_A_TIME, QUEUE_BYTES, credit_bytes
from cloud_learner.gateway.storage.ingest import Ingest, IngestOutcome
from cloud_learner.gateway.storage.storage_thread import SegmentAnswer, StorageThread
from tests import samples
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire import codec
from wire.clock import ManualClock
from wire.errors import InvalidDataError, StorageError
from wire.messages.gateway import FIRST_CREDIT_BYTES, Segment

SPEC = fake_spec(1, size=16)


class Desk:
    """A storage thread that the test steps, on a real buffer."""

    def __init__(self, root: Path) -> None:
        self.ledger, self.store = BufferLocation(root).open_writer()
        self.ledger.see_robot("r1", SPEC, "clock", 1)
        self.ingest = Ingest(self.ledger, self.store, ManualClock(10**12), samples.all_teach)
        self.ingest.open()
        self.answers: list[SegmentAnswer] = []
        self.faults: list[str] = []
        self.thread = StorageThread(self.ledger, self.ingest, self._answered, self.faults.append, lambda _: None)

    def _answered(self, answer: SegmentAnswer) -> None:
        self.thread.release(answer)
        self.answers.append(answer)

    def send(self, segment: Segment, peer: str = "r1") -> bool:
        return self.thread.submit_segment(peer, codec.encode(segment), 1)

    def step(self) -> bool:
        went_on = self.thread.step()
        while (result := self.thread.pop_result()) is not None:
            result()
        return went_on

    def drain(self) -> None:
        while self.step():
            pass

    def event(self, kind: str, **more: bool) -> Note:
        return Note(lambda: self.ledger.add_event(1, "r1", kind), **more)  # type: ignore[arg-type]

    @property
    def events(self) -> list[str]:
        return [event.kind for event in self.ledger.events()]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.ledger.close()


def test_what_waits_is_stored_with_one_commit_for_segments_and_one_for_notes(desk: Desk) -> None:
    for segment in fake_episode(SPEC, "e", steps=60, segment_steps=12):
        desk.send(segment)
    for number in range(50):
        desk.thread.submit(desk.event(str(number)))
    before = desk.ledger.writes
    assert desk.step() and not desk.step()
    assert desk.ledger.writes - before == 2
    assert [answer.result.outcome for answer in desk.answers] == ["stored"] * 5
    assert desk.events == [str(number) for number in range(50)]


def test_a_record_is_the_bytes_that_came(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (segment,) = fake_episode(SPEC, "e", steps=12)
    data = codec.encode(segment)
    encoded = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda message: encoded.append(message) or encode(message))
    desk.thread.submit_segment("r1", data, 1)
    desk.thread.submit_segment("r1", data, 1)
    desk.drain()
    first, again = (answer.result for answer in desk.answers)
    assert (first.outcome, again.outcome) == ("stored", "duplicate")
    assert encoded == [], "neither for the journal, nor for trainers, nor to know it again"
    assert first.record == desk.store.read_records([first.row]).payloads[first.row] == data


def test_what_no_segment_has_is_not_kept(desk: Desk) -> None:
    (segment,) = fake_episode(SPEC, "e", steps=12)
    data = codec.encode(segment)
    stuffed = msgspec.msgpack.decode(data[1:]) | {"more": b"x" * 100_000}
    desk.thread.submit_segment("r1", data[:1] + msgspec.msgpack.encode(stuffed), 1)
    desk.send(segment)
    desk.drain()
    first, again = (answer.result for answer in desk.answers)
    assert (first.outcome, again.outcome) == ("stored", "duplicate")
    assert desk.store.read_records([first.row]).payloads[first.row] == data


def test_bytes_that_are_no_segment_are_answered_as_such(desk: Desk) -> None:
    (segment,) = fake_episode(SPEC, "e", steps=12)
    desk.thread.submit_segment("r1", codec.encode(segment)[:-9], 1)
    desk.send(segment)
    desk.drain()
    assert [answer.invalid is not None for answer in desk.answers] == [True, False]
    assert desk.answers[1].result.outcome == "stored"


def test_an_ordered_note_comes_after_what_came_before_and_before_what_comes_after(desk: Desk) -> None:
    first, second, third = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    seen: list[int] = []

    def look() -> int:
        return desk.ledger.totals().segments

    desk.send(first)
    desk.thread.submit(Note(look, seen.append, ordered=True))
    desk.send(second)
    desk.send(third)
    desk.thread.submit(Note(look, seen.append, ordered=True))
    desk.drain()
    assert seen == [1, 3]


def test_of_notes_with_one_key_the_newest_is_done_in_the_place_of_the_oldest(desk: Desk) -> None:
    for kind, key in (("a1", "a"), ("b", ""), ("a2", "a")):
        desk.thread.submit(Note(lambda kind=kind: desk.ledger.add_event(1, "r1", kind), key=key))  # type: ignore[misc]
    desk.drain()
    assert desk.events == ["a2", "b"]


def test_segments_rely_on_a_note_that_was_replaced_behind_them(desk: Desk) -> None:
    first, second, _ = fake_episode(SPEC, "e", steps=60, segment_steps=22)
    seen: list[int] = []
    desk.send(first)
    for _ in range(2):
        desk.thread.submit(Note(lambda: desk.ledger.totals().segments, seen.append, key="hello", ordered=True))
        desk.send(second)
    desk.drain()
    assert seen == [1]


def test_a_note_that_cannot_be_undoes_no_other(desk: Desk) -> None:
    failed: list[Exception] = []

    def wrong() -> None:
        desk.ledger.add_event(1, "r1", "undone")
        raise InvalidDataError("no such thing")

    desk.thread.submit(desk.event("before"))
    desk.thread.submit(Note(wrong, failed=failed.append))
    desk.thread.submit(desk.event("after"))
    desk.drain()
    assert desk.events == ["before", "after"]
    assert [str(error) for error in failed] == ["no such thing"]
    assert desk.thread.fault == ""


@contextlib.contextmanager
def away(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise StorageError("nobody answers.")

    with monkeypatch.context() as patch:
        patch.setattr(desk.ledger, "writing", fail)
        patch.setattr(desk.ledger, "reading", fail)
        yield


def test_notes_wait_for_storage_in_their_order_and_the_oldest_events_are_dropped(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_thread, "MOST_DROPPABLE", 3)
    failures: list[Exception] = []
    with away(desk, monkeypatch):
        desk.thread.submit(desk.event("lasting"))
        desk.thread.submit(Note(lambda: desk.ledger.add_event(1, "r1", "once"), failed=failures.append, lasting=False))
        desk.drain()
        assert desk.thread.fault == "nobody answers." and len(desk.faults) >= 1 and len(failures) == 1
        for number in range(6):
            desk.thread.submit(desk.event(f"event {number}", droppable=True))
            desk.drain()
        assert desk.thread.dropped == 3
    desk.drain()
    assert desk.events == ["lasting", "event 3", "event 4", "event 5"]
    assert desk.thread.fault == desk.thread.segment_fault == ""


def test_while_it_is_away_segments_come_again_and_nothing_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = fake_episode(SPEC, "e", steps=60, segment_steps=12)
    with away(desk, monkeypatch):
        for segment in segments:
            desk.send(segment)
        desk.drain()
        assert [answer.result.outcome for answer in desk.answers] == [IngestOutcome.retry] * 5
        assert all(answer.result.fault for answer in desk.answers)
        assert desk.thread.queued_bytes == 0 and desk.thread.segment_fault == "nobody answers."
    desk.answers.clear()
    for segment in segments:
        desk.send(segment)
    desk.drain()
    assert [answer.result.outcome for answer in desk.answers] == ["stored"] * 5
    assert desk.thread.segment_fault == ""


def test_after_a_full_disk_one_segment_is_tried_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = fake_episode(SPEC, "e", steps=60, segment_steps=12)
    tried = []

    def full(some: list, *more: object) -> None:
        tried.append(len(some))
        raise StorageError("no space left.")

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "append_all", full)
        for _ in range(2):
            for segment in segments:
                desk.send(segment)
            desk.drain()
    assert tried == [5, 1]
    assert len(desk.answers) == 10 and desk.thread.segment_fault == "no space left."


def test_one_peer_cannot_take_all_the_room(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = fake_episode(SPEC, "e", steps=60, segment_steps=12)
    size = len(codec.encode(segments[0]))
    monkeypatch.setattr(storage_thread, "ONE_PEER_BYTES", 2 * size + 100)
    assert [desk.send(segment, "r1") for segment in segments][:3] == [True, True, False]
    assert desk.send(segments[0], "r2")
    monkeypatch.setattr(storage_thread, "QUEUE_BYTES", 2 * size + 100)
    assert desk.send(segments[1], "r3"), "the first of each finds room: or nobody would hear that storage is back"
    assert not desk.send(segments[1], "r4"), "but not of however many"
    desk.drain()
    assert desk.thread.queued_bytes == 0


@pytest.mark.parametrize(
    ("queued", "recorders", "fault", "credit"),
    [
        (0, 1, False, FIRST_CREDIT_BYTES),
        (0, 0, False, FIRST_CREDIT_BYTES),
        (0, 100, False, QUEUE_BYTES // 2 // 100),
        (QUEUE_BYTES // 4, 100, False, QUEUE_BYTES // 4 // 100),
        (QUEUE_BYTES, 4, False, ONE_AT_A_TIME),
        (0, 4, True, ONE_AT_A_TIME),
    ],
)
def test_credit_is_a_share_of_what_is_free(queued: int, recorders: int, fault: bool, credit: int) -> None:
    assert credit_bytes(queued, recorders, fault) == credit


def test_the_thread_stores_what_comes_wakes_the_loop_and_ends_when_all_is_stored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[bool] = []
    desk.thread.on_result = lambda: rung.append(True)
    accept: Callable = desk.ingest.accept_all
    surprises = [KeyError("nobody thought of it")]

    def sometimes(received: list) -> object:
        if surprises:
            raise surprises.pop()
        return accept(received)

    monkeypatch.setattr(desk.ingest, "accept_all", sometimes)
    desk.thread.start()
    segments = fake_episode(SPEC, "e", steps=60, segment_steps=12)
    for segment in segments:
        desk.send(segment)
        desk.thread.submit(desk.event(segment.id))
    assert desk.thread.close(20.0)
    desk.drain()
    outcomes = [answer.result.outcome for answer in desk.answers]
    assert len(outcomes) == 5 and set(outcomes) <= {"stored", "retry"}, "what failed is answered as well"
    assert outcomes.count("stored") == desk.ledger.totals().segments
    assert desk.events == [segment.id for segment in segments]
    assert rung
