"""Loading blocks, in this process and in others: real processes on a real buffer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import cv2
import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.loading.dataset import open_dataset
from cloud_learner.buffer.loading.decoding.block import LoadJob, SegmentRequest, load_block
from cloud_learner.buffer.loading.decoding.loader import FreshSegments, InlineLoader
from cloud_learner.buffer.loading.decoding.processes import ProcessLoader
from cloud_learner.buffer.loading.frame_cache import FrameCache
from cloud_learner.buffer.loading.layout import NO_FRAME, UNREADABLE_FRAME, Layout
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from cloud_learner.buffer.sampling.target import imitation, uniform
from tests.cloud_learner.buffer.loading.memory_buffer import MemoryBuffer, record, robot
from tests.cloud_learner.buffer.loading.test_dataset import config, copied, fleet, same
from wire.errors import ConfigError, StorageError
from wire.messages.gateway import CameraFrames

SPEC = robot([(16, 16, 20.0), (16, 16, 40.0)])
TWO_SHAPES = robot([(16, 16, 20.0), (8, 24, 40.0)])


def layout(spec=SPEC, lookahead=5, target=None) -> Layout:
    target = target or uniform()
    return Layout.of(spec, lookahead, target.starts, target.continues)


def wait_for(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


# --- one block --------------------------------------------------------------------------------------------------------


def load(buffer, job, plan=None, room=1000):
    plan = plan or layout(buffer.spec)
    arena = FrameCache(plan.shapes, 10_000_000)
    frames = [arena.frames(shape) for shape in range(len(plan.shapes))]
    loaded = load_block(job, arena.reserve((room,) * len(plan.shapes)), frames, buffer.read, plan)
    return loaded, {s.row: np.frombuffer(s.records, plan.record) for s in loaded.segments}, frames


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
    loaded, records, frames = load(
        buffer, LoadJob(1, (SegmentRequest(2, (1,), (3, 4)), SegmentRequest(1, (), (2,)))), plan
    )
    assert [(s.row, s.own) for s in loaded.segments] == [(2, 30), (1, 30)]
    assert len(records[2]) == 35
    np.testing.assert_array_equal(records[2]["state"][30:], np.concatenate([s.state for s in segments[2:]])[:5])
    owned = set()
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
            assert not mine & owned
            owned |= mine
    assert sum(loaded.used) == len(owned)
    assert (records[1]["frame"][30:] == NO_FRAME).all()


def test_only_frames_that_a_window_may_show_are_decoded():
    buffer = MemoryBuffer(SPEC)
    (segment,) = record(SPEC, "e", [80], 3)
    buffer.add(segment)
    able = imitation().starts(segment.actor, False)
    assert 0 < able.sum() < 80
    loaded, _, _ = load(buffer, LoadJob(1, (SegmentRequest(1),)), layout(target=imitation()))
    seen = sum(len(np.unique(times[able])) for times in segment.frame_times_ns.values())
    assert loaded.used == (seen,)


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
    _, records, frames = load(buffer, LoadJob(1, (SegmentRequest(6, (5, 4, 3, 2, 1)),)))
    number = records[6]["frame"][records[6]["eligible"], 1]
    np.testing.assert_array_equal(frames[0][number[0]], pixels(first, "camera1", still))
    assert set(buffer.reads) == {1, 2, 3, 4, 5, 6}
    buffer.reads.clear()
    load(buffer, LoadJob(1, (SegmentRequest(2, (1,)),)))
    assert sorted(buffer.reads) == [1, 2]
    # nobody brought it: the steps are there, without a frame
    _, records, _ = load(buffer, LoadJob(1, (SegmentRequest(6, (5, 4)),)))
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
    loaded, records, _ = load(
        buffer,
        LoadJob(
            1,
            (
                SegmentRequest(1, (), (2, 3)),
                SegmentRequest(2, (1,), (3,)),
                SegmentRequest(3, (2, 1)),
                SegmentRequest(99),
            ),
        ),
    )
    assert [s.row for s in loaded.segments] == [1, 3]
    assert loaded.missing == {2: "it is damaged", 99: "it is not there (any more, or not yet)"}
    # what follows ends where the damage begins
    assert len(records[1]) == 20
    assert loaded.unreadable_frames >= 2
    assert loaded.unreadable_in == (3,)
    assert (records[3]["frame"][records[3]["eligible"], 1] <= UNREADABLE_FRAME).any()


def test_too_little_room_is_told_before_anything_is_written():
    buffer = MemoryBuffer(SPEC)
    buffer.add(*record(SPEC, "e", [40], 2, source="demonstration"))
    enough, _, _ = load(buffer, LoadJob(1, (SegmentRequest(1),)))
    loaded, _, frames = load(buffer, LoadJob(1, (SegmentRequest(1),)), room=3)
    assert loaded.short == enough.used
    assert not loaded.segments
    assert not frames[0][:3].any()


def test_the_inline_loader_asks_for_more_room_and_gives_back_what_is_left():
    buffer = MemoryBuffer(SPEC)
    buffer.add(*record(SPEC, "e", [40], 2, source="demonstration"))
    arena = FrameCache(layout().shapes, 1_000_000)
    loader = InlineLoader(arena, buffer.read, layout(), FreshSegments(1000))
    for room in (2, 500):
        loader.submit(LoadJob(1, (SegmentRequest(1),), room=(room,), other_bytes=100))
        taken = loader.take(1)
        assert len(taken.frames[0]) == taken.loaded.used[0]
        assert arena.used_bytes == 100 + 768 * len(taken.frames[0])
        loader.release(taken.frames, 100)
        assert arena.used_bytes == 0
    loader.submit(LoadJob(2, (SegmentRequest(1),), room=(2000,)))
    with pytest.raises(ConfigError, match="no room for"):
        loader.take(2)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A buffer of two robots' episodes, one part in shards and one in the journal; and the segments."""
    place = BufferLocation(tmp_path_factory.mktemp("buffer"))
    ledger, store = place.open_writer()
    ledger.see_robot("r1", SPEC, "clock", 1)
    segments = fleet(SPEC, episodes=14)
    rows = []
    for number, segment in enumerate(segments):
        rows.append(store.append(segment, 1, 1))
        if number == 20:
            seal(store, ledger, 2, force=True)
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
def test_processes_change_no_batch(filled):
    place, segments = filled

    def offer(feed, number):
        if number % 3 == 0:
            for row in range(21 + number // 2, min(24 + number // 2, len(segments))):
                feed.submit(row, segments[row])

    options = {"ticks_per_frame": 2, "max_offset": 6, "rolled": (True, False, True), "later": True}
    expect, stats = batches(place, 40, **options)
    assert stats.loaded > 60
    for workers, prefetch in ((1, 0), (2, 2)):
        found, stats = batches(place, 40, workers=workers, prefetch=prefetch, during=offer, **options)
        assert all(same(a, b) for a, b in zip(expect, found, strict=True))
        assert stats.from_gateway > 5
        assert stats.bytes <= 250_000


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_nothing_is_lost(filled, caplog):
    place, _ = filled
    killed = []

    def kill(feed, number):
        if number in (3, 10, 24):
            pid = feed._loader.pids[number % 2]
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    expect, _ = batches(place, 30)
    found, stats = batches(place, 30, workers=2, during=kill)
    assert all(same(a, b) for a, b in zip(expect, found, strict=True))
    assert stats.restarts >= 2
    assert "ended with code -9 and is replaced" in caplog.text
    for pid in killed:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_processes_end_with_their_feed_and_with_their_parent(filled, tmp_path):
    place, _ = filled
    feed = open_dataset(place, SPEC, config(workers=2, prefetch=1))
    feed.refresh()
    feed.next()
    pids = feed._loader.pids
    feed.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.cloud_learner.buffer.loading.test_loader import BufferLocation, SPEC, config, open_dataset\n"
        f"feed = open_dataset(BufferLocation(Path({str(place.data)!r})), SPEC, config(workers=2))\n"
        "feed.refresh()\nfeed.next()\n"
        "print(*feed._loader.pids, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(_alive(pid) for pid in pids), 20)


def _alive(pid):
    """Whether a process runs; one that ended and was not collected by anybody does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_block_over_which_processes_end_is_left_out_after_a_few(filled, caplog):
    place, segments = filled
    plan = layout()
    fresh = FreshSegments(10_000_000)
    # a segment of another robot: whoever takes it ends with an error
    fresh.add(1, record(robot([]), "other", [10], 0)[0])
    arena = FrameCache(plan.shapes, 1_000_000)
    loader = ProcessLoader(arena, place, plan, 1, fresh)
    try:
        loader.submit(LoadJob(1, (SegmentRequest(1),), room=(10,), other_bytes=50))
        loader.submit(LoadJob(2, (SegmentRequest(2),), room=(200,), other_bytes=50))
        taken = loader.take(1)
        assert taken.loaded.missing == {1: "3 loading processes ended over it"}
        assert "ledger row 1 is left out" in caplog.text
        (segment,) = loader.take(2).loaded.segments
        assert segment.own == segments[2].steps
        assert loader.stats.restarts == 3
    finally:
        loader.close()
        arena.close()


@pytest.mark.slow
def test_a_buffer_that_cannot_be_opened_or_processes_that_cannot_start_are_named(filled, tmp_path, monkeypatch):
    place, _ = filled
    for where, match in ((BufferLocation(tmp_path), "ledger"), (place, "workers=0")):
        arena = FrameCache(layout().shapes, 1_000_000)
        loader = ProcessLoader(arena, where, layout(), 2, FreshSegments(1000))
        try:
            loader.submit(LoadJob(1, (SegmentRequest(1),), room=(10,)))
            with pytest.raises(StorageError, match=match):
                loader.take(1)
        finally:
            loader.close()
            arena.close()
        monkeypatch.setattr(sys, "executable", "/bin/false")


@pytest.mark.slow
def test_a_loader_that_ran_ahead_too_far_gives_back_what_is_needed_later(filled):
    place, segments = filled
    plan = layout()
    arena = FrameCache(plan.shapes, 80 * 768)
    loader = ProcessLoader(arena, place, plan, 1, FreshSegments(1000))
    try:
        rows = sorted(segments, key=lambda row: -segments[row].steps)[:3]
        # the first asks for far too little, so that the others are done before it can be
        loader.submit(LoadJob(1, (SegmentRequest(rows[0]),), room=(1,)))
        for number in (1, 2):
            loader.submit(LoadJob(number + 1, (SegmentRequest(rows[number]),), room=(38,)))
        for number in range(3):
            taken = loader.take(number + 1)
            assert [s.row for s in taken.loaded.segments] == [rows[number]]
            loader.release(taken.frames, 0)
        assert arena.used_bytes == 0
        loader.submit(LoadJob(9, (SegmentRequest(rows[0]),), room=(1000,)))
        with pytest.raises(ConfigError, match="cache_bytes"):
            loader.take(9)
    finally:
        loader.close()
        arena.close()


def test_a_closed_loader_wakes_who_waits(filled):
    place, _ = filled
    arena = FrameCache(layout().shapes, 1_000_000)
    loader = ProcessLoader(arena, place, layout(), 1, FreshSegments(1000))
    loader.close()
    arena.close()
    with pytest.raises(StorageError, match="closed"):
        loader.take(1)
