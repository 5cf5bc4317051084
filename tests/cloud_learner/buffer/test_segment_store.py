import errno
import os

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr.storage import ZipStore

from cloud_learner.buffer.fake import fake_episode, fake_spec, same_segment
from cloud_learner.buffer.files import TEMPORARY
from cloud_learner.buffer.store import SegmentStore, decode_segment, encode_segment, segment_path
from wire.errors import Corrupt, DiskFull, InvalidData, NotWritable, StorageError
from wire.messages import CameraFrames


def _everything(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("cameras", [0, 1, 3])
def test_what_is_read_is_what_was_written(tmp_path, cameras):
    store = SegmentStore.open(tmp_path / "segments")
    for segment in fake_episode(fake_spec(cameras), "r1-7", steps=170, seed=cameras):
        stored = store.write(segment)
        assert same_segment(store.read(stored.path, stored.sha256), segment)
        assert stored.bytes == (store.root / stored.path).stat().st_size
    assert len(_everything(store.root)) == 3


def test_the_file_is_a_plain_zarr_store(tmp_path):
    store = SegmentStore.open(tmp_path)
    (segment,) = fake_episode(fake_spec(), "e", steps=40)
    stored = store.write(segment)
    with ZipStore(tmp_path / stored.path, mode="r") as files:
        group = zarr.open_group(files, mode="r")
        assert group.metadata.zarr_format == 3
        assert (group["state"][...] == segment.state).all()
        offsets = group["jpeg_offsets"][...]
        first = group["jpeg"][offsets[0] : offsets[1]].tobytes()
        assert first == segment.frames["camera0"].encoded[0]
        assert group.attrs["episode"]["task"] == "drawer-open"


_floats = hnp.arrays(np.float32, (5, 4), elements=st.floats(width=32))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    state=_floats,
    actor=hnp.arrays(np.uint8, 5),
    delay=hnp.arrays(np.int16, 5),
    images=st.lists(st.binary(max_size=20), max_size=4),
    closed_ns=st.integers(-(2**63), 2**63 - 1),
    task=st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
)
def test_any_values_come_back_to_the_last_bit(state, actor, delay, images, closed_ns, task):
    (segment,) = fake_episode(fake_spec(), "e", steps=5)
    frames = {"camera0": CameraFrames(np.arange(len(images), dtype=np.int64), tuple(images))}
    episode = msgspec.structs.replace(segment.episode, task=task)
    segment = msgspec.structs.replace(
        segment, state=state, actor=actor, delay_ticks=delay, frames=frames, closed_ns=closed_ns, episode=episode
    )
    data = encode_segment(segment)
    assert same_segment(decode_segment(data), segment)
    assert encode_segment(segment) == data


def test_zeros_of_both_signs_and_no_steps_at_all(tmp_path):
    spec = fake_spec()
    (segment,) = fake_episode(spec, "e", steps=8)
    negative = msgspec.structs.replace(segment, state=np.full((8, 4), -0.0, np.float32))
    assert same_segment(decode_segment(encode_segment(negative)), negative)
    empty = {
        name: getattr(segment, name)[:0]
        for name in segment.__struct_fields__
        if isinstance(getattr(segment, name), np.ndarray)
    }
    seen = {camera: times[:0] for camera, times in segment.frame_times_ns.items()}
    nothing = msgspec.structs.replace(segment, **empty, frame_times_ns=seen, frames={})
    assert same_segment(decode_segment(encode_segment(nothing)), nothing)


@pytest.mark.parametrize(
    "name", ["..", "../../etc", "a/b", "/abs", "", ".hidden", "a..b", "a\0b", "x" * 200, "a.part", "é"]
)
def test_a_name_cannot_leave_the_directory(tmp_path, name):
    store = SegmentStore.open(tmp_path / "deep" / "segments")
    (segment,) = fake_episode(fake_spec(), "e", steps=4)
    for field in ("id", "spec_hash"):
        episode = msgspec.structs.replace(segment.episode, **{field: name})
        bad = msgspec.structs.replace(segment, id=f"{episode.id}/0", episode=episode)
        with pytest.raises(InvalidData, match="file name"):
            store.write(bad)
    with pytest.raises(InvalidData, match="is not number"):
        segment_path(msgspec.structs.replace(segment, id="e/1"))
    assert _everything(tmp_path) == []


def test_every_torn_or_changed_file_is_noticed(tmp_path):
    store = SegmentStore.open(tmp_path)
    (segment,) = fake_episode(fake_spec(), "e", steps=10)
    stored = store.write(segment)
    path = tmp_path / stored.path
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(20):
        at = int(rng.integers(len(good)))
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(Corrupt, match=r"000000\.zarr\.zip"):
                store.read(stored.path, stored.sha256)
    path.unlink()
    with pytest.raises(Corrupt, match="is gone"):
        store.read(stored.path, stored.sha256)


def test_bytes_that_are_no_segment_are_refused():
    (segment,) = fake_episode(fake_spec(), "e", steps=10)
    good = encode_segment(segment)
    for bad in (b"", b"PK", good[: len(good) // 2], good.replace(b'"format": 1', b'"format": 9')):
        with pytest.raises(InvalidData):
            decode_segment(bad)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EACCES, NotWritable), (errno.EIO, StorageError)],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_nothing_behind(tmp_path, monkeypatch, code, kind, call):
    store = SegmentStore.open(tmp_path)
    (segment,) = fake_episode(fake_spec(), "e", steps=10)
    store.write(segment)
    before = _everything(tmp_path)
    (other,) = fake_episode(fake_spec(), "e2", steps=10)

    def fail(*_args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(kind):
            store.write(other)
    assert _everything(tmp_path) == before
    stored = store.write(other)
    assert same_segment(store.read(stored.path, stored.sha256), other)


def test_leftovers_go_at_open_and_orphans_are_overwritten(tmp_path):
    store = SegmentStore.open(tmp_path)
    (segment,) = fake_episode(fake_spec(), "e", steps=10)
    stored = store.write(segment)
    path = tmp_path / stored.path
    # an orphan: a power cut tore what was never committed, and a temporary lies beside it
    path.write_bytes(b"half")
    (path.parent / (path.name + TEMPORARY)).write_bytes(b"half")
    store = SegmentStore.open(tmp_path)
    assert _everything(tmp_path) == [stored.path]
    assert store.write(segment) == stored
    assert same_segment(store.read(stored.path, stored.sha256), segment)
