from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest

from cloud_learner.buffer.loading.cache import FrameCache, StepCache
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.sampling.target import uniform
from tests.cloud_learner.buffer.loading.memory_buffer import robot
from wire.errors import ConfigError

LOOKAHEAD = 6


def layout(cameras=1) -> Layout:
    spec = robot([(4, 4, 20.0)] * cameras)
    config = DatasetConfig(tasks={"do": "do it"}, target=uniform(), batch=1, horizon=LOOKAHEAD + 1)
    return Layout(spec, config)


def row_bytes(plan):
    return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in plan.columns.values())


def records(plan, own, after, rng):
    """Random steps of one segment, its frames in growing order, and of what follows."""
    found = np.zeros(own + after, plan.record)
    for name in ("state", "executed", "reward"):
        found[name] = rng.normal(size=found[name].shape)
    found["version"] = rng.integers(0, 100, len(found))
    found["continues"] = rng.random(len(found)) < 0.8
    found["eligible"] = rng.random(len(found)) < 0.6
    found["frame"] = -1
    numbers = np.cumsum(rng.random(own) < 0.4)[:, None] + 1000 * np.arange(len(plan.cameras))
    lost = rng.random(numbers.shape) < 0.1
    found["frame"][:own] = np.where(found["eligible"][:own, None] & ~lost, numbers, -1)
    return found


