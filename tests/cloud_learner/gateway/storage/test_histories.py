"""What a gateway that was started again knows of running episodes whose first segments lie in an object store."""

import errno
import os
import threading

import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.gateway.storage.ingest import Ingest, ReceivedSegment
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire import codec
from wire.clock import ManualClock
from wire.errors import StorageError

SPEC = fake_spec(1, size=16)
EPISODES = [fake_episode(SPEC, f"e{n}", steps=88, segment_steps=22, seed=n) for n in range(3)]


class Storage:
    """The storage side of a gateway whose object store answers when it is let to."""

    def __init__(self, root, monkeypatch):
        (root / "bucket").mkdir()
        self.ledger, self.store = BufferLocation(root / "data", store=f"file://{root}/bucket").open_writer()
        self.ledger.see_robot("r1", SPEC, "clock", 1)
        self.reads = []
        self.answers = threading.Event()
        self.answers.set()
        self.fault = None
        self._read = self.store.read
        monkeypatch.setattr(self.store, "read", self.read)
        self.start()

    def start(self):
        self.ingest = Ingest(self.ledger, self.store, ManualClock(10**12))
        self.ingest.open()

    def read(self, rows):
        if not rows:
            return self._read(rows)
        self.reads.append(tuple(rows))
        assert self.answers.wait(60)
        if self.fault is not None:
            raise self.fault
        return self._read(rows)

    def accept(self, *segments):
        return [
            result.outcome for result in self.ingest.accept_all([ReceivedSegment("r1", one, 1) for one in segments])
        ]

    def let_answer(self):
        """The store answers, and whoever asked it has heard."""
        self.answers.set()
        for thread in threading.enumerate():
            if thread.name.startswith("history of "):
                thread.join(60)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    """Three running episodes whose first two segments are sealed; a gateway that starts when the store is silent."""
    storage = Storage(tmp_path, monkeypatch)
    for episode in EPISODES:
        assert storage.accept(*episode[:2]) == ["stored"] * 2
    assert storage.reads == [], "of a new episode nothing is stored that could be read"
    seal(storage.store, 2000, force=True)
    storage.answers.clear()
    storage.start()
    yield storage
    storage.let_answer()
    storage.store.close()
    storage.ledger.close()


def test_a_silent_store_keeps_nobody_waiting_and_is_asked_once_for_each_episode(storage):
    thirds = [episode[2] for episode in EPISODES]
    other = fake_episode(SPEC, "f", steps=20)
    assert storage.accept(*thirds, *other) == ["retry"] * 3 + ["stored"]
    # sent again, with what came behind it
    assert storage.accept(*thirds, *(episode[3] for episode in EPISODES)) == ["retry"] * 6
    assert storage.accept(*EPISODES[0][:2]) == ["duplicate"] * 2, "the ledger knows these"
    storage.let_answer()
    for episode in EPISODES:
        assert storage.accept(*episode[2:]) == ["stored"] * 2
    assert len(storage.reads) == 3


def test_segments_are_checked_against_what_was_read(storage):
    first, _, third, _ = EPISODES[0]
    assert storage.accept(third) == ["retry"]
    storage.let_answer()
    wrong = codec.decode(codec.encode(third))
    wrong.frames.update(first.frames)
    assert storage.accept(wrong) == ["quarantined"]
    assert storage.accept(third) == ["stored"]


def test_a_store_that_fails_is_said_and_asked_again(storage):
    third = EPISODES[0][2]
    storage.fault = StorageError("the store does not answer.")
    assert storage.accept(third) == ["retry"]
    storage.let_answer()
    (result,) = storage.ingest.accept_all([ReceivedSegment("r1", third, 1)])
    assert (result.outcome, result.reason) == ("retry", "the store does not answer.")
    storage.fault = None
    assert storage.accept(third) == ["retry"]
    storage.let_answer()
    assert storage.accept(third) == ["stored"]
    assert len(storage.reads) == 2


def test_what_is_known_is_not_read_again_after_a_full_disk_or_a_lost_answer(storage, monkeypatch):
    _, _, third, fourth = EPISODES[0]
    storage.accept(third)
    storage.let_answer()
    commit = storage.ledger.commit_segments

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lose_the_answer(*args):
        commit(*args)
        raise StorageError("the connection broke.")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        assert storage.accept(third, fourth) == ["retry"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(storage.ledger, "commit_segments", lose_the_answer)
        assert storage.accept(third) == ["retry"]
    assert storage.accept(third) == ["duplicate"]
    # its steps saw frames of the third: nobody could tell without knowing that one
    wrong = codec.decode(codec.encode(fourth))
    wrong.frames.update(third.frames)
    assert storage.accept(wrong) == ["quarantined"]
    assert storage.accept(fourth) == ["stored"]
    assert len(storage.reads) == 1


def test_what_is_submitted_by_hand_waits_for_the_store(storage):
    third = EPISODES[0][2]
    name = storage.store.quarantine.put(third.id, codec.encode(third), "a reason", "r1")
    storage.answers.set()
    assert storage.ingest.submit_again(name, 1).outcome == "stored"
