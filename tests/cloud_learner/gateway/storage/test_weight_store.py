import errno
import hashlib
import os

import msgspec
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.gateway.storage.weight_store import MAX_PART_BYTES, WeightStore
from tests import samples
from wire.errors import CorruptDataError, DiskFullError, RejectedError
from wire.messages.gateway import FetchWeights, Publish, WeightBytes
from wire.types import PolicyVersion

replace = msgspec.structs.replace


@pytest.fixture
def ledger(tmp_path):
    return Ledger.open(tmp_path / "ledger.sqlite")


@pytest.fixture
def store(tmp_path, ledger):
    return WeightStore.open(tmp_path / "weights", ledger)


def _weights(number, size=1000):
    data = samples.weights(number, size)
    return data, PolicyVersion(number, hashlib.sha256(data).hexdigest(), size, number - 1, 10 * number, 5, 3, 99)


def _parts(number, data, size=300):
    return [WeightBytes(number, at, data[at : at + size]) for at in range(0, len(data), size)]


def _publish(store, number, size=1000):
    data, version = _weights(number, size)
    assert store.begin(Publish(version)) is None
    done = [store.receive(part) for part in _parts(number, data)]
    assert done[:-1] == [None] * (len(done) - 1)
    assert done[-1] == version
    return data, version


def _names(tmp_path):
    return sorted(path.name for path in (tmp_path / "weights").glob("*") if path.suffix != ".manifest")


def test_a_version_is_published_in_parts_and_fetched_in_ranges(tmp_path, store, ledger):
    data, version = _publish(store, 1)
    assert _names(tmp_path) == [f"1-{version.sha256[:12]}.safetensors"]
    assert (tmp_path / "weights" / _names(tmp_path)[0]).read_bytes() == data
    assert ledger.newest_version().version == version
    fetched = b""
    while len(fetched) < len(data):
        part = store.serve(FetchWeights(1, len(fetched), 170))
        assert part.offset == len(fetched)
        fetched += part.data
    assert fetched == data
    _publish(store, 2)
    assert [row.version.number for row in ledger.versions()] == [1, 2]


def test_one_answer_carries_no_more_than_the_cap(store):
    data, _ = _publish(store, 1, MAX_PART_BYTES + 10)
    assert len(store.serve(FetchWeights(1, 0, 10**12)).data) == MAX_PART_BYTES
    assert store.serve(FetchWeights(1, MAX_PART_BYTES, 10**12)).data == data[MAX_PART_BYTES:]


def test_to_publish_again_changes_nothing(tmp_path, store):
    data, version = _publish(store, 1)
    assert store.begin(Publish(version)) == version
    # the trainer sends the parts before it hears that they are not needed
    assert [store.receive(part) for part in _parts(1, data)] == [None] * 4
    assert len(_names(tmp_path)) == 1
    other = replace(version, sha256="0" * 64)
    with pytest.raises(RejectedError, match="publish it as 2"):
        store.begin(Publish(other))


@pytest.mark.parametrize(
    "change",
    [{"number": 2}, {"number": 0}, {"number": -1}, {"sha256": "../../x"}, {"sha256": "G" * 64}, {"size_bytes": 0}],
)
def test_an_offer_that_cannot_be_is_refused(tmp_path, store, change):
    _, version = _weights(1)
    with pytest.raises(RejectedError):
        store.begin(Publish(replace(version, **change)))
    assert _names(tmp_path) == []


def test_parts_must_come_in_order_and_match(tmp_path, store, ledger):
    data, version = _weights(1)
    parts = _parts(1, data)
    with pytest.raises(RejectedError, match="not offered"):
        store.receive(parts[0])
    for wrong, says in (
        ([parts[0], parts[2]], "byte 300 expected"),
        ([parts[1]], "byte 0 expected"),
        ([*parts[:-1], WeightBytes(1, 900, b"x" * 101)], "longer"),
        ([*parts[:-1], WeightBytes(1, 900, b"x" * 100)], "sha256"),
        ([WeightBytes(2, 0, b"x")], "version 2"),
    ):
        store.begin(Publish(version))
        with pytest.raises(RejectedError, match=says):
            for part in wrong:
                store.receive(part)
        assert ledger.versions() == ()
    # an unfinished upload gives way to a new one
    store.begin(Publish(version))
    store.receive(parts[0])
    _publish(store, 1)
    assert len(_names(tmp_path)) == 1


def test_unknown_versions_and_ranges_are_refused(store):
    with pytest.raises(RejectedError, match="no policy version 1; the newest is 0"):
        store.serve(FetchWeights(1, 0, 10))
    _publish(store, 1)
    for offset, size in ((1000, 1), (-1, 5), (0, 0), (0, -3)):
        with pytest.raises(RejectedError, match="no bytes"):
            store.serve(FetchWeights(1, offset, size))


def test_a_full_disk_gives_up_the_upload_and_leaves_nothing(tmp_path, store, ledger, monkeypatch):
    data, version = _weights(1)
    store.begin(Publish(version))

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match="version 1"):
            for part in _parts(1, data):
                store.receive(part)
    assert _names(tmp_path) == []
    assert ledger.versions() == ()
    _publish(store, 1)


def test_a_restart_forgets_what_was_half_sent_and_keeps_what_was_whole(tmp_path, store, ledger):
    data, _ = _publish(store, 1)
    second, next_version = _weights(2, 4_000_000)
    store.begin(Publish(next_version))
    store.receive(_parts(2, second, 3_000_000)[0])
    assert len(_names(tmp_path)) == 2
    store = WeightStore.open(tmp_path / "weights", ledger)
    assert len(_names(tmp_path)) == 1
    assert store.serve(FetchWeights(1, 0, 2000)).data == data
    _publish(store, 2)


def test_what_was_received_and_never_committed_goes_once_another_version_has_its_number(
    tmp_path, store, ledger, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*given):
        raise Killed

    data, version = _weights(1, 900)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "commit_version", killed)
        store.begin(Publish(version))
        with pytest.raises(Killed):
            for part in _parts(1, data):
                store.receive(part)
    left = _names(tmp_path)
    again = WeightStore.open(tmp_path / "weights", ledger)
    assert _names(tmp_path) == left != [], "the trainer may publish just that"
    _, second = _publish(again, 1)
    assert len(_names(tmp_path)) == 2
    WeightStore.open(tmp_path / "weights", ledger)
    assert _names(tmp_path) == [f"1-{second.sha256[:12]}.safetensors"]
    assert len(list((tmp_path / "weights").iterdir())) == 2, "and its manifest"


def test_a_torn_file_is_noticed(tmp_path, store):
    _publish(store, 1)
    path = tmp_path / "weights" / _names(tmp_path)[0]
    path.write_bytes(b"short")
    with pytest.raises(CorruptDataError, match="safetensors"):
        store.serve(FetchWeights(1, 0, 2000))
    path.unlink()
    with pytest.raises(RejectedError, match="gone"):
        store.serve(FetchWeights(1, 0, 2000))
