import hashlib
import json

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloud_learner.buffer.ledger.rows import Place
from cloud_learner.buffer.store import arrays
from cloud_learner.buffer.store.gather import read_segments
from cloud_learner.buffer.store.objects import open_objects, put_all
from cloud_learner.buffer.store.shard import Room, ShardItem, canonical, encode_shard, require_room
from cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment
from wire import codec
from wire.errors import CorruptDataError, InvalidDataError
from wire.messages.gateway import CameraFrames

pytest_plugins = ["tests.s3"]

NUMBER = 3


def _items(segments, spec):
    found = []
    for row, segment in enumerate(segments, start=1):
        whole = canonical(segment, spec)
        found.append(ShardItem(row, hashlib.sha256(codec.encode(whole)).hexdigest(), whole))
    return found


def _stored(objects, spec, items, number=NUMBER):
    encoded = encode_shard(spec, number, items)
    put_all(objects, encoded.objects.items())
    put_all(objects, encoded.metadata.items())
    return encoded, _places(spec, items, encoded, number)


def _places(spec, items, encoded, number=NUMBER):
    return [
        Place(
            row=item.row,
            id=item.segment.id,
            episode=item.segment.episode.id,
            index=item.segment.index,
            spec_hash=spec.hash,
            steps=item.segment.steps,
            sha256=item.sha256,
            bytes=0,
            journal=None,
            offset=0,
            shard=number,
            first_row=placed.first_row,
            placed=placed.placed,
            damaged=False,
        )
        for item, placed in zip(items, encoded.placed, strict=True)
    ]


def _without_steps(segment):
    arrays_of_it = {
        name: getattr(segment, name)[:0]
        for name in segment.__struct_fields__
        if isinstance(getattr(segment, name), np.ndarray)
    }
    seen = {camera: times[:0] for camera, times in segment.frame_times_ns.items()}
    return msgspec.structs.replace(segment, **arrays_of_it, frame_times_ns=seen, frames={})


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def objects(request, tmp_path):
    if request.param == "local":
        return open_objects(tmp_path / "store")
    return open_objects(request.getfixturevalue("s3"))


@pytest.mark.parametrize("cameras", [0, 1, 3])
def test_what_is_read_is_what_was_written(objects, cameras):
    spec = fake_spec(cameras)
    segments = [segment for n in range(4) for segment in fake_episode(spec, f"e{n}", steps=300, seed=n)]
    items = _items(segments, spec)
    encoded, places = _stored(objects, spec, items)
    assert encoded.rows == 1200
    assert encoded.bytes == sum(len(objects.get(key)) for key in encoded.objects)
    assert set(encoded.objects) <= set(arrays.shard_keys(spec, NUMBER))
    chance = np.random.default_rng(cameras)
    for wanted in ([*range(len(items))], [5], [0, 15], chance.permutation(len(items))[:7].tolist()):
        found = read_segments(objects, spec, NUMBER, [places[n] for n in wanted])
        assert set(found) == {items[n].row for n in wanted}
        assert all(same_segment(found[items[n].row], items[n].segment) for n in wanted)


@pytest.mark.parametrize("cameras", [0, 2])
@pytest.mark.slow
def test_zarr_reads_the_same_from_the_same_objects(objects, cameras):
    spec = fake_spec(cameras, size=32)
    for number in (0, 2):
        items = _items(fake_episode(spec, f"e{number}", steps=700, seed=number), spec)
        _, places = _stored(objects, spec, items, number)
    group = zarr.open_group(objects.zarr(), path=spec.hash, mode="r")
    assert group.attrs["format"] == 2
    assert msgspec.convert(group.attrs["spec"], type(spec)) == spec
    first = 2 * arrays.SHARD_ROWS
    assert group["state"].shape == (first + 700, 4)
    assert not group["state"][arrays.SHARD_ROWS : first].any()
    lines = bytes(group["segments"][2 * arrays.SHARD_FACTS_BYTES :]).splitlines()
    found = read_segments(objects, spec, 2, places)
    assert len(lines) == len(items)
    # an object store answers zarr slowly: the first and the last one there
    for n in range(len(items)) if "s3" not in objects.place else (0, -1):
        item, line = items[n], lines[n]
        facts, segment = json.loads(line), found[item.row]
        rows = slice(facts["first_row"], facts["first_row"] + facts["steps"])
        assert facts["id"] == segment.id and facts["episode"]["task"] == "drawer-open"
        assert facts["sha256"] == item.sha256
        for name, dtype in arrays.STEPS:
            read = group[name][rows]
            assert read.dtype.str == dtype == getattr(segment, name).dtype.str
            assert read.tobytes() == getattr(segment, name).tobytes()
        for c, (camera, where) in enumerate(facts["frames"].items()):
            folder = group[group.attrs["cameras"][camera]]
            first_frame, count, first_byte, size = where
            assert (group["frame_times_ns"][rows, c] == segment.frame_times_ns[camera]).all()
            frames = slice(first_frame, first_frame + count)
            assert (folder["times_ns"][frames] == segment.frames[camera].times_ns).all()
            jpeg = bytes(folder["jpeg"][first_byte : first_byte + size])
            assert jpeg == b"".join(segment.frames[camera].encoded)
            base = first_byte // arrays.SHARD_JPEG_BYTES * arrays.SHARD_JPEG_BYTES
            ends = folder["ends"][frames] + base
            assert ends[-1] == first_byte + size and (np.diff(ends) > 0).all()
    # nothing that zarr does not know lies between its own
    assert {name.split("/")[0] for name, _ in group.members()} >= {"state", "segments"}


