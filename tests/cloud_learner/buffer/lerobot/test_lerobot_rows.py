"""Ticks become rows: cut where something is missing, thinned by what an action means."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.lerobot.resampling import Steps, resampled
from cloud_learner.buffer.lerobot.rows import choose_rate, image_keys, pieces_of, row_spec, steps_of
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import ConfigError
from wire.identity.sealing import without_pictures
from wire.types import CommandType, Dimension, RobotSpec

SPEC = fake_spec(cameras=1)
MIXED = msgspec.structs.replace(
    SPEC,
    action=tuple(
        Dimension(meaning.value, "m", -1.0, 1.0, meaning)
        for meaning in (CommandType.absolute, CommandType.delta, CommandType.velocity)
    ),
)


def rows_of(steps: Steps, spec: RobotSpec, stride: int) -> Steps:
    """The rows of neighbouring steps, `stride` ticks each."""
    return resampled(steps, spec.control_hz, spec.control_hz / stride, spec.action)


def ticks_of(pieces: list[Steps]) -> list[tuple[int, int]]:
    """First tick and the one after the last."""
    assert all((np.diff(piece.row) == 1).all() for piece in pieces)
    return [(int(piece.row[0]), int(piece.row[-1]) + 1) for piece in pieces]


def test_a_whole_episode_is_one_piece() -> None:
    segments = fake_episode(SPEC, "e", steps=30, segment_steps=7)
    steps, frames = steps_of(segments, SPEC)
    assert ticks_of(pieces_of(steps, frames, frozenset())) == [(0, 30)]
    assert np.array_equal(steps.state, np.concatenate([s.state for s in segments]))
    assert np.flatnonzero(steps.done).tolist() == [29]


def test_a_row_has_the_lag_that_its_segment_arrived_with() -> None:
    segments = fake_episode(SPEC, "e", steps=8, segment_steps=4)
    steps, _ = steps_of(segments, SPEC, [3, 5])
    assert steps.lag.tolist() == [2] * 4 + [4] * 4
    assert rows_of(steps, SPEC, 4).lag.tolist() == [2, 4]
    assert steps_of(segments, SPEC)[0].lag.tolist() == [0] * 8


def test_a_missing_segment_cuts_and_what_it_brought_is_not_used() -> None:
    segments = fake_episode(SPEC, "e", steps=40, segment_steps=10, seed=1)
    pieces = pieces_of(*steps_of([segments[0], segments[2], segments[3]], SPEC), frozenset())
    # a frame lasts four ticks: those of tick 16 came with the missing segment and were seen until tick 19
    assert ticks_of(pieces) == [(0, 10), (20, 40)]
    # without the frame of tick 20, which the third segment brought, four steps less can be used
    third = segments[2]
    frames = third.frames["camera0"]
    short = msgspec.structs.replace(frames, times_ns=frames.times_ns[1:], encoded=frames.encoded[1:])
    cut = steps_of([segments[0], msgspec.structs.replace(third, frames={"camera0": short}), segments[3]], SPEC)
    assert ticks_of(pieces_of(*cut, frozenset())) == [(0, 10), (24, 40)]


def test_steps_that_saw_a_picture_that_is_held_back_are_left_out() -> None:
    segments = fake_episode(SPEC, "e", steps=40, segment_steps=10, seed=1)
    held = [segments[0], without_pictures(segments[1]), *segments[2:]]
    # those of tick 16 were seen until tick 19, and those of tick 8 until tick 11
    assert ticks_of(pieces_of(*steps_of(held, SPEC), frozenset())) == [(0, 12), (20, 40)]


def test_only_the_asked_actors_remain() -> None:
    actor = [0] * 5 + [1] * 3 + [3] * 2 + [1] * 4 + [0] * 2
    stored = steps_of(fake_episode(SPEC, "e", steps=16, actor=actor), SPEC)
    assert ticks_of(pieces_of(*stored, {"human"})) == [(5, 8), (10, 14)]
    assert ticks_of(pieces_of(*stored, {"human", "hold"})) == [(5, 14)]


def test_every_tick_a_row_keeps_all_as_it_is() -> None:
    segments = fake_episode(SPEC, "e", steps=20)
    steps, _ = steps_of(segments, SPEC)
    rows = rows_of(steps.at(slice(4, 20)), SPEC, 1)
    assert np.array_equal(rows.action, segments[0].executed[4:])
    assert np.array_equal(rows.reward, segments[0].reward[4:])
    assert np.array_equal(rows.actor, segments[0].actor[4:])
    assert rows.done.tolist() == [False] * 15 + [True]
    assert np.array_equal(rows.times_ns, segments[0].times_ns[4:])
    assert np.array_equal(rows.frame_times_ns[:, 0], segments[0].frame_times_ns["camera0"][4:])
    assert rows.row.tolist() == list(range(4, 20))


def test_fewer_rows_than_ticks_follow_the_meaning_of_each_dimension() -> None:
    segments = fake_episode(SPEC, "e", steps=11, actor=[0] * 7 + [1] * 4)
    executed = segments[0].executed[:, :3]
    steps = msgspec.structs.replace(steps_of(segments, SPEC)[0], action=executed)
    rows = rows_of(steps.at(slice(1, 11)), MIXED, 4)
    asked, ticks = executed.astype(np.float64), [slice(1, 5), slice(5, 9), slice(9, 11)]
    for row, here in enumerate(ticks):
        assert rows.action[row, 0] == executed[here][-1, 0]
        assert rows.action[row, 1] == pytest.approx(asked[here, 1].sum(), abs=1e-6)
        assert rows.action[row, 2] == pytest.approx(asked[here, 2].mean(), abs=1e-6)
        assert rows.reward[row] == pytest.approx(steps.reward[here].sum(), abs=1e-5)
    assert rows.row.tolist() == [1, 5, 9]
    assert np.array_equal(rows.state, segments[0].state[[1, 5, 9]])
    assert np.array_equal(rows.times_ns, segments[0].times_ns[[1, 5, 9]])
    assert np.array_equal(rows.frame_times_ns[:, 0], segments[0].frame_times_ns["camera0"][[1, 5, 9]])
    assert rows.actor.tolist() == [0, 1, 1]
    assert rows.done.tolist() == [False, False, True]


def test_a_piece_that_stops_before_the_end_is_not_done() -> None:
    steps, _ = steps_of(fake_episode(SPEC, "e", steps=20), SPEC)
    assert not rows_of(steps.at(slice(0, 19)), SPEC, 1).done.any()
    unfinished, _ = steps_of(fake_episode(SPEC, "e", steps=20, finished=False), SPEC)
    assert not rows_of(unfinished, SPEC, 1).done.any()


def test_an_episode_that_ended_in_an_empty_segment_is_done_with_its_last_step() -> None:
    first, second = fake_episode(SPEC, "e", steps=20, segment_steps=10, finished=False)
    empty = {
        name: getattr(second, name)[:0]
        for name in second.__struct_fields__
        if isinstance(getattr(second, name), np.ndarray)
    }
    last = msgspec.structs.replace(
        second,
        id="e/2",
        index=2,
        first_tick=20,
        last=True,
        outcome="aborted",
        frames={},
        frame_times_ns={"camera0": np.zeros(0, np.int64)},
        **empty,
    )
    steps, _ = steps_of([first, second, last], SPEC)
    assert rows_of(steps, SPEC, 1).done.tolist() == [False] * 19 + [True]


@pytest.mark.parametrize(("fps", "expected"), [("control", (80, 1)), ("camera", (20, 4)), (40, (40, 2)), (1, (1, 80))])
def test_rates_that_divide(fps: int | str, expected: tuple[int, int]) -> None:
    assert choose_rate(SPEC, fps) == expected


@pytest.mark.parametrize("fps", [30, 81, 160, 0, -20, "fast", "cameras"])
def test_rates_that_do_not(fps: int | str) -> None:
    with pytest.raises(ConfigError, match="fps"):
        choose_rate(SPEC, fps)


def test_rates_of_odd_robots() -> None:
    half = msgspec.structs.replace(SPEC, control_hz=12.5)
    with pytest.raises(ConfigError, match=r"12\.5 has no whole divisor"):
        choose_rate(half, "control")
    with pytest.raises(ConfigError, match="no camera"):
        choose_rate(fake_spec(cameras=0), "camera")


def test_the_spec_of_the_rows() -> None:
    rows = row_spec(MIXED, 20, 4)
    assert rows.control_hz == 20
    assert [(d.low, d.high) for d in rows.action] == [(-1, 1), (-4, 4), (-1, 1)]


def test_camera_names_become_keys() -> None:
    first, second = (msgspec.structs.replace(SPEC.cameras[0], name=name) for name in ("/wrist/left", "wrist.left"))
    assert image_keys(msgspec.structs.replace(SPEC, cameras=(first,))) == {
        "/wrist/left": "observation.images.wrist.left"
    }
    with pytest.raises(ConfigError, match="would share a name"):
        image_keys(msgspec.structs.replace(SPEC, cameras=(first, second)))


def test_pieces_never_overlap_and_cover_what_is_there() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        segments = fake_episode(SPEC, "e", steps=60, segment_steps=6, seed=int(rng.integers(1000)))
        there = [segment for segment in segments if rng.random() < 0.7]
        if not there:
            continue
        steps, frames = steps_of(there, SPEC)
        seen = zip(steps.row.tolist(), steps.frame_times_ns[:, 0].tolist(), strict=True)
        covered = [range(*ticks) for ticks in ticks_of(pieces_of(steps, frames, frozenset()))]
        assert list(itertools.chain(*covered)) == [tick for tick, time_ns in seen if time_ns in frames[0]]
