import hashlib
import os
import threading

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer import arrays
from cloud_learner.buffer.fake import fake_episode, fake_spec, same_segment
from cloud_learner.buffer.objects import LocalObjects
from cloud_learner.buffer.place import BufferPlace
from cloud_learner.buffer.sealer import Sealer, SealPolicy, seal
from cloud_learner.buffer.shard import Item, encode_shard
from cloud_learner.buffer.store import SegmentStore
from wire import codec
from wire.clock import ManualClock
from wire.errors import InvalidData, StorageError
from wire.messages import CameraFrames

pytest_plugins = ["tests.s3"]

SPEC = fake_spec(2, size=16)
OTHER = fake_spec(0, state_dim=7)


class Buffer:
    """A writer of one place, and what was put into it by row."""

    def __init__(self, place):
        self.place = place
        self.ledger, self.store = place.open_writer()
        self.segments = {}
        for spec in (SPEC, OTHER):
            self.ledger.see_robot("r1", spec, "clock", 1)

    def add(self, segments, committed_ns=1000):
        rows = []
        for segment in segments:
            row = self.store.append(segment, committed_ns - 1, committed_ns)
            self.segments[row] = segment
            rows.append(row)
        return rows

    def add_episode(self, name, spec=SPEC, committed_ns=1000, **options):
        return self.add(fake_episode(spec, name, **{"seed": len(self.segments), **options}), committed_ns)

    def check(self, rows=None, store=None):
        """That everything, or `rows`, is there to the last bit, for this writer or another reader."""
        rows = list(self.segments if rows is None else rows)
        found = (store or self.store).read(rows)
        assert found.damaged == {} and found.elsewhere == ()
        assert set(found.segments) == set(rows)
        assert all(same_segment(found.segments[row], self.segments[row]) for row in rows)

    def where(self):
        """'journal' or the shard's number by row."""
        places = self.ledger.places(list(self.segments))
        return {row: "journal" if place.shard is None else place.shard for row, place in places.items()}

    def reopen(self):
        self.store.close()
        self.ledger.close()
        self.ledger, self.store = self.place.open_writer()


@pytest.fixture(params=["local", "s3"])
def buffer(request, tmp_path):
    store = request.getfixturevalue("s3") if request.param == "s3" else ""
    buffer = Buffer(BufferPlace(tmp_path / "data", store=store))
    yield buffer
    buffer.ledger.close()


@pytest.fixture
def local(tmp_path):
    buffer = Buffer(BufferPlace(tmp_path / "data"))
    yield buffer
    buffer.ledger.close()


def _files(root, below):
    return sorted(str(path.relative_to(root)) for path in (root / below).rglob("*") if path.is_file())


def test_a_segment_is_there_from_the_moment_it_was_taken_until_it_lies_in_a_shard(buffer):
    rows = buffer.add_episode("e0", steps=300) + buffer.add_episode("e1", OTHER, steps=300)
    assert rows == [1, 2, 3, 4, 5, 6, 7, 8]
    buffer.check()
    ledger, reader = buffer.place.open_reader()
    buffer.check(store=reader)
    assert set(buffer.where().values()) == {"journal"}
    done = seal(buffer.store, buffer.ledger, 2000, force=True)
    assert (done.shards, done.segments, done.rows) == (2, 8, 600)
    assert "journal" not in buffer.where().values()
    buffer.check()
    buffer.check(store=reader)
    assert set(reader.read(rows, verify=True).segments) == set(rows)
    buffer.reopen()
    buffer.check()
    ledger.close()


def test_a_segment_comes_twice_and_is_stored_once(local):
    segments = fake_episode(SPEC, "e", steps=160)
    assert [local.store.append(segment, 1, 2) for segment in segments] == [1, 2]
    assert [local.store.append(segment, 1, 2) for segment in segments] == [None, None]
    local.reopen()
    assert local.store.append(segments[0], 1, 2) is None
    assert len(local.ledger.segments_after(0)) == 2


