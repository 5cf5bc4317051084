import hashlib
import os
import subprocess
import threading

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.store.objects import LocalObjects
from cloud_learner.buffer.store.shard import encode_shard, shard_key
from cloud_learner.buffer.store.store import SegmentStore, canonical
from tests.cloud_learner.buffer.stored import OTHER, SPEC, Buffer, put
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment
from wire import codec
from wire.errors import DiskFullError, InvalidDataError, StorageError
from wire.messages.gateway import CameraFrames

pytest_plugins = ["tests.s3"]


def test_a_segment_is_there_from_the_moment_it_was_taken_until_it_lies_in_a_shard(buffer):
    rows = buffer.add_episode("e0", steps=300) + buffer.add_episode("e1", OTHER, steps=300)
    assert rows == [1, 2, 3, 4, 5, 6, 7, 8]
    buffer.check()
    ledger, reader = buffer.place.open_reader()
    buffer.check(store=reader)
    assert set(buffer.where().values()) == {"journal"}
    done = seal(buffer.store, 2000, force=True)
    assert (done.shards, done.segments, done.rows) == (2, 8, 600)
    assert "journal" not in buffer.where().values()
    buffer.check()
    buffer.check(store=reader)
    assert set(reader.read(rows).segments) == set(rows)
    buffer.reopen()
    buffer.check()
    ledger.close()


def test_a_segment_comes_twice_and_is_stored_once(local):
    segments = fake_episode(SPEC, "e", steps=160)
    assert [put(local.store, segment) for segment in segments] == [1, 2]
    assert [put(local.store, segment) for segment in segments] == [None, None]
    local.reopen()
    assert put(local.store, segments[0]) is None
    assert len(local.ledger.segments_after(0)) == 2


def test_the_ledger_has_the_size_and_hash_of_the_canonical_record(local):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    brought = msgspec.structs.replace(segment, frames={"camera1": segment.frames["camera1"]})
    row = put(local.store, brought)
    empty = CameraFrames(np.zeros(0, np.int64), ())
    whole = msgspec.structs.replace(segment, frames={"camera0": empty, "camera1": segment.frames["camera1"]})
    payload = codec.encode(whole)
    known = local.ledger.segment("e/0")
    assert (known.bytes, known.sha256) == (len(payload), hashlib.sha256(payload).hexdigest())
    assert same_segment(local.store.read([row]).segments[row], whole)


def test_what_may_not_be_stored_leaves_no_row(local):
    (segment,) = fake_episode(SPEC, "e", steps=20)
    stranger = msgspec.structs.replace(segment.episode, spec_hash="0123456789abcdef")
    with pytest.raises(InvalidDataError, match="say hello"):
        put(local.store, msgspec.structs.replace(segment, episode=stranger))
    large = {**segment.frames, "camera0": CameraFrames(np.arange(2), (bytes(33 << 20),) * 2)}
    with pytest.raises(InvalidDataError, match="Close segments more often"):
        put(local.store, msgspec.structs.replace(segment, frames=large))
    assert local.ledger.totals().newest_row == 0
    assert put(local.store, segment) == 1


def test_canonical_has_every_camera_in_order():
    spec = fake_spec(2, size=16)
    (segment,) = fake_episode(spec, "e", steps=10)
    assert canonical(segment, spec) is segment
    turned = msgspec.structs.replace(
        segment,
        frames={"camera1": segment.frames["camera1"]},
        frame_times_ns=dict(reversed(segment.frame_times_ns.items())),
    )
    found = canonical(turned, spec)
    assert list(found.frames) == list(found.frame_times_ns) == ["camera0", "camera1"]
    assert found.frames["camera0"].encoded == () and found.frames["camera0"].times_ns.dtype == np.int64
    assert found.frames["camera1"] is segment.frames["camera1"]
    for wrong in ({"frames": {"other": segment.frames["camera1"]}}, {"frame_times_ns": {}}):
        with pytest.raises(InvalidDataError, match=r"\['camera0', 'camera1'\]"):
            canonical(msgspec.structs.replace(segment, **wrong), spec)


def test_any_values_come_back_to_the_last_bit(tmp_path):
    """Zeros of both signs, what is no number, no steps, no frames, a robot without state, cameras of strange names."""
    spec = fake_spec(4, state_dim=0, size=8)
    names = ("observation.images/left hand", "..", "zarr.json", "ö")
    cameras = tuple(msgspec.structs.replace(c, name=name) for c, name in zip(spec.cameras, names, strict=True))
    spec = msgspec.structs.replace(spec, cameras=cameras)
    buffer = Buffer(BufferLocation(tmp_path / "data"))
    buffer.ledger.see_robot("r1", spec, "clock", 1)
    first, second, third = fake_episode(spec, "e", steps=120, segment_steps=40)
    odd = np.float32([-0.0, 0.0, np.nan, -np.inf])
    second = msgspec.structs.replace(second, executed=np.tile(odd, (40, 1)), reward=np.tile(odd[:2], 20))
    arrays = {
        name: getattr(third, name)[:0]
        for name in third.__struct_fields__
        if isinstance(getattr(third, name), np.ndarray)
    }
    seen = {camera: times[:0] for camera, times in third.frame_times_ns.items()}
    third = msgspec.structs.replace(third, **arrays, frame_times_ns=seen, frames={})
    buffer.add([first, second])
    row = put(buffer.store, third)
    buffer.segments[row] = canonical(third, spec)
    for _ in range(2):
        buffer.check()
        seal(buffer.store, 2000, force=True)
    assert "journal" not in buffer.where().values()
    assert sorted(path.name for path in (tmp_path / "data" / "store").iterdir()) == sorted(
        [spec.hash, "store.json", ".writing"]
    )
    buffer.ledger.close()


