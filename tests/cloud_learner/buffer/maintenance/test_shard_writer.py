import threading

import numpy as np
import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance import shard_writer
from cloud_learner.buffer.maintenance.maintenance import MaintenanceThread
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.shard import shard_key
from tests.cloud_learner.buffer.stored import OTHER, SPEC, Buffer
from tests.cloud_learner.buffer.synthetic import fake_episode
from wire.clock import ManualClock
from wire.errors import StorageError


@pytest.fixture
def local(tmp_path):
    buffer = Buffer(BufferLocation(tmp_path / "data"))
    yield buffer
    buffer.ledger.close()


def _policy(monkeypatch, min_rows, max_age_s=10):
    monkeypatch.setattr(shard_writer, "MIN_ROWS", min_rows)
    monkeypatch.setattr(shard_writer, "MAX_AGE_S", max_age_s)


def test_episodes_lie_together_whoever_sends_between(local):
    first, second = fake_episode(SPEC, "a", steps=320, seed=1), fake_episode(SPEC, "b", steps=320, seed=2)
    for pair in zip(first, second, strict=True):
        local.add(pair)
    seal(local.store, 2000, force=True)
    places = local.ledger.places(list(local.segments))
    order = sorted(places.values(), key=lambda place: place.offset)
    assert [place.id for place in order] == [f"a/{n}" for n in range(4)] + [f"b/{n}" for n in range(4)]
    ends = np.cumsum([place.bytes for place in order]).tolist()
    assert [place.offset for place in order] == [0, *ends[:-1]]
    local.check()


def test_what_is_finished_waits_until_it_is_worth_a_shard(local, monkeypatch):
    _policy(monkeypatch, min_rows=1000)
    local.add_episode("e0", steps=600)
    open_rows = local.add_episode("running", steps=700, finished=False)
    assert seal(local.store, 1000).shards == 0
    done_rows = local.add_episode("e1", steps=600)
    done = seal(local.store, 1000)
    assert (done.shards, done.rows) == (1, 1200)
    where = local.where()
    (shard,) = local.ledger.shards()
    assert {where[row] for row in open_rows} == {"journal"}
    assert {where[row] for row in done_rows} == {shard.number}
    assert seal(local.store, 1000).shards == 0
    local.check()


def test_what_waited_long_is_sealed_and_the_rest_of_its_episode_later(local, monkeypatch):
    _policy(monkeypatch, min_rows=1000)
    segments = fake_episode(SPEC, "e", steps=320)
    early = local.add(segments[:2], committed_ns=1000)
    assert seal(local.store, 10 * 10**9).shards == 0
    assert seal(local.store, 11 * 10**9).segments == 2
    late = local.add(segments[2:], committed_ns=12 * 10**9)
    assert seal(local.store, 13 * 10**9).shards == 0
    # the machine was started again: its clock begins anew
    assert seal(local.store, 1).segments == 2
    assert {local.where()[row] for row in early} != {local.where()[row] for row in late}
    local.check()


def test_a_running_episode_is_not_torn_while_segments_keep_coming(local, monkeypatch):
    _policy(monkeypatch, min_rows=10**9)
    segments = fake_episode(SPEC, "e", steps=320)
    for n, segment in enumerate(segments[:-1]):
        local.add([segment], committed_ns=n * 8 * 10**9)
    assert seal(local.store, 20 * 10**9).shards == 0
    assert seal(local.store, 27 * 10**9).segments == 3


def test_shards_are_filled_with_whole_episodes_and_long_ones_are_cut(local, monkeypatch):
    for n in range(3):
        local.add_episode(f"e{n}", OTHER, steps=1500, segment_steps=500)
    local.add_episode("long", OTHER, steps=9000, segment_steps=1000)
    size = {episode.id: episode.bytes for episode in local.ledger.episodes()}
    # two episodes fit and leave less than a quarter
    room = int(2.2 * size["e0"])
    monkeypatch.setattr(shard_writer, "SHARD_BYTES", room)
    done = seal(local.store, 2000, force=True)
    assert done.rows == 4500 + 9000
    shards = {}
    for place in local.ledger.places(list(local.segments)).values():
        shards.setdefault(place.shard, []).append(place)
    assert all(sum(place.bytes for place in some) <= room for some in shards.values())
    assert {place.episode for place in shards[0]} == {"e0", "e1"} and len(shards[0]) == 6
    assert len(shards) == 5
    local.check()


def test_journal_files_go_when_everything_in_them_was_sealed(local):
    local.add_episode("e0", steps=160)
    local.reopen()
    local.add_episode("e1", steps=160)
    assert local.store.journal.numbers() == [1, 2]
    seal(local.store, 2000, force=True)
    assert local.store.journal.numbers() == [2]
    local.reopen()
    assert local.store.journal.numbers() == []
    local.check()


def test_somebody_else_at_work_is_named_and_waited_for(local):
    local.add_episode("e0", steps=160)
    ledger, reader = local.place.open_writer()
    with local.ledger.exclusive(wait_s=0):
        with pytest.raises(StorageError):
            seal(reader, 2000, force=True)
        # a second writer opens all the same, and leaves what it finds alone
        local.place.open_writer()[0].close()
    assert seal(reader, 2000, force=True).segments == 2
    ledger.close()
    local.check()


def test_the_sealing_thread_seals_and_survives_what_fails(local, monkeypatch, caplog):
    monkeypatch.setattr(shard_writer, "MIN_ROWS", 100)
    clock = ManualClock(1000)
    sealer = MaintenanceThread(
        local.store,
        clock=clock,
        every_s=0.01,
        pause_s=0.01,
    )
    rows = local.add_episode("e0", steps=160)
    put, failed = local.store.objects.put, threading.Event()

    def fail(key, data):
        if not failed.is_set():
            failed.set()
            raise StorageError("the disk is on fire")
        put(key, data)

    monkeypatch.setattr(local.store.objects, "put", fail)
    sealer.start()
    for _ in range(1000):
        if "journal" not in local.where().values():
            break
        threading.Event().wait(0.01)
    sealer.stop()
    sealer.stop()
    assert failed.is_set() and "the disk is on fire" in caplog.text
    # the shard that failed is gone, and so are its objects
    (shard,) = local.ledger.shards()
    assert {local.where()[row] for row in rows} == {shard.number} and shard.number > 0
    for number in range(shard.number):
        assert shard_key(SPEC.hash, number) not in set(local.store.objects.list())
    local.check()