def test_the_ledger_has_the_size_and_hash_of_the_canonical_record(local):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    brought = msgspec.structs.replace(segment, frames={"camera1": segment.frames["camera1"]})
    row = local.store.append(brought, 1, 2)
    empty = CameraFrames(np.zeros(0, np.int64), ())
    canonical = msgspec.structs.replace(segment, frames={"camera0": empty, "camera1": segment.frames["camera1"]})
    payload = codec.encode(canonical)
    known = local.ledger.segment("e/0")
    assert (known.bytes, known.sha256) == (len(payload), hashlib.sha256(payload).hexdigest())
    assert same_segment(local.store.read([row]).segments[row], canonical)


def test_what_may_not_be_stored_leaves_no_row(local):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    stranger = msgspec.structs.replace(segment.episode, spec_hash="0123456789abcdef")
    with pytest.raises(InvalidData, match="say hello"):
        local.store.append(msgspec.structs.replace(segment, episode=stranger), 1, 2)
    image = segment.frames["camera0"].encoded[0]
    many = {**segment.frames, "camera0": CameraFrames(np.arange(5000), (image,) * 5000)}
    with pytest.raises(InvalidData, match="larger than a shard"):
        local.store.append(msgspec.structs.replace(segment, frames=many), 1, 2)
    assert local.ledger.newest_row() == 0
    assert local.store.append(segment, 1, 2) == 1


def test_rows_that_nobody_knows_are_absent(local):
    rows = local.add_episode("e", steps=80)
    found = local.store.read([*rows, 77, *rows])
    assert list(found.segments) == rows and found.damaged == {}
    assert local.store.read([]).segments == {}


def test_episodes_lie_together_whoever_sends_between(local):
    first, second = fake_episode(SPEC, "a", steps=320, seed=1), fake_episode(SPEC, "b", steps=320, seed=2)
    for pair in zip(first, second, strict=True):
        local.add(pair)
    seal(local.store, local.ledger, 2000, force=True)
    places = local.ledger.places(list(local.segments))
    order = sorted(places.values(), key=lambda place: place.first_row)
    assert [place.id for place in order] == [f"a/{n}" for n in range(4)] + [f"b/{n}" for n in range(4)]
    assert [place.first_row for place in order] == list(range(0, 640, 80))
    local.check()


def test_what_is_finished_waits_until_it_is_worth_a_shard(local):
    policy = SealPolicy(min_rows=1000, max_age_s=10)
    local.add_episode("e0", steps=600)
    open_rows = local.add_episode("running", steps=700, finished=False)
    assert seal(local.store, local.ledger, 1000, policy).shards == 0
    done_rows = local.add_episode("e1", steps=600)
    done = seal(local.store, local.ledger, 1000, policy)
    assert (done.shards, done.rows) == (1, 1200)
    where = local.where()
    (shard,) = local.ledger.shards()
    assert {where[row] for row in open_rows} == {"journal"}
    assert {where[row] for row in done_rows} == {shard.number}
    assert seal(local.store, local.ledger, 1000, policy).shards == 0
    local.check()


def test_what_waited_long_is_sealed_and_the_rest_of_its_episode_later(local):
    policy = SealPolicy(min_rows=1000, max_age_s=10)
    segments = fake_episode(SPEC, "e", steps=320)
    early = local.add(segments[:2], committed_ns=1000)
    assert seal(local.store, local.ledger, 10 * 10**9, policy).shards == 0
    assert seal(local.store, local.ledger, 11 * 10**9, policy).segments == 2
    late = local.add(segments[2:], committed_ns=12 * 10**9)
    assert seal(local.store, local.ledger, 13 * 10**9, policy).shards == 0
    # the machine was started again: its clock begins anew
    assert seal(local.store, local.ledger, 1, policy).segments == 2
    assert {local.where()[row] for row in early} != {local.where()[row] for row in late}
    local.check()


