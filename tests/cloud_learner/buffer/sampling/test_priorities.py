"""Steps are drawn by the priorities that somebody wrote, in both ways, from the refresh that learned of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import by_label, uniform
from tests.cloud_learner.buffer.sampling.planned import POLICY, Book, Reader, by_step, same

RATIOS = [2.0, 0.1]
"""of the memory to all the data: drawn independently, and swept"""
BATCH = 64
TARGET = uniform(factors=(by_label("priority", 0.6, least=0.01, unknown=2.0),))


def some_index(segments: int = 120) -> SegmentIndex:
    """Segments of 10 to 39 steps of one task, and priorities of most of them."""
    rng, book = np.random.default_rng(1), Book()
    for _ in range(segments // 2):
        episode = book.episode("a", "online")
        for _ in range(2):
            book.segment(episode, [(int(rng.integers(5, 20)), POLICY, 1) for _ in range(2)])
    return book.universe(("a",))


def priorities(index: SegmentIndex, seed: int) -> np.ndarray:
    """float32[n], some nan, some below what counts at least."""
    rng = np.random.default_rng(seed)
    labels = rng.exponential(size=len(index)).astype(np.float32)
    labels[rng.random(len(index)) < 0.2] = np.nan
    labels[rng.random(len(index)) < 0.1] = -1.0
    return labels


def made(index: SegmentIndex, ratio: float) -> tuple[Sampler, Reader]:
    cost = by_step(index)
    budget = int(cost(np.arange(len(index))).sum() * ratio)
    return Sampler(index, TARGET, cost, budget, BATCH, 3), Reader(index, cost, budget)


def due(index: SegmentIndex, labels: np.ndarray) -> np.ndarray:
    """float64[n]: how probable one step of each segment should be."""
    weight = np.where(np.isnan(labels), 2.0, np.maximum(np.nan_to_num(labels), 0.01).astype(np.float64) ** 0.6)
    return weight / (weight * index.steps).sum()


@pytest.mark.parametrize("ratio", RATIOS)
def test_steps_are_drawn_by_their_priorities(ratio):
    index = some_index()
    labels = priorities(index, 5)
    index.put_labels(index.row, labels)
    sampler, reader = made(index, ratio)
    probability = due(index, labels)
    each = np.repeat(probability, index.steps)
    plans = 4 * len(each) // BATCH
    for _ in range(plans):
        plan = sampler.next()
        reader.carry_out(plan, BATCH)
        np.testing.assert_allclose(plan.probability, probability[plan.segments], rtol=1e-5)
    n, counts, stratum = plans * BATCH, reader.counts(), sampler._strata[1]
    if ratio > 1:
        assert not stratum.sweep
        # per degree of freedom; 1 for independent draws
        assert 0.85 < ((counts - n * each) ** 2 / (n * each)).mean() < 1.15
    else:
        # what is stated in `sweep`, a draw of the epoch before may be late
        bound = (stratum.epochs + 2) * (1 + each) + (3 * len(each) + 2 * stratum.sweep.window) * each
        assert (np.abs(counts - n * each) < bound + sampler.stats.repeated).all()
    by_segment = np.add.reduceat(counts, np.append(0, np.cumsum(index.steps)[:-1]))
    assert np.corrcoef(by_segment, probability * index.steps)[0, 1] > 0.97


@pytest.mark.parametrize("ratio", RATIOS)
def test_new_priorities_count_from_the_next_refresh(ratio):
    index = some_index()
    before, after = priorities(index, 5), priorities(index, 6)
    index.put_labels(index.row, before)
    sampler, reader = made(index, ratio)
    for _ in range(20):
        reader.carry_out(sampler.next(), BATCH)
    index.put_labels(index.row, after)
    sampler.refresh(0)
    probability, drawn, plans = due(index, after), np.zeros(len(index)), 5 * int(index.steps.sum()) // BATCH
    for _ in range(plans):
        plan = sampler.next()
        reader.carry_out(plan, BATCH)
        np.testing.assert_allclose(plan.probability, probability[plan.segments], rtol=1e-5)
        drawn += np.bincount(plan.segments, minlength=len(index))
    share = drawn / drawn.sum()
    assert np.corrcoef(share, probability * index.steps)[0, 1] > 0.97
    assert abs(np.corrcoef(share, due(index, before) * index.steps)[0, 1]) < 0.7


def test_only_what_has_another_priority_is_weighed_again(monkeypatch):
    index = some_index()
    sampler, _ = made(index, 2.0)
    weighed, weights_at = [], sampler._known.weights_at

    def weigh(runs, *moment):
        weighed.append(np.unique(index.run_segment[runs]).tolist())
        return weights_at(runs, *moment)

    monkeypatch.setattr(sampler._known, "weights_at", weigh)
    rows = index.row[[3, 50, 70]]
    assert index.put_labels(rows, np.float32([1, np.nan, 5])).tolist() == [3, 70], "nan is what it had"
    sampler.refresh(0)
    assert weighed == [[3, 70]]
    assert not len(index.put_labels(rows, np.float32([1, np.nan, 5])))
    sampler.refresh(0)
    assert weighed == [[3, 70], []]
    assert not len(index.put_labels(np.array([10**6]), np.float32([1]))), "a row that is not here"


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_state_is_gone_on_from_exactly_while_the_priorities_are_the_same(ratio):
    index, last = some_index(), priorities(some_index(), 9)
    sampler, reader = made(index, ratio)
    # visits that are held began with other priorities
    for labels in (priorities(index, 5), priorities(index, 6), last):
        index.put_labels(index.row, labels)
        sampler.refresh(0)
        for _ in range(7):
            reader.carry_out(sampler.next(), BATCH)
    state = json.dumps(sampler.state(), allow_nan=False)
    again = some_index()
    again.put_labels(again.row, last)
    other, _ = made(again, ratio)
    assert other.restore(json.loads(state))
    assert all(same(sampler.next(), other.next()) for _ in range(60))

    changed = some_index()
    last[17] = 3.0
    changed.put_labels(changed.row, last)
    other, _ = made(changed, ratio)
    assert not other.restore(json.loads(state))
    plan = other.next()
    np.testing.assert_allclose(plan.probability, due(changed, last)[plan.segments], rtol=1e-5)