def test_the_same_segments_give_the_same_bytes():
    spec = fake_spec(2, size=16)
    items = _items(fake_episode(spec, "e", steps=500), spec)
    first, second = encode_shard(spec, 7, items), encode_shard(spec, 7, items)
    assert first.objects == second.objects and first.metadata == second.metadata


_floats = hnp.arrays(np.float32, (5, 4), elements=st.floats(width=32))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    state=_floats,
    actor=hnp.arrays(np.uint8, 5),
    delay=hnp.arrays(np.int16, 5),
    flags=hnp.arrays(bool, 5),
    images=st.lists(st.binary(max_size=20), max_size=4),
    closed_ns=st.integers(-(2**63), 2**63 - 1),
    task=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    seed=st.integers(0, 2**53 - 1),
)
@pytest.mark.slow
def test_any_values_come_back_to_the_last_bit(tmp_path, state, actor, delay, flags, images, closed_ns, task, seed):
    spec = fake_spec(1, size=16)
    before, segment, after = fake_episode(spec, "e", steps=15, segment_steps=5)
    frames = {"camera0": CameraFrames(np.arange(len(images), dtype=np.int64) - 2**62, tuple(images))}
    episode = msgspec.structs.replace(segment.episode, task=task, seed=seed)
    segment = msgspec.structs.replace(
        segment,
        state=state,
        actor=actor,
        delay_ticks=delay,
        truncated=flags,
        frames=frames,
        closed_ns=closed_ns,
        episode=episode,
    )
    items = _items([before, segment, after], spec)
    objects = open_objects(tmp_path)
    _, places = _stored(objects, spec, items)
    found = read_segments(objects, spec, NUMBER, places)
    for item in items:
        assert same_segment(found[item.row], item.segment)
        assert hashlib.sha256(codec.encode(found[item.row])).hexdigest() == item.sha256


