"""Dividing bytes and draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.buffer.sampling.budget import allot, apportion


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
