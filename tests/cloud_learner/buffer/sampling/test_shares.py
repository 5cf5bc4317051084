"""Dividing batches among tasks and their parts, and bytes and draws among these."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.buffer.sampling.shares import Losses, OnlineShare, TaskMix, allot, apportion, strata_shares
from wire.errors import ConfigError, InvalidDataError


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_what_fits_is_given_whole():
    assert allot(100, np.array([0.5, 0.5]), ints(1, 1), ints(60, 40)).tolist() == [60, 40]


def test_the_small_get_all_they_need_and_the_rest_share():
    got = allot(1000, np.array([0.2, 0.4, 0.4]), ints(1, 1, 1), ints(50, 5000, 5000))
    assert got.tolist() == [50, 475, 475]
    got = allot(900, np.array([0.25, 0.75]), ints(1, 1), ints(5000, 5000))
    assert got == pytest.approx([225, 675], abs=1)


def test_everybody_gets_the_least_or_nobody_anything():
    assert allot(100, np.array([0.99, 0.01]), ints(10, 40), ints(5000, 5000)).tolist() == [60, 40]
    assert allot(100, np.array([0.5, 0.5]), ints(60, 41), ints(5000, 5000)) is None


@given(st.integers(0, 2**32 - 1))
def test_the_budget_is_kept_and_used(seed):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 9))
    most = rng.integers(1, 10**9, k)
    least = (most * rng.random(k)).astype(np.int64)
    share = rng.dirichlet(np.full(k, 0.3)) + 1e-9
    budget = int(rng.integers(1, 2 * 10**9))
    got = allot(budget, share, least, most)
    if got is None:
        assert least.sum() > budget
        return
    assert got.sum() <= budget
    assert (got >= np.minimum(least, most)).all()
    assert (got <= most).all()
    assert got.sum() >= min(budget, most.sum()) - k - budget * 1e-6


@given(st.integers(0, 2**32 - 1))
def test_over_any_number_of_batches_each_part_gets_its_share_to_within_a_draw(seed):
    rng = np.random.default_rng(seed)
    k, batch = int(rng.integers(1, 20)), int(rng.choice([1, 3, 64, 256]))
    share = rng.dirichlet(np.full(k, 0.3))
    total, credit = np.zeros(k, np.int64), np.zeros(k)
    for number in range(1, 100):
        draws, credit = apportion(batch, share, credit)
        assert draws.sum() == batch
        assert (draws >= 0).all()
        total += draws
        assert np.abs(total - number * batch * share).max() < 1.5


def test_a_changed_share_acts_at_once_and_a_part_without_one_gets_nothing():
    credit = np.zeros(3)
    for share in ([0.5, 0.5, 0], [0, 0.1, 0.9], [1, 0, 0], [0.2, 0.3, 0.5]):
        draws, credit = apportion(100, np.array(share), credit)
        assert draws.sum() == 100
        assert np.abs(draws - 100 * np.array(share)).max() < 2
        assert not draws[np.array(share) == 0].any()
        assert np.isfinite(credit).all()


TASKS = ("a", "b", "c")


def shares(mix: TaskMix, mass, losses: Losses | None = None) -> list[list[float]]:
    return strata_shares(mix, TASKS, np.array(mass, float), losses).tolist()


def test_tasks_share_evenly_and_those_without_data_give_theirs_away():
    assert shares(TaskMix(), [[2, 2], [1, 0], [0, 0]]) == [[0.25, 0.25], [0.5, 0], [0, 0]]
    assert shares(TaskMix(shares={"a": 3, "c": 1}), [[1, 3], [9, 9], [1, 0]]) == [[0.1875, 0.5625], [0, 0], [0.25, 0]]
    assert shares(TaskMix(shares={"c": 1}), [[1, 3], [9, 9], [0, 0]]) == [[0, 0]] * 3
    assert shares(TaskMix(), [[0, 0]] * 3) == [[0, 0]] * 3


def test_a_fixed_online_share_holds_where_there_is_both():
    assert shares(TaskMix(online=0.8), [[5, 1], [5, 0], [0, 1]]) == [
        pytest.approx([0.2 / 3, 0.8 / 3]),
        pytest.approx([1 / 3, 0]),
        pytest.approx([0, 1 / 3]),
    ]
    assert shares(TaskMix(online=0), [[5, 1], [5, 0], [0, 1]]) == [[0.5, 0], [0.5, 0], [0, 0]]
    assert shares(TaskMix(online=1), [[5, 1], [5, 0], [0, 1]]) == [[0, 0.5], [0, 0], [0, 0.5]]


def test_the_adaptive_share_is_that_of_the_paper():
    """w_on = e^(a l_on) / (e^(a l_on) + e^(l_off)), SOP, arXiv 2601.03044."""
    losses = Losses(OnlineShare())
    for _ in range(9):
        losses.note("a", True, 0.4)
        losses.note("a", False, 0.5)
    assert losses.share("a") == 0.5, "before there are 10 of each"
    losses.note("a", True, 0.4)
    losses.note("a", False, 0.5)
    assert losses.share("a") == pytest.approx(math.exp(0.6) / (math.exp(0.6) + math.exp(0.5)))
    assert losses.share("b") == 0.5
    mix = TaskMix(shares={"a": 1}, online=OnlineShare())
    assert shares(mix, [[5, 1], [0, 0], [0, 0]], losses)[0] == pytest.approx([1 - losses.share("a"), losses.share("a")])
    assert shares(mix, [[5, 1], [0, 0], [0, 0]], None)[0] == [0.5, 0.5]


def test_the_adaptive_share_is_clipped_and_forgets():
    losses = Losses(OnlineShare())
    for _ in range(200):
        losses.note("a", True, 1000.0)
        losses.note("a", False, 0.0)
    assert losses.share("a") == 0.8
    for _ in range(200):
        losses.note("a", True, 0.0)
        losses.note("a", False, 1000.0)
    assert losses.share("a") == 0.2, "only the last 200 count, and nothing overflows"


def test_the_adaptive_share_goes_on_after_a_stop_and_refuses_what_is_no_loss():
    losses = Losses(OnlineShare())
    rng = np.random.default_rng(0)
    for value in rng.random(300):
        losses.note("a", value < 0.5, float(value))
    other = Losses(OnlineShare())
    other.restore(json.loads(json.dumps(losses.state())))
    assert other.share("a") == losses.share("a")
    assert other.state() == losses.state()
    with pytest.raises(InvalidDataError, match="task 'a'"):
        losses.note("a", True, math.nan)


def noted(losses: Losses, **means: float) -> Losses:
    for task, mean in means.items():
        for _ in range(10):
            losses.note(task, True, mean)
    return losses


def test_tasks_that_are_learned_less_get_more_and_none_less_than_its_floor():
    mix, there = TaskMix(difficulty=1.0), [[1, 0], [1, 0], [1, 0]]
    losses = noted(Losses(OnlineShare()), a=0.1, b=0.3)
    assert shares(mix, there, None) == [pytest.approx([1 / 3, 0])] * 3
    # what has no losses yet counts as their mean
    assert [row[0] for row in shares(mix, there, losses)] == pytest.approx([0.5 / 3, 1.5 / 3, 1 / 3])
    assert [row[0] for row in shares(TaskMix(difficulty=2.0), there, losses)] == pytest.approx(
        [0.25 / 3.5, 2.25 / 3.5, 1 / 3.5]
    )
    floored = TaskMix(difficulty=2.0, floor=0.5)
    assert [row[0] for row in shares(floored, there, losses)] == pytest.approx(
        [0.5 * 0.25 / 3.5 + 0.5 / 3, 0.5 * 2.25 / 3.5 + 0.5 / 3, 0.5 / 3.5 + 0.5 / 3]
    )
    assert [row[0] for row in shares(TaskMix(shares={"a": 1}, floor=0.5), there)] == [1, 0, 0], "left out on purpose"


def test_base_data_keeps_its_share_by_its_steps_whatever_came_of_the_tasks():
    mix = TaskMix(base=frozenset({"b", "c"}), base_share=0.2, difficulty=1.0, floor=0.5)
    losses = noted(Losses(OnlineShare()), a=0.1, b=9.0)
    assert shares(mix, [[1, 3], [30, 0], [10, 0]], losses) == [
        pytest.approx([0.2, 0.6]),
        pytest.approx([0.15, 0]),
        pytest.approx([0.05, 0]),
    ]
    assert shares(mix, [[0, 0], [30, 0], [10, 0]]) == [[0, 0], [0.75, 0], [0.25, 0]], "before there is anything else"
    assert shares(mix, [[1, 1], [0, 0], [0, 0]]) == [[0.5, 0.5], [0, 0], [0, 0]]


@pytest.mark.parametrize("wrong", [{"difficulty": -1.0}, {"floor": 1.5}, {"base_share": 1.0}, {"shares": {"a": -1.0}}])
def test_a_mix_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=str(next(iter(wrong))).split("_")[0]):
        TaskMix(**wrong)
