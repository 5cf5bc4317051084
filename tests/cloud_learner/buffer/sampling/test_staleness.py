"""Rollouts that arrived too far behind are left out or weighed down; labels never are."""

from __future__ import annotations

import numpy as np
import pytest

from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import (
    Moment,
    SamplingDistribution,
    StalenessBound,
    StepRuns,
    imitation,
    lag_half_life,
    uniform,
)
from tests.cloud_learner.buffer.sampling.planned import HOLD, HUMAN, POLICY, SCRIPT, Book, by_step
from wire.errors import ConfigError

NOW = Moment(10)


def runs(actor: list[int], lag: list[int], demonstration: bool = False) -> StepRuns:
    n = len(actor)
    return StepRuns(
        np.array(actor, np.uint8),
        np.full(n, 3, np.int32),
        np.full(n, demonstration),
        np.full(n, -1, np.int8),
        np.full(n, np.nan, np.float32),
        np.array(lag),
    )


def sampler(index: SegmentIndex, target: SamplingDistribution, ratio: float = 2.0) -> Sampler:
    cost = by_step(index)
    return Sampler(index, target, cost, int(cost(np.arange(len(index))).sum() * ratio), 16, 3)


def recorded(book: Book, newest_version: int, acted: int, actor: int = POLICY, source: str = "online") -> int:
    """The row of an episode of one segment of 20 steps by version `acted`, `newest_version` being the fleet's."""
    book.newest_version = newest_version
    return book.segment(book.episode("a", source), [(20, actor, acted)], 0)


def drawn_rows(index: SegmentIndex, some: Sampler, plans: int = 40) -> dict[int, int]:
    """How often steps of each row were drawn."""
    segments = np.concatenate([some.next().segments for _ in range(plans)])
    rows, counts = np.unique(index.row[segments], return_counts=True)
    return dict(zip(rows.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize(("lag", "weight"), [(-1, 0.0), (3, -0.1), (3, 1.1), (3, float("nan"))])
def test_a_bound_that_cannot_be_is_refused(lag: int, weight: float) -> None:
    with pytest.raises(ConfigError, match="staleness: a lag of"):
        StalenessBound(lag, weight)


def test_only_what_the_policy_did_by_itself_is_stale_and_only_beyond_the_bound() -> None:
    bound = StalenessBound(4)
    everybody = [POLICY, HUMAN, SCRIPT, HOLD]
    assert uniform(staleness=bound).weights(runs(everybody, [5] * 4), NOW).tolist() == [0, 1, 1, 0]
    assert uniform(staleness=bound).weights(runs(everybody, [4] * 4), NOW).tolist() == [1, 1, 1, 0]
    assert uniform(staleness=bound).weights(runs(everybody, [99] * 4, demonstration=True), NOW).tolist() == [1, 1, 1, 0]
    assert uniform(staleness=StalenessBound(0)).weights(runs([POLICY] * 2, [0, 1]), NOW).tolist() == [1, 0]
    weighed = uniform(factors=(lag_half_life(7),), staleness=StalenessBound(4, 0.25))
    assert weighed.weights(runs([POLICY, POLICY, HUMAN], [4, 5, 5]), NOW).tolist() == [0.5, 0.125, 0.5]


def test_what_is_imitated_is_never_stale() -> None:
    seen = runs([POLICY, HUMAN, SCRIPT, HOLD], [99] * 4)
    for target in (imitation(), imitation(staleness=StalenessBound(0))):
        assert target.weights(seen, NOW).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("ratio", [2.0, 0.4])
def test_stale_rollouts_are_not_drawn_however_old_they_grow(ratio: float) -> None:
    book = Book()
    fresh = [recorded(book, 10, 10 - lag) for lag in (0, 1, 2)]
    stale = [recorded(book, 10, 10 - lag) for lag in (3, 4, 10)]
    labels = [recorded(book, 10, 0, HUMAN), recorded(book, 10, 0, POLICY, "demonstration")]
    # it acted by a version that this ledger did not have yet
    ahead = recorded(book, 10, 12)
    index = book.universe(("a",))
    for target, allowed in (
        (uniform(staleness=StalenessBound(2)), {*fresh, *labels, ahead}),
        (uniform(), {*fresh, *stale, *labels, ahead}),
    ):
        some = sampler(index, target, ratio)
        assert drawn_rows(index, some).keys() == allowed
        # a lag is what it was on arrival: nothing ages out
        some.refresh(1000)
        assert drawn_rows(index, some).keys() == allowed


def test_stale_rollouts_are_drawn_as_seldom_as_asked() -> None:
    book = Book()
    fresh, stale = recorded(book, 8, 8), recorded(book, 8, 1)
    index = book.universe(("a",))
    counts = drawn_rows(index, sampler(index, uniform(staleness=StalenessBound(3, 0.25))), plans=400)
    assert counts[stale] / (counts[fresh] + counts[stale]) == pytest.approx(0.2, abs=0.02)


def test_a_bound_that_nothing_exceeds_changes_no_plan() -> None:
    book = Book()
    book.newest_version = 9
    book.record_some(np.random.default_rng(3), 12)
    index = book.universe()
    ours, plain = sampler(index, uniform(staleness=StalenessBound(9))), sampler(index, uniform())
    for _ in range(10):
        a, b = ours.next(), plain.next()
        for name in ("drop", "load", "segments", "offsets", "probability"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


def test_stale_steps_are_counted_with_what_comes_and_goes() -> None:
    book = Book()
    recorded(book, 10, 10)
    recorded(book, 10, 5)
    recorded(book, 10, 0, HUMAN)
    recorded(book, 10, 0, POLICY, "demonstration")
    index = book.universe(("a",))
    some = sampler(index, uniform(staleness=StalenessBound(3)))
    assert (some.stats.rollout_steps, some.stats.stale_steps, some.stats.eligible_steps) == (40, 20, 60)
    unbounded = sampler(index, uniform()).stats
    assert (unbounded.rollout_steps, unbounded.stale_steps) == (40, 0)
    recorded(book, 20, 10)
    book.follow(index)
    some.refresh(20)
    assert (some.stats.rollout_steps, some.stats.stale_steps) == (60, 40)
    book.prune({2})
    book.follow(index)
    some.refresh(20)
    assert (some.stats.rollout_steps, some.stats.stale_steps) == (40, 20)


def test_it_goes_on_with_another_bound_where_it_was_stopped() -> None:
    book = Book()
    fresh = [recorded(book, 10, 10) for _ in range(4)]
    for _ in range(4):
        recorded(book, 10, 2)
    index = book.universe(("a",))
    before = sampler(index, uniform(), 0.5)
    before.next()
    after = sampler(index, uniform(staleness=StalenessBound(3)), 0.5)
    assert not after.restore(before.state())
    assert drawn_rows(index, after).keys() <= set(fresh)
