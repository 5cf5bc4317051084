import errno
import logging
import os
from pathlib import Path

import pytest

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.maintenance.stats import collect, render
from cloud_learner.buffer.maintenance.verify import verify
from cloud_learner.buffer.store import range_cache
from cloud_learner.buffer.store.objects import RemoteObjects
from cloud_learner.buffer.store.range_cache import RangeCache
from cloud_learner.buffer.store.shard import encode_shard, shard_key
from tests.cloud_learner.buffer.stored import OTHER, SPEC, Buffer, WatchedRequests
from tests.cloud_learner.buffer.synthetic import fake_episode
from wire import codec
from wire.errors import StorageError

MB = 1_000_000


@pytest.fixture
def requests(monkeypatch):
    return WatchedRequests(monkeypatch)


@pytest.fixture
def remote(tmp_path, requests):
    """Two sealed episodes of two robots in an object store, of which readers keep what they read."""
    (tmp_path / "bucket").mkdir()
    buffer = Buffer(BufferLocation(tmp_path / "data", store=f"file://{tmp_path}/bucket", cache_bytes=50 * MB))
    buffer.add_episode("e0", steps=320)
    buffer.add_episode("e1", OTHER, steps=320)
    seal(buffer.store, 2000, force=True)
    requests.pop()
    yield buffer
    buffer.ledger.close()


@pytest.fixture
def reader(remote):
    ledger, store = remote.place.open_reader()
    yield store
    ledger.close()


def _parts(remote):
    return sorted((remote.place.data / "cache").iterdir())


def test_the_parts_read_last_stay_below_the_cap(tmp_path, requests):
    cache = RangeCache(tmp_path / "cache", 1000)
    assert cache.used_bytes == 0
    spans = [("a/b", n, n + 100) for n in range(11)]
    for age, span in enumerate(spans[:10]):
        cache.put(span, bytes([age]) * 100)
        os.utime(tmp_path / "cache" / f"a_b_{span[1]}-{span[2]}", ns=(age, age))
    assert cache.used_bytes == 1000
    assert cache.get(spans[0]) == bytes(100)
    cache.put(spans[10], bytes(100))
    assert [cache.get(span) is not None for span in spans] == [True, False] + 9 * [True]
    assert cache.used_bytes == 1000


def test_several_share_a_directory_and_another_begins_with_what_is_there(tmp_path, requests):
    first, second = RangeCache(tmp_path, 3200), RangeCache(tmp_path, 3200)
    for n in range(200):
        (first, second)[n % 2].put(("k", 1000 + n, 1050 + n), bytes(50))
        assert RangeCache(tmp_path, 3200).used_bytes <= 3200 + 3200 // 32
    assert first.get(("k", 1199, 1249)) == second.get(("k", 1198, 1248)) == bytes(50)
    assert RangeCache(tmp_path, 3200).get(("k", 1199, 1249)) == bytes(50)


def test_all_of_it_may_be_deleted_at_any_time(tmp_path, requests, monkeypatch):
    cache, replace = RangeCache(tmp_path / "cache", MB), Path.replace
    cache.put(("k", 0, 4), b"1234")

    def clear(self, target):
        self.unlink()
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", clear)
        cache.put(("k", 4, 8), b"5678")
    (tmp_path / "cache" / "k_0-4").unlink()
    (tmp_path / "cache").rmdir()
    assert cache.get(("k", 0, 4)) is None
    cache.put(("k", 4, 8), b"5678")
    assert cache.get(("k", 4, 8)) == b"5678"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_ends_it_with_one_warning_and_what_is_there_serves_on(
    tmp_path, requests, monkeypatch, caplog, code
):
    cache = RangeCache(tmp_path, MB)
    cache.put(("k", 0, 4), b"1234")

    def full(self, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", full)
    for n in (4, 8):
        cache.put(("k", n, n + 4), b"5678")
    assert cache.get(("k", 0, 4)) == b"1234" and cache.get(("k", 4, 8)) is None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path) in warning and "cache_bytes in buffer.json" in warning and os.strerror(code) in warning