def test_a_running_episode_is_not_torn_while_segments_keep_coming(local):
    policy = SealPolicy(min_rows=10**9, max_age_s=10)
    segments = fake_episode(SPEC, "e", steps=320)
    for n, segment in enumerate(segments[:-1]):
        local.add([segment], committed_ns=n * 8 * 10**9)
    assert seal(local.store, local.ledger, 20 * 10**9, policy).shards == 0
    assert seal(local.store, local.ledger, 27 * 10**9, policy).segments == 3


def test_shards_are_filled_with_whole_episodes_and_long_ones_are_cut(local):
    for n in range(3):
        local.add_episode(f"e{n}", OTHER, steps=1500, segment_steps=500)
    local.add_episode("long", OTHER, steps=9000, segment_steps=1000)
    done = seal(local.store, local.ledger, 2000, force=True)
    assert done.rows == 4500 + 9000
    places = local.ledger.places(list(local.segments))
    shards = {}
    for place in places.values():
        shards.setdefault(place.shard, []).append(place)
    assert all(sum(place.steps for place in some) <= arrays.SHARD_ROWS for some in shards.values())
    assert len(shards) == 4
    # the first two episodes are whole
    assert len({place.shard for place in places.values() if place.episode in ("e0", "e1")}) == 1
    local.check()


def test_journal_files_go_when_everything_in_them_was_sealed(local):
    local.add_episode("e0", steps=160)
    local.reopen()
    local.add_episode("e1", steps=160)
    assert local.store.journal.numbers() == [1, 2]
    seal(local.store, local.ledger, 2000, force=True)
    assert local.store.journal.numbers() == [2]
    local.reopen()
    assert local.store.journal.numbers() == []
    local.check()


def test_somebody_else_at_work_is_named_and_waited_for(local):
    local.add_episode("e0", steps=160)
    ledger, reader = local.place.open_writer()
    with local.ledger.exclusive(wait_s=0):
        with pytest.raises(StorageError):
            seal(reader, ledger, 2000, force=True)
        # a second writer opens all the same, and leaves what it finds alone
        local.place.open_writer()[0].close()
    assert seal(reader, ledger, 2000, force=True).segments == 2
    ledger.close()
    local.check()


def test_leftovers_of_a_crash_go_when_the_next_writer_opens(buffer):
    rows = buffer.add_episode("e0", steps=160)
    before = sorted(buffer.store.objects.list())
    # a shard that was written but never committed
    number = buffer.ledger.reserve_shard(SPEC.hash, 5)
    items = [Item(row, "0" * 64, buffer.segments[row]) for row in rows]
    encoded = encode_shard(SPEC, number, items)
    for key, data in list(encoded.objects.items())[3:]:
        buffer.store.objects.put(key, data)
    # one of which deleting had begun
    seal(buffer.store, buffer.ledger, 2000, force=True)
    (sealed,) = {place.shard for place in buffer.ledger.places(rows).values()}
    buffer.ledger.prune(["e0"], 7)
    buffer.ledger.mark_dropping(SPEC.hash, sealed)
    buffer.store.objects.delete(f"{SPEC.hash}/actor/c/{sealed}")
    # a file of which half was written
    if isinstance(buffer.store.objects, LocalObjects):
        half = buffer.store.objects.root / ".writing" / "1-2-3.part"
        half.parent.mkdir(exist_ok=True)
        half.write_bytes(b"half")
    buffer.reopen()
    assert buffer.ledger.shards() == ()
    left = {key for key in buffer.store.objects.list() if not key.endswith("zarr.json")}
    assert left == {key for key in before if not key.endswith("zarr.json")} == {"store.json"}
    if isinstance(buffer.store.objects, LocalObjects):
        assert not half.exists()
    fresh = buffer.add_episode("e1", steps=160)
    seal(buffer.store, buffer.ledger, 3000, force=True)
    buffer.check(fresh)