def check(pool, plan, there):
    """That every row of every segment is what brute force finds; `there`: (records, own) by segment."""
    rows = pool.first_rows(np.array(list(there), np.int64))
    spans = sorted(
        (int(first), int(first) + own + LOOKAHEAD) for first, (_, own) in zip(rows, there.values(), strict=True)
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for first, (steps, own) in zip(rows.tolist(), there.values(), strict=True):
        c = pool.columns
        for name in ("state", "executed", "reward", "version"):
            np.testing.assert_array_equal(c[name][first : first + len(steps)], steps[name])
        able = steps["eligible"][:own] & (steps["frame"][:own] >= 0).all(1)
        for t in range(len(steps)):
            run = 0
            while t + run < len(steps) and steps["continues"][t + run]:
                run += 1
            assert c["run"][first + t] == run
            assert c["left"][first + t] == len(steps) - t
        for t in range(own):
            assert c["later_reward"][first + t] == pytest.approx(steps["reward"][t:own].astype(float).sum())
            if not able[t]:
                assert c["mates"][first + t] == 0
                continue
            begin, count = c["group"][first + t], c["mates"][first + t]
            mates = c["eligible_offset"][first + begin : first + begin + count].tolist()
            if plan.cameras:
                expect = [k for k in range(own) if able[k] and (steps["frame"][k] == steps["frame"][t]).all()]
            else:
                expect = [t]
            assert mates == expect


@pytest.mark.parametrize("cameras", [0, 1, 2])
def test_a_pool_holds_what_was_put_in_through_any_history(cameras):
    plan = layout(cameras)
    pool, rng, there = StepCache(plan), np.random.default_rng(cameras), {}
    most = 0
    for number in range(400):
        choice = rng.random()
        if there and choice < 0.45:
            segment = list(there)[int(rng.integers(len(there)))]
            steps, own = there.pop(segment)
            extent = pool.drop(segment)
            assert (extent.own, extent.frames[0].tolist()) == (own, [segment])
        elif there and choice < 0.6:
            segment = list(there)[int(rng.integers(len(there)))]
            steps, own = there[segment]
            later = records(plan, own, int(rng.integers(0, LOOKAHEAD + 1)), rng)
            for name in ("reward", "eligible"):
                later[name][:own] = steps[name][:own]
            pool.update(segment, later)
            later["frame"][:own] = steps["frame"][:own]
            there[segment] = later, own
        else:
            own = int(rng.integers(1, 60))
            there[number] = records(plan, own, int(rng.integers(0, LOOKAHEAD + 1)), rng), own
            pool.insert(number, *there[number], (np.array([number]),))
        used = sum(own + LOOKAHEAD for _, own in there.values())
        most = max(most, used)
        assert len(pool) == len(there)
        assert pool.bytes <= max(256, 1.25 * most + 70) * row_bytes(plan)
        if number % 20 == 0:
            check(pool, plan, there)
    check(pool, plan, there)
    assert pool.first_rows(np.array([10**6])).tolist() == [-1]
    assert (next(iter(there)) in pool, 10**6 in pool) == (True, False)
    bound = plan.step_bytes(np.array([own for _, own in there.values()])).sum()
    assert pool.bytes <= max(256 * row_bytes(plan), 1.3 * most * row_bytes(plan))
    assert bound >= sum(own + LOOKAHEAD for _, own in there.values()) * row_bytes(plan)


def test_an_emptied_pool_gives_its_memory_back():
    plan = layout()
    pool, rng = StepCache(plan), np.random.default_rng(0)
    for number in range(200):
        pool.insert(number, records(plan, 50, 0, rng), 50, ())
    full = pool.bytes
    for number in range(200):
        pool.drop(number)
    assert pool.bytes < full / 10
    pool.insert(1, records(plan, 50, 0, rng), 50, ())
    check(pool, plan, {})


# --- frames ---------------------------------------------------------------------------------------------------------

SMALL, LARGE = (4, 8, 3), (64, 64, 3)
SMALL_BYTES, LARGE_BYTES = 96, 12288


def resident_pages(array) -> int:
    """Bytes of the process's memory behind the mapping that `array` lies in."""
    address, found, inside = array.ctypes.data, 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first in ("Rss:",):
                found += int(line.split()[1]) * 1024
    return found


def test_frames_are_handed_out_once_and_taken_back():
    arena = FrameCache([SMALL, LARGE], 10 * LARGE_BYTES)
    rng = np.random.default_rng(0)
    held, value = [], 0
    for _ in range(300):
        if held and rng.random() < 0.5:
            rows, marks, extra = held.pop(int(rng.integers(len(held))))
            for shape, (numbers, mark) in enumerate(zip(rows, marks, strict=True)):
                assert (arena.frames(shape)[numbers] == mark).all()
            arena.release(rows, extra)
        else:
            counts, extra = [int(rng.integers(0, 20)), int(rng.integers(0, 3))], int(rng.integers(0, 500))
            before = arena.used_bytes
            rows = arena.reserve(counts, extra)
            asked = counts[0] * SMALL_BYTES + counts[1] * LARGE_BYTES + extra
            if rows is None:
                assert before + asked > arena.cap_bytes
                assert arena.used_bytes == before
                continue
            assert [len(numbers) for numbers in rows] == counts
            assert arena.used_bytes == before + asked
            marks = []
            for shape, numbers in enumerate(rows):
                value = (value + 1) % 256
                arena.frames(shape)[numbers] = value
                marks.append(value)
            held.append((rows, marks, extra))
        assert arena.used_bytes <= arena.bytes
        assert arena.bytes <= arena.cap_bytes + LARGE_BYTES
        taken = [{int(n) for rows, _, _ in held for n in rows[shape]} for shape in range(2)]
        assert [len(t) for t in taken] == [sum(len(rows[shape]) for rows, _, _ in held) for shape in range(2)]


def test_only_what_was_written_costs_memory_and_trimmed_pages_go_back():
    arena = FrameCache([LARGE, (64, 32, 3)], 1000 * LARGE_BYTES)
    frames = arena.frames(0)
    assert resident_pages(frames) == 0
    rows = arena.reserve([800, 0])
    frames[rows[0]] = 7
    assert arena.frame_bytes == 800 * LARGE_BYTES
    assert resident_pages(frames) == 800 * LARGE_BYTES
    arena.release((rows[0][200:], np.zeros(0, np.int32)))
    # there is no room for the other shape unless the pages of this one go back
    others = arena.reserve([0, 1200])
    arena.frames(1)[others[1]] = 9
    assert arena.bytes <= 1000 * LARGE_BYTES
    assert resident_pages(frames) == 200 * LARGE_BYTES
    assert (frames[rows[0][:200]] == 7).all()
    again = arena.reserve([100, 0])
    frames[again[0]] = 5
    assert (frames[rows[0][:200]] == 7).all()
    assert arena.reserve([200, 0]) is None


def test_small_frames_share_pages_with_used_ones_and_stay_whole():
    arena = FrameCache([SMALL, LARGE], 20 * LARGE_BYTES)
    rows = arena.reserve([2000, 0])[0]
    frames = arena.frames(0)
    frames[rows] = np.arange(2000)[:, None, None, None] % 251
    gone = np.ones(2000, bool)
    gone[::97] = False
    gone[500:900] = False
    arena.release((rows[gone], np.zeros(0, np.int32)))
    assert arena.reserve([0, 15]) is not None
    kept = rows[~gone]
    assert (frames[kept] == (np.flatnonzero(~gone) % 251)[:, None, None, None]).all()
    assert resident_pages(frames) < 2000 * SMALL_BYTES + mmap.PAGESIZE


def test_an_arena_without_cameras_or_room():
    arena = FrameCache([], 1000)
    assert arena.reserve((), 900) == ()
    assert arena.reserve((), 200) is None
    with pytest.raises(ConfigError, match="100 bytes"):
        FrameCache([LARGE], 100)
