"""Loading segments, in threads and without, from memory and from a real buffer."""

from __future__ import annotations

import threading

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.loading.cache import FrameCache
from cloud_learner.buffer.loading.dataset import open_dataset
from cloud_learner.buffer.loading.decode import SegmentRequest, load_segments
from cloud_learner.buffer.loading.layout import NO_FRAME, UNREADABLE_FRAME, Layout
from cloud_learner.buffer.loading.loader import SegmentLoader
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.sampling.target import imitation
from tests.cloud_learner.buffer.loading.memory_buffer import MemoryBuffer, record, robot
from tests.cloud_learner.buffer.loading.test_dataset import config, copied, fleet, same
from tests.cloud_learner.buffer.stored import WatchedRequests
from wire.errors import ConfigError, StorageError
from wire.messages.gateway import CameraFrames

SPEC = robot([(16, 16, 20.0), (16, 16, 40.0)])
TWO_SHAPES = robot([(16, 16, 20.0), (8, 24, 40.0)])


def layout(spec=SPEC, lookahead=5, **options) -> Layout:
    return Layout(spec, config(horizon=lookahead + 1, **options))


# --- one block --------------------------------------------------------------------------------------------------------


def load(buffer, job, plan=None):
    """What came of a job, its records by row, all frames, and how many were written."""
    plan = plan or layout(buffer.robot)
    arena = FrameCache(plan.shapes, 10_000_000)
    frames = [arena.frames(shape) for shape in range(len(plan.shapes))]
    asked = []

    def reserve(counts, steps):
        asked.append(list(counts))
        return arena.reserve(counts, int(plan.step_bytes(steps).sum()))

    loaded = load_segments(job, reserve, frames, buffer.read, plan)
    return loaded, {s.request.row: s.records for s in loaded.segments}, frames, tuple(asked[0])


def pixels(segment, camera, time):
    frames = segment.frames[camera]
    data = frames.encoded[frames.times_ns.tolist().index(time)]
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]


@pytest.mark.parametrize("spec", [SPEC, TWO_SHAPES])
def test_a_block_holds_steps_what_follows_and_each_frame_once(spec):
    buffer = MemoryBuffer(spec)
    segments = record(spec, "e", [30, 30, 3, 30], 0, source="demonstration")
    buffer.add(*segments)
    plan = layout(spec)
    loaded, records, frames, used = load(buffer, ((SegmentRequest(2, (1,), (3, 4)), SegmentRequest(1, (), (2,)))), plan)
    assert [(s.request.row, s.own) for s in loaded.segments] == [(2, 30), (1, 30)]
    assert len(records[2]) == 35
    np.testing.assert_array_equal(records[2]["state"][30:], np.concatenate([s.state for s in segments[2:]])[:5])
    owned, charged = set(), {s.request.row: s.frames for s in loaded.segments}
    for row, segment in ((1, segments[0]), (2, segments[1])):
        own = records[row][:30]
        for c, camera in enumerate(spec.cameras):
            times = segment.frame_times_ns[camera.name]
            for t in np.flatnonzero(own["eligible"]).tolist():
                source = next(s for s in segments[::-1] if int(times[t]) in s.frames[camera.name].times_ns.tolist())
                picture = frames[plan.shape_of[c]][own["frame"][t, c]]
                np.testing.assert_array_equal(picture, pixels(source, camera.name, int(times[t])))
            # one frame for each time, none for steps where no window begins
            pairs = {(int(times[t]), int(own["frame"][t, c])) for t in np.flatnonzero(own["eligible"])}
            assert len(pairs) == len({time for time, _ in pairs}) == len({number for _, number in pairs})
            assert (own["frame"][~own["eligible"], c] == NO_FRAME).all()
            mine = {(plan.shape_of[c], number) for _, number in pairs}
            assert mine <= {(shape, int(n)) for shape, numbers in enumerate(charged[row]) for n in numbers}
            assert not mine & owned
            owned |= mine
    assert sum(len(numbers) for rows in charged.values() for numbers in rows) == len(owned)
    assert sum(used) == len(owned)
    assert (records[1]["frame"][30:] == NO_FRAME).all()