def test_what_was_stored_by_another_protocol_version_is_read(local, monkeypatch):
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", codec.PROTOCOL_VERSION + 1)
    rows = local.add_episode("e", steps=160)
    monkeypatch.undo()
    local.check(rows)
    seal(local.store, 2000, force=True)
    local.check(rows)


def test_a_shard_of_another_ledger_is_refused(local):
    rows = local.add_episode("e", steps=160)
    seal(local.store, 2000, force=True)
    (shard,) = local.ledger.shards()
    records = [codec.encode(segment) for segment in fake_episode(SPEC, "f", steps=160, seed=9)]
    local.store.objects.put(shard_key(SPEC.hash, shard.number), encode_shard(records))
    damaged = local.store.read(rows).damaged
    assert set(damaged) == set(rows) and "Ledger and store must be of one backup" in damaged[rows[0]]


def test_rows_that_nobody_knows_are_absent(local):
    rows = local.add_episode("e", steps=80)
    found = local.store.read([*rows, 77, *rows])
    assert list(found.segments) == rows and found.damaged == {}
    assert local.store.read([]).segments == {}


def test_leftovers_of_a_crash_go_when_the_next_writer_opens(buffer):
    rows = buffer.add_episode("e0", steps=160)
    before = sorted(buffer.store.objects.list())
    # a shard that was written but never committed
    number = buffer.ledger.reserve_shard(SPEC.hash, 5)
    buffer.store.objects.put(shard_key(SPEC.hash, number), encode_shard([b"record"]))
    # one of which deleting had begun
    seal(buffer.store, 2000, force=True)
    (sealed,) = {place.shard for place in buffer.ledger.places(rows).values()}
    buffer.ledger.prune(["e0"], 7)
    buffer.ledger.mark_dropping(SPEC.hash, sealed)
    buffer.store.objects.delete(shard_key(SPEC.hash, sealed))
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
    seal(buffer.store, 3000, force=True)
    buffer.check(fresh)


def test_a_store_of_another_format_is_refused(local):
    local.store.objects.put("store.json", b'{"format": 9}')
    local.ledger.close()
    with pytest.raises(StorageError, match=r"format 9, this vla-fleet reads format 3"):
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
        lambda: (seal(local.store, 2000, force=True), local.reopen()),
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
    from cloud_learner.buffer.maintenance.compact import drop_dead, rewrite

    with buffer.ledger.exclusive(wait_s=5):
        rewrite(buffer.store, SPEC.hash, list(buffer.ledger.places(rows).values()), 9)
    drop_dead(buffer.store)


@pytest.mark.slow
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
        seal(local.store, 2000, force=n % 2 == 0)
    stop.set()
    for thread in readers:
        thread.join()
    assert failures == []
    local.check()
    ledger.close()


def test_a_journal_of_another_machine_is_no_damage(local, tmp_path):
    rows = local.add_episode("e0", steps=160)
    there = BufferLocation(tmp_path / "other", store=local.place.store_location)
    store = SegmentStore(there.journal, LocalObjects(tmp_path / "data" / "store"), local.ledger)
    found = store.read(rows)
    assert found.elsewhere == tuple(rows) and found.segments == {} and found.damaged == {}
    # and whoever seals there leaves it alone
    assert seal(store, 5000, force=True).shards == 0
    seal(local.store, 5000, force=True)
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
                put(local.store, segment)
    local.check(rows)
    local.add([segment])
    local.check()


@pytest.fixture
def small_disk(tmp_path):
    """A directory that holds 3 MB and no more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_really_full(small_disk):
    buffer = Buffer(BufferLocation(small_disk / "data"))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    for number in range(1000):
        try:
            buffer.add_episode(f"e{number}", steps=320)
        except DiskFullError:
            break
    taken = dict(buffer.segments)
    assert len(taken) > 20
    for _ in range(3):
        with pytest.raises(DiskFullError):
            seal(buffer.store, 2000, force=True)
        buffer.check()
    # somebody makes a little room: what was begun goes, and sealing gives more room than it takes
    ballast.unlink()
    buffer.reopen()
    assert len(buffer.ledger.segments_after(0, limit=10**6)) == len(taken)
    buffer.check()
    done = seal(buffer.store, 2000, force=True)
    assert done.segments == len(taken)
    buffer.check()
    buffer.add_episode("afterwards", steps=80)
    buffer.check()
    buffer.ledger.close()


def test_what_a_reader_opens_must_be_there(tmp_path):
    with pytest.raises(StorageError):
        BufferLocation(tmp_path / "nothing").open_reader()
    assert not (tmp_path / "nothing").exists()
