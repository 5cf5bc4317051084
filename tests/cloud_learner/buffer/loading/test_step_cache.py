from __future__ import annotations

import itertools

import numpy as np
import pytest

from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.step_cache import StepCache
from cloud_learner.buffer.sampling.target import uniform
from tests.cloud_learner.buffer.loading.memory_buffer import robot

LOOKAHEAD = 6


def layout(cameras=1) -> Layout:
    spec = robot([(4, 4, 20.0)] * cameras)
    return Layout.of(spec, LOOKAHEAD, uniform().starts, uniform().continues)


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
            frames = np.unique(steps["frame"][:own])
            if cameras:
                np.testing.assert_array_equal(extent.frames[0], frames[frames >= 0])
            assert extent.own == own
        elif there and choice < 0.6:
            segment = list(there)[int(rng.integers(len(there)))]
            steps, own = there[segment]
            after = records(plan, 0, int(rng.integers(0, LOOKAHEAD + 1)), rng)
            pool.look_ahead(segment, after)
            there[segment] = np.concatenate([steps[:own], after]), own
        else:
            own = int(rng.integers(1, 60))
            there[number] = records(plan, own, int(rng.integers(0, LOOKAHEAD + 1)), rng), own
            pool.insert(number, *there[number])
        used = sum(own + LOOKAHEAD for _, own in there.values())
        most = max(most, used)
        assert len(pool) == len(there)
        assert pool.bytes <= max(256, 1.25 * most + 70) * pool.row_bytes
        if number % 20 == 0:
            check(pool, plan, there)
    check(pool, plan, there)
    assert pool.first_rows(np.array([10**6])).tolist() == [-1]
    assert (next(iter(there)) in pool, 10**6 in pool) == (True, False)
    bound = pool.bytes_of(np.array([own for _, own in there.values()])).sum()
    assert pool.bytes <= max(256 * pool.row_bytes, 1.3 * most * pool.row_bytes)
    assert bound >= sum(own + LOOKAHEAD for _, own in there.values()) * pool.row_bytes


def test_an_emptied_pool_gives_its_memory_back():
    plan = layout()
    pool, rng = StepCache(plan), np.random.default_rng(0)
    for number in range(200):
        pool.insert(number, records(plan, 50, 0, rng), 50)
    full = pool.bytes
    for number in range(200):
        pool.drop(number)
    assert pool.bytes < full / 10
    pool.insert(1, records(plan, 50, 0, rng), 50)
    check(pool, plan, {})