def test_only_frames_that_a_window_may_show_are_decoded():
    buffer = MemoryBuffer(SPEC)
    (segment,) = record(SPEC, "e", [80], 3)
    buffer.add(segment)
    able = imitation().starts(segment.actor, False)
    assert 0 < able.sum() < 80
    _, _, _, used = load(buffer, ((SegmentRequest(1),)), layout(target=imitation()))
    seen = sum(len(np.unique(times[able])) for times in segment.frame_times_ns.values())
    assert used == (seen,)


def test_a_frame_is_looked_for_further_back_only_when_it_must_be():
    buffer = MemoryBuffer(SPEC)
    first, *others = record(SPEC, "e", [8] * 6, 1, source="demonstration")
    # the second camera stood still: everybody sees its first frame
    still = int(first.frame_times_ns["camera1"][0])
    changed = [
        msgspec.structs.replace(
            s,
            frame_times_ns=s.frame_times_ns | {"camera1": np.full(8, still)},
            frames=s.frames if s.index == 0 else s.frames | {"camera1": CameraFrames(np.zeros(0, np.int64), ())},
        )
        for s in (first, *others)
    ]
    buffer.add(*changed)
    _, records, frames, _ = load(buffer, ((SegmentRequest(6, (5, 4, 3, 2, 1)),)))
    number = records[6]["frame"][records[6]["eligible"], 1]
    np.testing.assert_array_equal(frames[0][number[0]], pixels(first, "camera1", still))
    assert set(buffer.reads) == {1, 2, 3, 4, 5, 6}
    buffer.reads.clear()
    load(buffer, ((SegmentRequest(2, (1,)),)))
    assert sorted(buffer.reads) == [1, 2]
    # nobody brought it: the steps are there, without a frame
    _, records, _, _ = load(buffer, ((SegmentRequest(6, (5, 4)),)))
    assert (records[6]["frame"][:, 1] == NO_FRAME).all()


