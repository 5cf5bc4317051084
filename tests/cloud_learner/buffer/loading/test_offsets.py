"""Windows that begin later than their frames were seen, from a pool filled by hand; `test_feed` has whole feeds."""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.loading.cache import StepCache
from cloud_learner.buffer.loading.layout import Layout
from cloud_learner.buffer.loading.windows import BatchSlot, WindowReader, settle
from tests.cloud_learner.buffer.loading.memory_buffer import HUMAN, POLICY, SCRIPT, robot
from tests.cloud_learner.buffer.loading.test_windows import draws, shape_of

SPEC = robot([(4, 4, 40.0)])
PICTURES = [np.arange(64, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)]
MANY = 6000


def by_human(actor, demonstration):
    return actor == HUMAN


def by_all(actor, demonstration):
    return actor != POLICY


def pool_of(shape, actors, own, starts=by_human, continues=by_all, spec=SPEC):
    """One segment, ledger row 7, of `own` steps and what follows it; each step sees its own frame, half a tick old."""
    target = msgspec.structs.replace(shape.target, starts=starts, continues=continues)
    layout = Layout(spec, msgspec.structs.replace(shape, target=target))
    actors = np.array(actors[: own + shape.lookahead], np.uint8)
    steps = np.zeros(len(actors), layout.record)
    number = np.arange(len(steps))
    steps["actor"], steps["version"], steps["delay"] = actors, 50 + number, number % 7
    steps["eligible"], steps["continues"] = starts(actors, False), continues(actors, False)
    steps["state"] = number[:, None] + [0, 100, 200]
    steps["executed"] = 10 + number[:, None]
    steps["reward"] = 2.0**-number
    steps["frame_age"] = 0.5 if spec.cameras else 0.0
    steps["frame"] = -1
    steps["frame"][:own] = number[:own, None]
    pool = StepCache(layout)
    pool.insert(7, steps, own, ())
    return pool, layout


def windows(offset, shape, actors, own, count=MANY, seed=0, online=True, **options):
    pool, layout = pool_of(shape, actors, own, **options)
    asked = draws(np.full(count, offset))
    asked["online"] = online
    positions, rows = settle(pool, asked)
    rng = np.random.default_rng(seed)
    return WindowReader(pool, PICTURES, layout).gather(asked[positions], rows, BatchSlot(), rng, 1)


def shares(tick):
    """How often each delay came up, by delay, for windows whose frames are of tick 102."""
    delays, counts = np.unique(tick - 102, return_counts=True)
    return dict(zip(delays.tolist(), (counts / counts.sum()).round(1).tolist(), strict=True))


def test_all_but_the_frames_moves_on_together():
    shape = shape_of(4, (3,), max_offset=5, later=True)
    batch = windows(2, shape, [HUMAN] * 40, own=20)
    delta = batch["tick"] - 102
    assert set(delta.tolist()) == {0, 1, 2, 3, 4, 5}
    assert (batch["images"]["camera0"] == 2).all()
    np.testing.assert_array_equal(batch["frame_age"], 0.5 + delta)
    np.testing.assert_array_equal(batch["state"], (2 + delta)[:, None] + [0, 100, 200])
    np.testing.assert_array_equal(batch["actions"][..., 0], (12 + delta)[:, None] + np.arange(4))
    np.testing.assert_array_equal(batch["version"], 52 + delta)
    np.testing.assert_array_equal(batch["delay"], (2 + delta) % 7)
    np.testing.assert_array_equal(batch["ahead"][:, 0, 0], 5 + delta)
    np.testing.assert_allclose(batch["reward"], 2.0 ** -((2 + delta)[:, None] + np.arange(4)))
    np.testing.assert_allclose(batch["return_to_go"], 2.5 + 2.0 ** (1.0 - (2 + delta)) - 2.0**-19, rtol=1e-6)
    assert batch["mask"].all() and not batch["action_is_pad"].any()
    assert batch["frame_age"].dtype == np.float32 and batch["tick"].dtype == np.int64


def test_delays_are_uniform_and_end_where_there_is_no_room():
    shape = shape_of(2, max_offset=4)
    delays = windows(2, shape, [HUMAN] * 40, own=20)["tick"] - 102
    np.testing.assert_allclose(np.bincount(delays) / MANY, 0.2, atol=0.02)
    # two steps later the policy takes over: nothing of what follows may be learned
    actors = [HUMAN] * 5 + [POLICY] * 2 + [HUMAN] * 20
    batch = windows(2, shape, actors, own=20)
    assert shares(batch["tick"]) == {0: 0.3, 1: 0.3, 2: 0.3}
    assert batch["mask"][batch["tick"] == 104].tolist()[0] == [1, 0]
    # the episode, or what is there of it, ends
    assert shares(windows(2, shape, [HUMAN] * 4, own=4)["tick"]) == {0: 0.5, 1: 0.5}
    assert shares(windows(2, shape, [HUMAN] * 3, own=3)["tick"]) == {0: 1.0}


def test_a_window_never_begins_where_it_may_not_though_it_may_go_on_there():
    shape = shape_of(3, max_offset=4)
    batch = windows(2, shape, [HUMAN, HUMAN, HUMAN, SCRIPT, SCRIPT, HUMAN, SCRIPT, SCRIPT], own=8)
    assert shares(batch["tick"]) == {0: 0.5, 3: 0.5}
    assert batch["mask"][batch["tick"] == 102].all()
    # it may begin where it may not go on: then only there
    batch = windows(2, shape, [HUMAN] * 8, own=8, continues=lambda actor, demonstration: actor == SCRIPT)
    assert shares(batch["tick"]) == {0: 1.0}
    assert not batch["mask"].any()