def test_zeros_of_both_signs_no_steps_and_no_frames(tmp_path):
    spec, objects = fake_spec(2, size=16), open_objects(tmp_path)
    (segment,) = fake_episode(spec, "e", steps=300, segment_steps=300)
    negative = msgspec.structs.replace(segment, state=np.full((300, 4), -0.0, np.float32))
    nothing = _without_steps(segment)
    no_frames = msgspec.structs.replace(segment, frames={})
    zeros = CameraFrames(np.zeros(1, np.int64), (bytes(arrays.SHARD_JPEG_BYTES // 64),))
    only_zeros = msgspec.structs.replace(segment, frames={"camera1": zeros})
    for some in ([nothing], [negative], [nothing, negative, nothing, no_frames, only_zeros, nothing]):
        items = _items(some, spec)
        _, places = _stored(objects, spec, items)
        found = read_segments(objects, spec, NUMBER, places)
        assert all(same_segment(found[item.row], item.segment) for item in items)
        for place, item in zip(places, items, strict=True):
            assert same_segment(read_segments(objects, spec, NUMBER, [place])[item.row], item.segment)


def test_a_robot_without_state_and_cameras_of_strange_names(tmp_path):
    names = ["observation.images/left hand", "..", "zarr.json", "__x", "ö", "a=b", "c", "x.part"]
    spec = fake_spec(len(names), state_dim=0, size=8)
    cameras = tuple(
        msgspec.structs.replace(camera, name=name) for camera, name in zip(spec.cameras, names, strict=True)
    )
    spec = msgspec.structs.replace(spec, cameras=cameras)
    folders = [arrays.folder_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder and "/" not in folder and folder[0] not in "._" for folder in folders)
    objects = open_objects(tmp_path / "store")
    items = _items(fake_episode(spec, "e", steps=40), spec)
    _, places = _stored(objects, spec, items)
    assert same_segment(read_segments(objects, spec, NUMBER, places)[1], items[0].segment)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    group = zarr.open_group(objects.zarr(), path=spec.hash, mode="r")
    assert set(group["frames"].group_keys()) == set(folders)


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


def test_a_shard_takes_what_fits_and_no_more(tmp_path):
    spec, objects = fake_spec(1, size=8), open_objects(tmp_path)
    long = fake_episode(spec, "e", steps=8000, segment_steps=1000)
    room, items = Room(spec), []
    for item in _items(long, spec):
        if not room.take(item.segment):
            break
        items.append(item)
    assert [item.row for item in items] == [1, 2, 3, 4]
    assert room.rows == arrays.SHARD_ROWS - 4000
    (small,) = fake_episode(spec, "s", steps=97, segment_steps=97)
    (exact,) = fake_episode(spec, "s", steps=96, segment_steps=96)
    assert not room.take(small) and room.take(exact) and room.rows == 0
    # the rows are used up, but a segment without steps has room
    assert room.take(canonical(_without_steps(exact), spec))
    _, places = _stored(objects, spec, items)
    assert all(same_segment(read_segments(objects, spec, 3, places)[i.row], i.segment) for i in items)


def test_a_segment_larger_than_any_shard_is_refused():
    spec = fake_spec(1, size=8)
    (segment,) = fake_episode(spec, "e", steps=10)
    image = segment.frames["camera0"].encoded[0]
    frames = {"camera0": CameraFrames(np.arange(4097), (image,) * 4097)}
    with pytest.raises(InvalidDataError, match="larger than a shard"):
        require_room(msgspec.structs.replace(segment, frames=frames), spec)
    big = {"camera0": CameraFrames(np.arange(2), (bytes(33 << 20),) * 2)}
    with pytest.raises(InvalidDataError, match="larger than a shard"):
        require_room(msgspec.structs.replace(segment, frames=big), spec)
    require_room(segment, spec)


def test_facts_use_no_more_than_their_room(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "SHARD_FACTS_BYTES", 4096)
    spec = fake_spec(2, size=8)
    (segment,) = fake_episode(spec, "e", steps=1)
    room, items = Room(spec), []
    while room.take(segment):
        items.append(ShardItem(2**62, "f" * 64, segment))
    assert 2 < len(items) < 12
    lines = encode_shard(spec, 2**30, items).placed[-1].placed[-1]
    assert 2000 < lines[2] + lines[3] <= 4096


@pytest.mark.slow
def test_every_damaged_object_is_noticed_and_only_where_it_is_damaged(tmp_path):
    spec, objects = fake_spec(1, size=64), open_objects(tmp_path)
    items = _items(fake_episode(spec, "e", steps=1000, segment_steps=50), spec)
    encoded, places = _stored(objects, spec, items)
    chance = np.random.default_rng(0)
    untouched = 0
    for key, good in encoded.objects.items():
        for _ in range(6):
            at = int(chance.integers(len(good)))
            torn, changed = good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
            for bad in (torn, changed):
                objects.put(key, bad)
                with pytest.raises(CorruptDataError, match=r"object|segment"):
                    read_segments(objects, spec, NUMBER, places)
                for place, item in zip(places, items, strict=True):
                    try:
                        segment = read_segments(objects, spec, NUMBER, [place])[item.row]
                    except CorruptDataError:
                        continue
                    assert same_segment(segment, item.segment)
                    untouched += 1
        objects.delete(key)
        with pytest.raises(CorruptDataError, match="is gone"):
            read_segments(objects, spec, NUMBER, places)
        objects.put(key, good)
    assert untouched > 500
    assert len(read_segments(objects, spec, NUMBER, places)) == len(items)


def test_a_shard_of_another_ledger_is_refused(tmp_path):
    spec, objects = fake_spec(1, size=16), open_objects(tmp_path)
    items = _items(fake_episode(spec, "e", steps=160), spec)
    _, places = _stored(objects, spec, items)
    _stored(objects, spec, _items(fake_episode(spec, "f", steps=160), spec))
    with pytest.raises(CorruptDataError, match=r"f/0 where the ledger expects e/0"):
        read_segments(objects, spec, NUMBER, places)
    with pytest.raises(CorruptDataError, match="does not say where"):
        read_segments(objects, spec, NUMBER, [msgspec.structs.replace(places[0], placed=None)])