def test_a_disk_that_is_nearly_full_is_left_to_others(tmp_path, requests, monkeypatch, caplog):
    cache = RangeCache(tmp_path, 3200)
    for n in range(20):
        cache.put(("k", n, n + 100), bytes(100))
    monkeypatch.setattr(range_cache, "spare_bytes", lambda path: -500)
    cache.put(("k", 20, 120), bytes(100))
    assert cache.used_bytes == 1500 and cache.get(("k", 20, 120)) == bytes(100)
    monkeypatch.setattr(range_cache, "spare_bytes", lambda path: -5000)
    cache.put(("k", 21, 121), bytes(100))
    assert cache.used_bytes == 0 and "No space left" in caplog.text


def test_what_was_read_is_not_fetched_again_by_anybody(remote, reader, requests):
    remote.check(store=reader)
    assert len(requests.pop()) == 4  # the index and the records of each shard
    remote.check(store=reader)
    ledger, other = remote.place.open_reader()
    remote.check(store=other)
    remote.check([1], other)
    assert requests.pop() == []
    ledger.close()
    # who writes keeps nothing
    remote.check()
    assert len(requests.pop()) == 4


def test_shards_of_an_object_store_are_asked_for_together(remote, reader, monkeypatch):
    read, asked = reader.objects.read, []

    def watched(spans, cached=True):
        asked.append({key for key, _, _ in spans})
        return read(spans, cached)

    monkeypatch.setattr(reader.objects, "read", watched)
    remote.check(store=reader)
    # the indices, then the records: each request takes its time
    assert len(asked) == 2 and asked[0] == asked[1] == {shard_key(OTHER.hash, 0), shard_key(SPEC.hash, 0)}


def test_what_is_kept_is_read_while_the_store_does_not_answer(remote, reader, requests):
    remote.check([1, 2], reader)
    requests.down = True
    remote.check([1, 2], reader)
    with pytest.raises(StorageError, match=r"file://.*bucket.*after 1 retries.*Check the network"):
        reader.read([1, 8])
    requests.down = False
    remote.check(store=reader)


@pytest.mark.parametrize("harm", ["shorter", "longer", "changed", "empty"])
def test_a_damaged_part_is_fetched_again(remote, reader, requests, harm):
    remote.check(store=reader)
    requests.pop()
    for path in _parts(remote):
        data = path.read_bytes()
        at = len(data) // 2
        path.write_bytes(
            {
                "shorter": data[:at],
                "longer": data + b"x",
                "changed": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                "empty": b"",
            }[harm]
        )
    remote.check(store=reader)
    assert requests.pop()
    remote.check(store=reader)
    assert requests.pop() == []


def test_parts_of_what_lay_there_before_are_fetched_again(remote, reader):
    """The store was set up anew, and the cache was not deleted: each part is whole, and of something else."""
    (number,) = {place.shard for place in remote.ledger.places([1]).values()}
    records = [codec.encode(segment) for segment in fake_episode(SPEC, "f", steps=320, seed=9)]
    before, key = remote.store.objects.get(shard_key(SPEC.hash, number)), shard_key(SPEC.hash, number)
    remote.store.objects.put(key, encode_shard(records))
    assert set(reader.read([1, 2, 3, 4]).damaged) == {1, 2, 3, 4}
    remote.store.objects.put(key, before)
    remote.check(store=reader)


def test_verify_looks_at_the_store_itself(remote, reader):
    remote.check(store=reader)
    (number,) = {place.shard for place in remote.ledger.places([1]).values()}
    key = shard_key(SPEC.hash, number)
    remote.store.objects.put(key, remote.store.objects.get(key)[:-1000])
    assert sum(finding.row > 0 for finding in verify(reader)) >= 1


def test_stats_say_what_is_kept(remote, reader):
    remote.check(store=reader)
    used = sum(path.stat().st_size for path in _parts(remote))
    found = collect(reader)
    assert (found.cache_bytes, found.cache_cap_bytes) == (used, 50 * MB)
    assert f"{used / 1e6:,.1f} MB of the object store are kept on this disk, of 50 MB" in render(found)
    assert collect(remote.store).cache_cap_bytes == 0
    assert "object store" not in render(collect(remote.store))


def test_without_a_cache_nothing_is_kept(tmp_path, remote, requests):
    there = BufferLocation(remote.place.data, store=remote.place.store)
    ledger, store = there.open_reader()
    assert isinstance(store.objects, RemoteObjects) and store.objects.cache is None
    remote.check(store=store)
    assert not (remote.place.data / "cache").exists()
    ledger.close()
