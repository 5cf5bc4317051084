"""Gathering from a pool that is filled by hand; what whole feeds deliver is checked in `test_dataset`."""

from __future__ import annotations

import numpy as np

from cloud_learner.buffer.loading.cache import StepCache
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.loader import DRAW
from cloud_learner.buffer.loading.windows import BatchSlot, WindowReader, settle
from cloud_learner.buffer.sampling.target import imitation
from tests.cloud_learner.buffer.loading.memory_buffer import HUMAN, POLICY, robot

SPEC = robot([(4, 4, 20.0)])


def shape_of(horizon=16, ticks_ahead=(), ticks_per_frame=1, target=None, **options) -> DatasetConfig:
    return DatasetConfig(
        tasks={"do": "do it"},
        target=target or imitation(),
        batch=1,
        horizon=horizon,
        ticks_ahead=tuple(ticks_ahead),
        ticks_per_frame=ticks_per_frame,
        **options,
    )


def filled(horizon=4, ahead=(), ticks=1, frames=(0, 0, 0, 1, 1, 2), actor=(1, 1, 1, 1, 0, 1), after=(1, 1)):
    """One segment of an online episode, ledger row 7: by default a human acts at all steps but the fifth."""
    plan = Layout(SPEC, shape_of(horizon, ahead, ticks))
    pool = StepCache(plan)
    steps = np.zeros(len(actor) + min(len(after), plan.config.lookahead), plan.record)
    everybody = np.array([*actor, *after], np.uint8)[: len(steps)]
    steps["actor"] = everybody
    steps["eligible"] = steps["continues"] = everybody == HUMAN
    steps["state"] = np.arange(len(steps))[:, None]
    steps["executed"] = 10 + np.arange(len(steps))[:, None]
    steps["reward"] = 1
    steps["frame"] = -1
    steps["frame"][: len(actor), 0] = frames
    pool.insert(7, steps, len(actor), ())
    return pool, plan


def draws(offsets, segment=7):
    found = np.zeros(len(offsets), DRAW)
    found["segment"], found["offset"], found["first_tick"], found["online"] = segment, offsets, 100, True
    found["outcome"], found["episode"], found["return_after"], found["last_tick"] = 1, 5, 2.5, 109
    return found


def one(offset, slot=None, **options):
    pool, plan = filled(**options)
    asked = draws([offset])
    positions, rows = settle(pool, asked)
    pictures = [np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)]
    rng = np.random.default_rng(0)
    return WindowReader(pool, pictures, plan).gather(asked[positions], rows, slot or BatchSlot(), rng, 1)


def test_a_window_ends_at_the_first_step_that_may_not_be_continued_over():
    assert POLICY == 0
    batch = one(1, ahead=(1, 9))
    assert batch["mask"].tolist() == [[1, 1, 1, 0]]
    assert not batch["action_is_pad"].any()
    assert batch["actions"][0, :, 0].tolist() == [11, 12, 13, 0]
    assert batch["reward"].tolist() == [[1, 1, 1, 1]]
    assert batch["ahead"][0, :, 0].tolist() == [2, 3]
    assert batch["return_to_go"].tolist() == [5 + 2.5]
    assert batch["ticks_to_end"].tolist() == [8]
    assert (batch["tick"][0], batch["episode"][0], batch["outcome"][0], batch["online"][0]) == (101, 5, 1, True)
    assert (batch["images"]["camera0"] == 0).all()
    assert batch["instructions"] == ["do it"]


def test_a_window_goes_on_into_what_follows_and_ends_with_it():
    batch = one(5, horizon=5)
    assert batch["actions"][0, :, 0].tolist() == [15, 16, 17, 0, 0]
    assert batch["mask"].tolist() == batch["reward"].tolist() == [[1, 1, 1, 0, 0]]
    assert batch["action_is_pad"].tolist() == [[False, False, False, True, True]]
    # no more than the look-ahead is there, and no more is needed
    assert one(5, horizon=2)["mask"].tolist() == [[1, 1]]


def test_groups_are_the_eligible_steps_behind_one_image():
    seen = {tuple(one(3, ticks=50, frames=(0, 0, 0, 1, 1, 1))["tick"][0].tolist()) for _ in range(1)}
    assert {tick for ticks in seen for tick in ticks} == {103, 105}
    batch = one(0, ticks=300)
    ticks, counts = np.unique(batch["tick"], return_counts=True)
    assert ticks.tolist() == [100, 101, 102]
    assert counts.min() > 60
    assert batch["state"].shape == (1, 300, 3)
    assert batch["images"]["camera0"].shape == (1, 4, 4, 3)
    np.testing.assert_array_equal(batch["state"][0, :, 0], batch["tick"][0] - 100)
    np.testing.assert_allclose(batch["return_to_go"][0], 6 - (batch["tick"][0] - 100) + 2.5)


def test_spreading_stays_within_the_group():
    assert set(one(1, ticks=40)["tick"][0].tolist()) == {100, 101, 102}
    assert set(one(5, ticks=40)["tick"][0].tolist()) == {105}


def test_draws_that_cannot_be_used_are_replaced_by_the_next_that_can():
    pool, _ = filled(frames=(0, -1, 0, 1, 1, -2))
    positions, rows = settle(pool, draws([0, 1, 2, 4, 5]))
    assert positions.tolist() == [0, 2, 2, 0, 0]
    assert (rows - pool.first_rows(np.array([7]))[0]).tolist() == [0, 2, 2, 0, 0]
    mixed = np.concatenate([draws([0]), draws([0], 8)])
    assert settle(pool, mixed)[0].tolist() == [0, 0]
    assert settle(pool, draws([1, 5])) is None
    assert settle(pool, draws([0], segment=8)) is None
    pool.drop(7)
    assert settle(pool, draws([0])) is None


def test_a_slot_is_used_again_and_its_arrays_are_aligned():
    slot = BatchSlot()
    first = one(1, slot)
    second = one(0, slot)
    for name in ("state", "actions", "mask", "action_is_pad", "reward", "tick", "task", "return_to_go", "ticks_to_end"):
        assert np.shares_memory(first[name], second[name]), name
    for array in (*second["images"].values(), second["actions"]):
        assert array.ctypes.data % 64 == 0
    assert slot.array("state", (3, 2), np.float32).shape == (3, 2)
    assert not np.shares_memory(slot.array("a", (4,), np.int8), slot.array("b", (4,), np.int8))
