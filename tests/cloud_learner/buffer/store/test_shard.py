import google_crc32c
import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numcodecs import zstd
from zarr.buffer.cpu import Buffer as CPUBuffer
from zarr.storage import MemoryStore

from cloud_learner.buffer.store.objects import RemoteObjects, open_objects
from cloud_learner.buffer.store.shard import FORMAT, SHARD_BYTES, encode_shard, metadata, read_spans, shard_key
from tests.cloud_learner.buffer.stored import WatchedRequests, as_zarr
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment
from wire import codec
from wire.errors import CorruptDataError

pytest_plugins = ["tests.s3"]

SPEC = fake_spec(2, size=16)
KEY = shard_key(SPEC.hash, 3)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def objects(request, tmp_path):
    if request.param == "local":
        return open_objects(tmp_path / "store")
    return open_objects(request.getfixturevalue("s3"))


def _records(sizes, seed=0):
    """Records of these sizes that do not compress."""
    chance = np.random.default_rng(seed)
    return [chance.bytes(size) for size in sizes]


def _spans(records):
    ends = np.cumsum([len(record) for record in records]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _read(objects, spans):
    return read_spans(objects, [(KEY, first, end) for first, end in spans])


def test_what_is_read_is_what_was_written(objects):
    records = _records([1, 700_000, 0, 262_143, 5, 300_000, 200_000, 90])
    objects.put(KEY, encode_shard(records))
    spans = _spans(records)
    chance = np.random.default_rng(1)
    for wanted in ([*range(len(records))], [1], [0, 7], [6, 1], chance.permutation(len(records))[:4].tolist()):
        assert _read(objects, [spans[n] for n in wanted]) == [records[n] for n in wanted]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 400_000), st.sampled_from([b"\0", b"ab"])), min_size=1, max_size=5))
def test_records_of_any_size_and_zeros_come_back(tmp_path, parts):
    """A chunk of nothing but zeros is not in the object at all."""
    records = [b"x", *(content * size for size, content in parts)]
    objects = open_objects(tmp_path)
    objects.put(KEY, encode_shard(records))
    assert _read(objects, _spans(records)) == records


def test_zarr_reads_the_same_from_the_same_objects(objects):
    segments = fake_episode(SPEC, "e", steps=500)
    records = [codec.encode(segment) for segment in segments]
    objects.put(KEY, encode_shard(records))
    for key, data in metadata(SPEC).items():
        objects.put(key, data)
    group = zarr.open_group(as_zarr(objects), path=SPEC.hash, mode="r")
    assert group.attrs["format"] == FORMAT
    assert msgspec.convert(group.attrs["spec"], type(SPEC)) == SPEC
    begin = 3 * SHARD_BYTES
    for (first, end), record, segment in zip(_spans(records), records, segments, strict=True):
        read = bytes(group["records"][begin + first : begin + end])
        assert read == record and same_segment(codec.decode(read), segment)
    assert not group["records"][begin + end : begin + end + 1000].any()
    # a shard that was never written
    assert not group["records"][begin - 1000 : begin].any()


def test_the_object_is_the_one_that_zarr_would_write():
    records = [*_records([700_000]), b"\0" * 600_000, b"x" * 300_000]
    files = {key.removeprefix(f"{SPEC.hash}/"): CPUBuffer.from_bytes(data) for key, data in metadata(SPEC).items()}
    data = np.frombuffer(b"".join(records), np.uint8)
    begin = 3 * SHARD_BYTES
    zarr.open_group(MemoryStore(files), mode="r+")["records"][begin : begin + len(data)] = data
    assert files["records/c/3"].to_bytes() == bytes(encode_shard(records))


def test_the_same_records_give_the_same_bytes():
    records = _records([1000, 400_000])
    assert encode_shard(records) == encode_shard(records)
    assert metadata(SPEC) == metadata(msgspec.structs.replace(SPEC))