def test_where_a_window_may_begin_depends_on_its_source():
    def starts(actor, demonstration):
        return (actor == HUMAN) | np.asarray(demonstration)

    actors = [HUMAN, HUMAN, HUMAN, SCRIPT, SCRIPT, HUMAN, SCRIPT, SCRIPT]
    shape = shape_of(3, max_offset=4)
    for online, expect in ((True, {0: 0.5, 3: 0.5}), (False, dict.fromkeys(range(5), 0.2))):
        assert shares(windows(2, shape, actors, own=8, online=online, starts=starts)["tick"]) == expect


def test_a_window_may_begin_behind_the_end_of_its_segment():
    shape = shape_of(3, max_offset=4, later=True)
    batch = windows(2, shape, [HUMAN] * 30, own=3)
    assert shares(batch["tick"]) == dict.fromkeys(range(5), 0.2)
    assert batch["mask"].all()
    delta = batch["tick"] - 102
    np.testing.assert_array_equal(batch["actions"][..., 0], (12 + delta)[:, None] + np.arange(3))
    # 2.5 is everything after tick 102, the last one of its segment
    behind = np.cumsum(2.0 ** -(2 + np.arange(5.0)))
    expect = 2.5 + 2.0**-2 - np.r_[0, behind][delta]
    np.testing.assert_allclose(batch["return_to_go"], expect, rtol=1e-6)


def test_what_a_robot_cannot_foretell_is_as_old_as_the_frames():
    actors = [HUMAN] * 30
    batch = windows(2, shape_of(3, (4,), max_offset=5, rolled=(True, False, True), later=True), actors, own=20)
    delta = batch["tick"] - 102
    np.testing.assert_array_equal(batch["state"][:, [0, 2]], (2 + delta)[:, None] + [0, 200])
    assert (batch["state"][:, 1] == 102).all()
    # targets, and what is read when it is there, are whole
    np.testing.assert_array_equal(batch["ahead"][:, 0], (6 + delta)[:, None] + [0, 100, 200])
    np.testing.assert_array_equal(batch["later_state"], (2 + delta + batch["later_index"])[:, None] + [0, 100, 200])
    nothing = windows(2, shape_of(3, max_offset=5, rolled=(False,) * 3), actors, own=20)
    assert (nothing["state"] == [2, 102, 202]).all()
    assert set((nothing["tick"] - 102).tolist()) == set(range(6))


def test_each_step_behind_an_image_has_its_own_delay():
    batch = windows(2, shape_of(3, max_offset=3, ticks_per_frame=5), [HUMAN] * 30, own=20, count=1000)
    delta = batch["tick"] - 102
    assert delta.shape == (1000, 5)
    np.testing.assert_array_equal(batch["frame_age"], 0.5 + delta)
    assert len(np.unique(delta, axis=0)) > 500
    assert abs(np.corrcoef(delta[:, 0], delta[:, 1])[0, 1]) < 0.1
    np.testing.assert_array_equal(batch["state"][..., 0], 2 + delta)
    assert batch["images"]["camera0"].shape == (1000, 4, 4, 3)


def test_later_states_are_before_any_action_that_counts():
    shape = shape_of(4, later=True)
    batch = windows(2, shape, [HUMAN] * 5 + [POLICY] * 9, own=14)
    counts = np.bincount(batch["later_index"]) / MANY
    assert counts.round(1).tolist() == [0.3, 0.3, 0.3]
    assert batch["mask"][0].tolist() == [1, 1, 1, 0]
    np.testing.assert_array_equal(batch["later_state"][:, 0], 2 + batch["later_index"])
    assert "later_index" not in windows(2, shape_of(4), [HUMAN] * 14, own=14, count=1)


def test_without_a_camera_the_age_is_the_delay():
    batch = windows(2, shape_of(2, max_offset=6), [HUMAN] * 30, own=20, spec=robot([]))
    np.testing.assert_array_equal(batch["frame_age"], batch["tick"] - 102)
    assert batch["frame_age"].max() == 6


def test_asking_for_later_states_changes_no_delay():
    shape = shape_of(4, max_offset=9, ticks_per_frame=3)
    plain = windows(2, shape, [HUMAN] * 60, own=40, count=50)
    more = windows(2, shape_of(4, max_offset=9, ticks_per_frame=3, later=True), [HUMAN] * 60, own=40, count=50)
    np.testing.assert_array_equal(plain["tick"], more["tick"])
    assert more.keys() - plain.keys() == {"later_index", "later_state"}
    other = windows(2, shape, [HUMAN] * 60, own=40, count=50, seed=1)
    assert not np.array_equal(plain["tick"], other["tick"])


def test_only_a_share_of_the_windows_is_postponed():
    shape = shape_of(2, max_offset=8, offset_share=0.25)
    tick = windows(3, shape, [HUMAN] * 40, own=30)["tick"]
    # a quarter is drawn evenly from 0 to 8, and a ninth of those is 0 too
    assert abs(np.mean(tick > 103) - 0.25 * 8 / 9) < 0.02
    assert set(tick.tolist()) == set(range(103, 112))
    none = windows(3, shape_of(2, max_offset=8, offset_share=0.0), [HUMAN] * 40, own=30)["tick"]
    assert set(none.tolist()) == {103}


def test_the_state_of_the_look_is_that_of_the_step_drawn_however_late_the_window_begins():
    actors = [HUMAN] * 30
    for ticks_per_frame in (1, 3):
        shape = shape_of(4, ticks_per_frame=ticks_per_frame, max_offset=6, rolled=(True, True, True))
        batch = windows(5, shape, actors, 20, 50)
        assert np.array_equal(batch["seen_state"], np.float32([[5, 105, 205]]).repeat(50, 0))
        assert len(np.unique(batch["state"][..., 0])) > 3
    assert "seen_state" not in windows(5, shape_of(4), actors, 20, 3)