def test_a_store_of_another_format_is_refused(local):
    local.store.objects.put("store.json", b'{"format": 9}')
    local.ledger.close()
    with pytest.raises(StorageError, match=r"format 9, this vla-fleet reads format 2"):
        local.place.open_writer()
    local.store.objects.put("store.json", b"[1]")
    with pytest.raises(StorageError, match=r"store\.json"):
        local.place.open_writer()


def test_a_reader_finds_what_moves_while_it_reads(local, monkeypatch):
    """Between the ledger's answer and the reading, segments are sealed, rewritten and forgotten."""
    rows = local.add_episode("e0", steps=320)
    gone = local.add_episode("e1", steps=320)
    ledger, reader = local.place.open_reader()
    asked = ledger.places
    moves = [
        lambda: (seal(local.store, local.ledger, 2000, force=True), local.reopen()),
        lambda: _rewrite_all(local, rows + gone),
        lambda: (local.ledger.prune(["e1"], 5), _rewrite_all(local, rows)),
    ]

    def ask_and_move(wanted):
        answer = asked(wanted)
        if moves:
            moves.pop(0)()
        return answer

    monkeypatch.setattr(ledger, "places", ask_and_move)
    found = reader.read(rows + gone)
    assert moves == []
    assert found.damaged == {} and set(found.segments) == set(rows)
    assert all(same_segment(found.segments[row], local.segments[row]) for row in rows)
    ledger.close()


def _rewrite_all(buffer, rows):
    from cloud_learner.buffer.compact import drop_dead, rewrite

    with buffer.ledger.exclusive(wait_s=5):
        rewrite(buffer.store, buffer.ledger, SPEC, rows, 9)
    drop_dead(buffer.store, buffer.ledger)


def test_readers_and_a_sealer_at_the_same_time(local):
    failures, stop = [], threading.Event()
    ledger, reader = local.place.open_reader()

    def read():
        chance = np.random.default_rng(0)
        while not stop.is_set():
            rows = list(local.segments)
            if rows:
                try:
                    local.check(chance.choice(rows, 5).tolist(), reader)
                except AssertionError as error:
                    failures.append(error)
                    return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for n in range(12):
        local.add_episode(f"e{n}", steps=160)
        seal(local.store, local.ledger, 2000, force=n % 2 == 0)
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    local.check()
    ledger.close()


def test_the_sealing_thread_seals_and_survives_what_fails(local, monkeypatch, caplog):
    clock = ManualClock(1000)
    sealer = Sealer(
        local.store, local.ledger, SealPolicy(min_rows=100, max_age_s=600), clock, every_s=0.01, pause_s=0.01
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
        assert not {*local.store.objects.list()}.intersection(arrays.shard_keys(SPEC, number))
    local.check()


def test_a_journal_of_another_machine_is_no_damage(local, tmp_path):
    rows = local.add_episode("e0", steps=160)
    there = BufferPlace(tmp_path / "other", store=local.place.store_place)
    store = SegmentStore(there.journal, LocalObjects(tmp_path / "data" / "store"), local.ledger)
    found = store.read(rows)
    assert found.elsewhere == tuple(rows) and found.segments == {} and found.damaged == {}
    # and whoever seals there leaves it alone
    assert seal(store, local.ledger, 5000, force=True).shards == 0
    seal(local.store, local.ledger, 5000, force=True)
    local.check(store=store)


def test_a_full_disk_loses_nothing_that_was_taken(local, monkeypatch):
    rows = local.add_episode("e0", steps=160)
    write = os.pwrite

    def full(descriptor, data, at):
        if len(data) > 100:
            write(descriptor, data[:50], at)
        raise OSError(28, "No space left on device")

    (segment,) = fake_episode(SPEC, "e1", steps=80)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for _ in range(3):
            with pytest.raises(StorageError, match="no space left"):
                local.store.append(segment, 1, 2)
    local.check(rows)
    local.add([segment])
    local.check()


def test_what_a_reader_opens_must_be_there(tmp_path):
    with pytest.raises(StorageError):
        BufferPlace(tmp_path / "nothing").open_reader()
    assert not (tmp_path / "nothing").exists()