def test_a_shard_takes_as_much_as_it_says(tmp_path):
    objects = open_objects(tmp_path)
    records = [b"a" * (SHARD_BYTES - 1), b"b"]
    objects.put(KEY, encode_shard(records))
    assert _read(objects, _spans(records)) == records


def test_records_of_several_shards_are_asked_for_together(tmp_path, monkeypatch):
    objects, requests = RemoteObjects(f"file://{tmp_path}"), WatchedRequests(monkeypatch)
    records = {shard_key(SPEC.hash, number): _records([300_000] * 12, seed=number) for number in range(3)}
    for key, some in records.items():
        objects.put(key, encode_shard(some))
    spans = [(key, *span) for key, some in records.items() for span in _spans(some)]
    wanted = [*range(0, 36, 3), 1]
    every = [record for some in records.values() for record in some]
    assert read_spans(objects, [spans[n] for n in wanted]) == [every[n] for n in wanted]
    # the indexes at once, then what is needed of each shard
    asked = requests.pop()
    assert len(asked) == 6
    assert {key for key, first, _ in asked[:3] if first == 0} == {key for key, _, _ in asked[3:]} == set(records)


def test_damage_is_noticed_and_only_where_it_is(tmp_path):
    objects = open_objects(tmp_path)
    records = _records([100_000] * 20)
    spans, good = _spans(records), bytes(encode_shard(records))
    chance = np.random.default_rng(0)
    untouched = 0
    for _ in range(20):
        at = int(chance.integers(len(good)))
        torn, changed = good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        for bad in (torn, changed):
            objects.put(KEY, bad)
            with pytest.raises(CorruptDataError, match=rf"{KEY}( ends|: a chunk)"):
                _read(objects, spans)
            for span, record in zip(spans, records, strict=True):
                try:
                    assert _read(objects, [span]) == [record]
                except CorruptDataError:
                    continue
                untouched += 1
    assert untouched > 300
    objects.delete(KEY)
    with pytest.raises(CorruptDataError, match="is gone"):
        _read(objects, spans)
    objects.put(KEY, good)
    assert _read(objects, spans) == records


def _object(chunk, index=None):
    """An object with one chunk, whose index and checksums are right, as somebody would make it who means harm."""

    def checked(data):
        return data + google_crc32c.value(data).to_bytes(4, "little")

    chunks = SHARD_BYTES // (256 * 1024)
    begin = 16 * chunks + 4
    table = np.full((chunks, 2), 2**64 - 1, "<u8")
    table[0] = index or (begin, len(chunk) + 4)
    return checked(table.tobytes()) + checked(chunk)


def _claiming(size):
    """A frame of zstd that says it unpacks to so many bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_object(_claiming(2**40)), f"a chunk of it has {2**40} bytes"),
        (_object(_claiming(256 * 1024)), "cannot be unpacked"),
        (_object(zstd.compress(bytes(2**26), 19)), f"a chunk of it has {2**26} bytes"),
        (_object(zstd.compress(bytes(256 * 1024)) + zstd.compress(bytes(2**26))), "cannot be unpacked"),
        (_object(zstd.compress(b"x")), "a chunk of it has 1 bytes"),
        (_object(b""), "a chunk of it has 0 bytes"),
        (_object(b"x", (4100, 2**40)), "chunk 0 cannot be the 1099511627776 bytes"),
        (_object(b"x", (2**60, 10)), "chunk 0 cannot be the 10 bytes"),
        (_object(b"x", (0, 10)), "chunk 0 cannot be the 10 bytes"),
    ],
)
def test_what_an_object_claims_is_not_allocated(tmp_path, data, message):
    objects = open_objects(tmp_path)
    objects.put(KEY, data)
    with pytest.raises(CorruptDataError, match=f"{KEY}: .*{message}"):
        _read(objects, [(0, 10)])


@pytest.mark.parametrize("span", [(0, 2**60), (-1, 10), (10, 5), (2**62, 2**62 + 1)])
def test_what_the_ledger_claims_is_not_allocated(tmp_path, span):
    with pytest.raises(CorruptDataError, match="the ledger says"):
        _read(open_objects(tmp_path), [span])