def test_what_is_wrong_with_a_block_is_said():
    buffer = MemoryBuffer(SPEC)
    segments = record(SPEC, "e", [20, 20, 20], 2, source="demonstration")
    frames = segments[2].frames
    torn = tuple(data[: len(data) // 3] for data in frames["camera1"].encoded)
    broken = frames | {
        "camera1": CameraFrames(frames["camera1"].times_ns, (b"", b"\xff\xd8\xff\xd9", *torn)[: len(torn)])
    }
    buffer.add(*segments[:2], msgspec.structs.replace(segments[2], frames=broken))
    buffer.damaged.add(2)
    loaded, records, _, _ = load(
        buffer,
        (
            SegmentRequest(1, (), (2, 3)),
            SegmentRequest(2, (1,), (3,)),
            SegmentRequest(3, (2, 1)),
            SegmentRequest(99),
        ),
    )
    assert [s.request.row for s in loaded.segments] == [1, 3]
    assert loaded.damaged == {2: "it is damaged"}, "99 was pruned"
    # what follows ends where the damage begins
    assert len(records[1]) == 20
    assert loaded.unreadable.keys() == {3} and loaded.unreadable[3] >= 2
    assert (records[3]["frame"][records[3]["eligible"], 1] <= UNREADABLE_FRAME).any()


def test_the_loader_reserves_what_it_needs_and_a_segment_gives_all_of_it_back():
    buffer = MemoryBuffer(SPEC)
    (segment,) = record(SPEC, "e", [40], 2, source="demonstration")
    frames = segment.frames["camera1"]
    torn = CameraFrames(frames.times_ns, (b"torn", *frames.encoded[1:]))
    buffer.add(msgspec.structs.replace(segment, frames=segment.frames | {"camera1": torn}))
    plan = layout()
    for threads in (0, 2):
        arena = FrameCache(plan.shapes, 1_000_000)
        loader = SegmentLoader(arena, buffer.read, plan, threads)
        loader.submit((SegmentRequest(1),))
        (loaded,) = loader.take().segments
        shown = len(np.unique(loaded.records["frame"][loaded.records["frame"] >= 0])) + 1
        charge = int(plan.step_bytes(np.array([40]))[0])
        assert arena.used_bytes == charge + 768 * shown
        loader.submit((SegmentRequest(1),) * 2000)
        with pytest.raises(ConfigError, match="no room for"):
            loader.take()
        loader.release(loaded.frames, charge)
        assert arena.used_bytes == 0
        loader.close()


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A buffer of two robots' episodes, one part in shards and one in the journal; and the segments."""
    place = BufferLocation(tmp_path_factory.mktemp("buffer"))
    ledger, store = place.open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    segments = fleet(SPEC, episodes=14)
    rows = []
    for number, segment in enumerate(segments):
        rows += store.append_all([(segment, 1)], 1)
        if number == 20:
            seal(store, 2, force=True)
    store.close()
    ledger.close()
    return place, dict(zip(rows, segments, strict=True))


def batches(place, count, kill=0, during=None, **options):
    made = []
    with open_dataset(place, SPEC, config(cache_bytes=250_000, lead=6, batch=64, echo=2.0, **options)) as feed:
        feed.refresh(20)
        for number in range(count):
            if number == count // 2:
                feed.refresh()
            if during:
                during(feed, number)
            made.append(copied(feed.next()))
        stats = feed.stats
    return made, stats


@pytest.mark.slow
def test_threads_change_no_batch(filled):
    place, segments = filled

    def submit(feed, number):
        if number % 3 == 0:
            for row in range(21 + number // 2, min(24 + number // 2, len(segments))):
                feed.submit(row, segments[row])

    options = {"ticks_per_frame": 2, "max_offset": 6, "rolled": (True, False, True), "later": True}
    expect, stats = batches(place, 40, **options)
    assert stats.loaded > 60
    for workers, prefetch in ((1, 0), (2, 2), (3, 0)):
        found, stats = batches(place, 40, workers=workers, prefetch=prefetch, during=submit, **options)
        assert all(same(a, b) for a, b in zip(expect, found, strict=True))
        assert stats.from_gateway > 5
        assert stats.bytes <= 250_000


@pytest.mark.parametrize("options", [{"max_offset": 4}, {"n_step": 3}])
def test_labels_that_a_job_writes_back_come_with_the_steps_they_are_of(filled, options):
    place, segments = filled
    ledger, store = place.open_writer()
    rng, said, name = np.random.default_rng(0), {}, f"advantage_{next(iter(options))}"

    def label(rows):
        values = {row: rng.normal(size=segments[row].steps).astype(np.float32) for row in rows}
        ledger.put_step_labels(name, values)
        said.update(values)

    def check(batch):
        number = {segment.episode.id: ledger.episode(segment.episode.id).number for segment in segments.values()}
        steps = {
            (number[segment.episode.id], segment.first_tick + t): said[row][t] if row in said else np.nan
            for row, segment in segments.items()
            for t in range(segment.steps)
        }
        for i, at in enumerate(zip(batch["episode"].tolist(), batch["tick"].tolist(), strict=True)):
            np.testing.assert_array_equal(batch["labels"][name][i], np.float32(steps[at]))
            assert np.isnan(batch["labels"]["value"][i])

    label(list(segments)[::2])
    ledger.put_step_labels("other", {row: np.zeros(segments[row].steps) for row in segments})
    options = {"labels": (name, "value"), "lead": 3, "batch": 64, **options}
    with open_dataset(place, SPEC, config(**options)) as feed:
        feed.refresh()
        for _ in range(10):
            check(feed.next())
        label(list(segments))
        feed.refresh()
        # what was planned before
        for _ in range(3):
            feed.next()
        for _ in range(10):
            check(feed.next())
        assert feed.stats.loaded == feed.stats.segments > 30, "what is in memory has its frames"
    store.close()
    ledger.close()


def test_what_a_robot_recorded_within_other_limits_is_learned_from(filled):
    place, segments = filled
    wider = msgspec.structs.replace(SPEC.action[0], high=SPEC.action[0].high + 1)
    other = msgspec.structs.replace(SPEC, action=(wider, *SPEC.action[1:]))
    assert other.hash != SPEC.hash
    with open_dataset(place, other, config(cache_bytes=250_000, lead=6)) as feed:
        feed.refresh()
        assert len(feed.universe) == len(segments)
        assert feed.next()["actions"].shape[0] == 8
    renamed = msgspec.structs.replace(SPEC.action[0], unit="furlong")
    with open_dataset(place, msgspec.structs.replace(SPEC, action=(renamed, *SPEC.action[1:])), config()) as feed:
        feed.refresh()
        assert not len(feed.universe)


def test_memory_is_given_in_the_order_of_need_whoever_is_ready_first():
    buffer = MemoryBuffer(SPEC)
    buffer.add(*(s for e in range(6) for s in record(SPEC, f"e{e}", [30], e, source="demonstration")))
    slow, read = threading.Event(), buffer.read

    def late(rows):
        if 1 in rows:
            assert slow.wait(60)
        return read(rows)

    plan = layout()
    loads = [load(buffer, (SegmentRequest(n + 1),))[3][0] for n in range(6)]
    step_bytes = int(plan.step_bytes(np.array([30]))[0])
    # two of them fit at a time
    arena = FrameCache(plan.shapes, 2 * (max(loads) * 768 + step_bytes))
    loader = SegmentLoader(arena, late, plan, 3)
    try:
        for number in range(6):
            loader.submit((SegmentRequest(number + 1),))
        slow.set()
        for number in range(6):
            (segment,) = loader.take().segments
            assert segment.request.row == number + 1
            loader.release(segment.frames, step_bytes)
        assert arena.used_bytes == 0
    finally:
        loader.close()


def test_a_job_that_failed_is_tried_again_though_all_threads_wait_for_it():
    buffer = MemoryBuffer(SPEC)
    buffer.add(*(s for e in range(5) for s in record(SPEC, f"e{e}", [10], e, source="demonstration")))
    calls, read = [], buffer.read

    def flaky(rows):
        calls.append(rows)
        if 1 in rows and sum(1 in asked for asked in calls) < 3:
            raise StorageError("the store is away.")
        return read(rows)

    loader = SegmentLoader(FrameCache(layout().shapes, 1_000_000), flaky, layout(), 2)
    try:
        for number in range(5):
            loader.submit((SegmentRequest(number + 1),))
        for _ in range(2):
            with pytest.raises(StorageError, match="away"):
                loader.take()
        assert [loader.take().segments[0].request.row for _ in range(5)] == [1, 2, 3, 4, 5]
    finally:
        loader.close()


def test_a_job_reads_at_once_and_no_more_than_its_windows_show():
    spec = robot([])
    buffer = MemoryBuffer(spec)
    buffer.add(*record(spec, "e", [10] * 6, 2, source="demonstration"))
    asked, read = [], buffer.read

    def noting(rows):
        asked.append(sorted(rows))
        return read(rows)

    buffer.read = noting
    job = (SegmentRequest(4, (3, 2, 1), (5,)), SegmentRequest(5, (4, 3), (6,), frames=False))
    load(buffer, job, layout(spec, history=4))
    assert asked == [[3, 4, 5, 6]]


def test_training_goes_on_with_what_is_kept_while_the_object_store_is_away(tmp_path, monkeypatch):
    requests = WatchedRequests(monkeypatch)
    (tmp_path / "bucket").mkdir()
    place = BufferLocation(tmp_path / "data", store=f"file://{tmp_path}/bucket", cache_bytes=10_000_000)
    ledger, store = place.open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    store.append_all([(segment, 1) for segment in fleet(SPEC, episodes=8)], 1)
    seal(store, 2, force=True)
    ledger.close()
    expect, _ = batches(place, 20)
    requests.down = True
    found, _ = batches(place, 20)
    assert all(same(a, b) for a, b in zip(expect, found, strict=True))
    for path in (tmp_path / "data" / "cache").iterdir():
        path.unlink()
    with open_dataset(place, SPEC, config(cache_bytes=250_000, lead=6, batch=64, echo=2.0)) as feed:
        feed.refresh(20)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"file://.*bucket.*Check the network"):
                feed.next()
        requests.down = False
        assert same(copied(feed.next()), expect[0])


def test_a_closed_loader_wakes_who_waits():
    buffer = MemoryBuffer(SPEC)
    buffer.add(*record(SPEC, "e", [40, 40], 2, source="demonstration"))
    arena = FrameCache(layout().shapes, 45 * 768)
    loader = SegmentLoader(arena, buffer.read, layout(), 1)
    loader.submit((SegmentRequest(1),))
    loader.submit((SegmentRequest(2),))
    # the second waits for memory
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loading")]
