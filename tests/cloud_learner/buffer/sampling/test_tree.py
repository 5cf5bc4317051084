"""Sums over a growing column are those one would add up, however the column came about."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_learner.buffer.sampling.tree import Tree


def grown(rng: np.random.Generator, values: np.ndarray, combine: np.ufunc = np.add) -> Tree:
    """A tree that came to hold `values` in many steps, other values in between."""
    tree, length = Tree(combine), 0
    while length < len(values):
        length = min(len(values), length + int(rng.integers(1, 1 + len(values))))
        tree.grow(length)
        some = np.flatnonzero(rng.random(length) < 0.5)
        tree.put(some, rng.random(len(some)))
    tree.put(np.arange(len(values)), values)
    return tree


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 31, 32, 33, 1000, 1024, 40_000]))
def test_sums_positions_and_maxima_are_right_and_do_not_depend_on_the_way(seed, length):
    rng = np.random.default_rng(seed)
    values = rng.random(length) * (rng.random(length) < rng.choice([0.01, 0.5, 1]))
    tree, other = grown(rng, values), grown(rng, values)
    assert tree.values[:length].tolist() == values.tolist()
    assert tree.total == other.total == pytest.approx(values.sum())
    assert grown(rng, values, np.maximum).total == values.max()
    for at in rng.integers(0, length + 1, 5).tolist():
        assert tree.before(at) == other.before(at) == pytest.approx(values[:at].sum())
        assert tree.since(at) == other.since(at) == pytest.approx(values[at:].sum())
        assert values[at:].any() or tree.since(at) == 0
    if not values.any():
        return
    sums = rng.random(200) * tree.total
    at, into = tree.find(sums)
    after = np.append(np.cumsum(values[::-1])[::-1], 0)[at + 1]
    assert (values[at] > 0).all()
    np.testing.assert_allclose(after + into, sums, atol=1e-9)
    assert (into > -1e-9).all() and (into < values[at] + 1e-9).all()
    assert all(np.array_equal(mine, its) for mine, its in zip((at, into), other.find(sums), strict=True))


def test_the_ends_are_found_by_the_smallest_and_the_largest_sum():
    tree = Tree()
    tree.grow(5000)
    tree.put(np.array([7, 40, 4000]), np.array([0.1, 0.2, 0.3]))
    at, _ = tree.find(np.array([0.0, 0.3 - 1e-12, 0.3 + 1e-12, tree.total, 2 * tree.total]))
    assert at.tolist() == [4000, 4000, 40, 7, 7]
