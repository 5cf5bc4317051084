"""The sampler: right probabilities within the memory it was given, the same plans again, and odd data."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloud_learner.buffer.check import DISCARDED, OUTCOMES
from cloud_learner.buffer.sampling.sampler import BatchPlan, Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.shares import OnlineShare, TaskMix, strata_shares
from cloud_learner.buffer.sampling.target import (
    Recent,
    SamplingDistribution,
    by_actor,
    by_outcome,
    imitation,
    lag_half_life,
    max_lag,
    uniform,
)
from tests.cloud_learner.buffer.sampling.planned import (
    HOLD,
    HUMAN,
    POLICY,
    Book,
    Reader,
    by_step,
    due_of,
    per_step,
    same,
)
from wire.errors import ConfigError, InvalidDataError


def rest(universe: SegmentIndex, cost) -> int:
    """Bytes of everything."""
    return int(cost(np.arange(len(universe))).sum())


def draw(sampler: Sampler, reader: Reader, plans: int, batch: int) -> None:
    for _ in range(plans):
        reader.carry_out(sampler.next(), batch)


def steps_before(universe: SegmentIndex) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(universe.steps, dtype=np.int64)])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Per degree of freedom; 1 is what independent draws would have."""
    drawn = expected > 0
    assert not counts[~drawn].any(), "a step without weight was drawn"
    return float(((counts - expected)[drawn] ** 2 / expected[drawn]).mean())


UNEQUAL = (by_actor({"human": 3, "policy": 0.3, "script": 1}),)


# --- probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_through_a_tenth_of_the_data_draws_every_step_as_often_as_it_should():
    """Several tasks and parts, unequal weights and segments, a cache ratio of 0.1, more than 20 passes."""
    book = Book()
    book.record_some(np.random.default_rng(0), 200, far=20)
    universe = book.universe()
    cost = by_step(universe)
    budget = rest(universe, cost) // 10
    mix = TaskMix(shares={"a": 2, "b": 3})
    sampler = Sampler(universe, uniform(factors=UNEQUAL, mix=mix), cost, budget, 32, 3, echo=1.5)
    reader = Reader(universe, cost, budget)
    plans = 0
    while min(stratum.epochs for stratum in sampler._strata) < 21:
        reader.carry_out(sampler.next(), 32)
        plans += 1
    assert sampler.stats.sweeping_strata == 4
    assert sampler.stats.repeated < 1e-4 * plans * 32, "hardly ever was there no room for the next"
    probability = per_step(universe, due_of(sampler))
    assert probability.sum() == pytest.approx(1)
    expected = plans * 32 * probability
    counts = reader.counts()
    assert chi_square(counts, expected) < 0.3, "far below what independent draws would have"
    # the bound of each stratum, with what rounding its share adds
    for number, stratum in enumerate(sampler._strata):
        window = stratum.sweep.window
        epoch = sampler.echo * stratum.steps
        mine = np.repeat((universe.task == number // 2) & (universe.online == number % 2), universe.steps)
        within = probability[mine] / probability[mine].sum()
        slack = (stratum.epochs + 1) * (1 + within) + (2 * epoch + window + 3) * within
        assert (np.abs(counts - expected)[mine] < slack).all()


@pytest.mark.slow
def test_late_data_gets_its_share_from_the_moment_it_came():
    """Over refreshes, joins and new passes; averaged over seeds, so that a small bias would show."""
    ratios, passes, loads, drawn = [], 0, 0, 0
    for seed in range(14):
        book, rng = Book(), np.random.default_rng(7)
        for _ in range(24):
            book.record(rng.integers(5, 60, 4), "a", "online")
        universe = book.universe(("a",))
        cost = by_step(universe)
        budget = rest(universe, cost) // 3
        sampler = Sampler(universe, imitation(), cost, budget, 64, seed, echo=2)
        reader = Reader(universe, cost, budget)
        expected = np.zeros(int(universe.steps.sum()))
        for number in range(300):
            if number % 10 == 9 and number < 200:
                book.record(rng.integers(5, 60, 4), "a", "online")
                universe.extend(book.index(universe.watermark))
                sampler.refresh(1)
                expected = np.append(expected, np.zeros(int(universe.steps.sum()) - len(expected)))
            if number % 10 == 9 or not number:
                probability = per_step(universe, due_of(sampler))
            reader.carry_out(sampler.next(), 64)
            expected += 64 * probability
        counts, first = reader.counts(), steps_before(universe)
        ratios.append(
            [
                counts[first[s] : first[s + 16]].sum() / expected[first[s] : first[s + 16]].sum()
                for s in range(0, len(universe) - 15, 16)
            ]
        )
        assert chi_square(counts, expected) < 1
        assert np.abs(counts - expected).max() < 20
        passes, loads, drawn = passes + sampler.stats.epochs, loads + reader.loads, drawn + 300 * 64
    assert passes >= 14 * 2
    mean, error = np.mean(ratios, 0), np.std(ratios, 0) / np.sqrt(len(ratios))
    assert (np.abs(mean - 1) < 4 * error + 0.02).all(), mean
    # a segment has about 32 steps, which are drawn twice while it is in memory
    assert loads / drawn < 1.5 / 64


@pytest.mark.slow
def test_late_data_keeps_its_share_while_a_new_pass_begins():
    """Else it would be missing from what still waits of the pass before: half of its draws in the next window."""
    drawn = np.zeros(2)
    for seed in range(40):
        book = Book()
        for _ in range(30):
            book.record([20, 20], "a")
        universe = book.universe(("a",))
        cost = by_step(universe)
        sampler = Sampler(universe, imitation(), cost, rest(universe, cost) // 2, 32, seed, echo=2)
        for _ in range(60):  # of 75 batches in a pass
            sampler.next()
        for _ in range(3):
            book.record([20, 20], "a")
        universe.extend(book.index(universe.watermark))
        sampler.refresh(1)
        while sampler.stats.epochs == 1:
            sampler.next()
        window = sampler._strata[0].sweep.window
        for _ in range(int(window / 32)):
            drawn += np.bincount(sampler.next().segments >= 60, minlength=2)
    assert drawn[1] / drawn.sum() == pytest.approx(3 / 33, rel=0.15)


@pytest.mark.slow
def test_a_resident_stratum_is_read_once_and_drawn_by_weight():
    book = Book()
    book.record_some(np.random.default_rng(2), 40)
    universe = book.universe()
    cost = by_step(universe)
    budget = rest(universe, cost)
    sampler = Sampler(universe, uniform(factors=UNEQUAL), cost, budget, 256, 5, echo=1)
    reader = Reader(universe, cost, budget)
    draw(sampler, reader, 60, 256)
    assert sampler.stats.whole_strata == 4
    reader.drawn.clear()
    draw(sampler, reader, 1500, 256)
    expected = 1500 * 256 * per_step(universe, due_of(sampler))
    freedom = int((expected > 0).sum())
    assert abs(chi_square(reader.counts(), expected) - 1) < 5 * np.sqrt(2 / freedom)
    alive = np.unique(universe.run_segment[due_of(sampler) > 0])
    assert reader.loads == len(alive), "everything that may be drawn was read, and once"


def test_the_first_batches_draw_all_demonstrations_alike():
    """Twelve of each of four tasks, 150 batches of 64, all the pretraining there is: as independent draws would."""
    book, rng = Book(), np.random.default_rng(0)
    for _ in range(12):
        for task in ("a", "b", "c", "d"):
            book.record(rng.integers(70, 90, 4), task)
    universe = book.universe(("a", "b", "c", "d"))
    cost = by_step(universe)
    sampler = Sampler(universe, imitation(), cost, 10**9, 64, 1)
    of_step = np.repeat(universe.episode, universe.steps)
    due = np.bincount(of_step, per_step(universe, due_of(sampler))) * 150 * 64
    drawn = np.zeros(48)
    for number in range(150):
        segments = sampler.next().segments
        if number == 0:
            assert len(np.unique(universe.episode[segments])) > 24, "the first batch mixes them already"
        drawn += np.bincount(universe.episode[segments], minlength=48)
    assert drawn.min() > 0.5 * due.min()
    # of independent draws: half the sum of |N(0, due)|
    assert np.abs(drawn - due).sum() / 2 < 1.3 * np.sqrt(2 / np.pi * due).sum() / 2


def test_strata_get_their_shares_to_within_a_draw_in_any_number_of_batches():
    book = Book()
    for task, source, episodes in (("a", "online", 3), ("a", "demonstration", 9), ("b", "demonstration", 2)):
        for _ in range(episodes):
            book.record([20, 30], task, source)
    universe = book.universe(("a", "b", "c"))
    cost = by_step(universe)
    mix = TaskMix(shares={"a": 2, "b": 1, "c": 5}, online=0.3)
    sampler = Sampler(universe, imitation(mix=mix), cost, 10**9, 10, 5)
    drawn = np.zeros((3, 2))
    for number in range(1, 200):
        plan = sampler.next()
        np.add.at(drawn, (universe.task[plan.segments], universe.online[plan.segments].astype(int)), 1)
        expected = 10 * number * np.array([[1.4 / 3, 0.6 / 3], [1 / 3, 0], [0, 0]])
        assert np.abs(drawn - expected).max() < 2


def test_an_adaptive_share_acts_with_the_next_batch():
    book = Book()
    for source in ("online", "demonstration"):
        for _ in range(5):
            book.record([40], "a", source)
    universe = book.universe(("a",))
    sampler = Sampler(universe, imitation(mix=TaskMix(online=OnlineShare())), by_step(universe), 10**9, 100, 1)
    online = universe.online[sampler.next().segments].sum()
    assert online == 50
    for _ in range(20):
        sampler.note("a", True, 5.0)
        sampler.note("a", False, 0.1)
    assert universe.online[sampler.next().segments].sum() == 80
    sampler = Sampler(universe, imitation(), by_step(universe), 10**9, 100, 1)
    sampler.note("a", True, 5.0)  # of no use to a mix that does not adapt
    with pytest.raises(InvalidDataError, match="loss"):
        Sampler(universe, imitation(mix=TaskMix(online=OnlineShare())), by_step(universe), 10**9, 100, 1).note(
            "a", True, float("nan")
        )


@pytest.mark.parametrize("ratio", [0.3, 2.0])
def test_the_newest_steps_get_their_part_and_stay_in_memory(ratio):
    book = Book()
    for _ in range(40):
        book.record([30], "a", "online")
    book.record([30], "b", "demonstration")
    universe = book.universe()
    cost = by_step(universe)
    budget = int(rest(universe, cost) * ratio)
    sampler = Sampler(universe, imitation(Recent(0.5, 45)), cost, budget, 64, 1, echo=2)
    # whole segments of 30 steps
    reader = Reader(universe, cost, budget)
    for number in range(60):
        reader.carry_out(sampler.next(), 64)
        newest = [s for s in range(len(universe)) if universe.task[s] == 0][-2:]
        assert all(segment in reader.loaded for segment in newest)
        if number % 20 == 19:
            book.record([30], "a", "online")
            universe.extend(book.index(universe.watermark))
            sampler.refresh(1)
    reader.drawn.clear()
    draw(sampler, reader, 400, 64)
    counts, first = reader.counts(), steps_before(universe)
    of_a = np.flatnonzero(universe.task == 0)
    newest = np.concatenate([np.arange(first[s], first[s + 1]) for s in of_a])[-60:]
    of_all = 0.5 * 0.5 + 0.5 * 0.5 * 60 / (30 * len(of_a))
    assert counts[newest].sum() / counts.sum() == pytest.approx(of_all, abs=0.02)
    # a task with less than that has all of it newest, and no more than its share
    assert counts[np.repeat(universe.task == 1, universe.steps)].sum() == pytest.approx(counts.sum() / 2, abs=2)


@pytest.mark.parametrize("ratio", [0.2, 2.0])
def test_a_plan_says_how_probable_each_of_its_steps_was(ratio):
    book = Book()
    book.record_some(np.random.default_rng(5), 60, far=20)
    universe = book.universe()
    cost = by_step(universe)
    target = uniform(Recent(0.3, 50), factors=UNEQUAL, mix=TaskMix(shares={"a": 2, "b": 3}))
    sampler = Sampler(universe, target, cost, int(rest(universe, cost) * ratio), 64, 3)
    runs = np.repeat(np.arange(len(universe.run_count)), universe.run_count)
    offsets = np.concatenate([np.arange(f, f + n) for f, n in zip(universe.run_first, universe.run_count, strict=True)])
    shares = strata_shares(target.mix, universe.tasks, sampler._mass, None)
    every = sampler._probability(runs, sampler._parts(shares)[1])
    assert every.sum() == pytest.approx(1)
    by_step_of = {(int(universe.run_segment[r]), int(o)): p for r, o, p in zip(runs, offsets, every, strict=True)}
    for _ in range(20):
        plan = sampler.next()
        expect = [by_step_of[at] for at in zip(plan.segments.tolist(), plan.offsets.tolist(), strict=True)]
        np.testing.assert_allclose(plan.probability, expect)
        assert (plan.probability > 0).all()
    np.testing.assert_allclose(every, due_of(sampler)[runs])


# --- a target that moves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.3, 2.0])
def test_no_step_is_drawn_that_became_too_old(ratio):
    book = Book()
    for version in range(1, 31):
        number = book.episode("a", "online")
        for position in range(3):
            book.segment(number, [(20, POLICY, version)], 0 if position == 2 else -1)
    universe = book.universe(("a",))
    cost = by_step(universe)
    budget = int(rest(universe, cost) * ratio)
    sampler = Sampler(universe, uniform(factors=(max_lag(10),)), cost, budget, 64, 1, echo=4, newest_version=30)
    reader = Reader(universe, cost, budget)
    for newest in range(30, 40):
        sampler.refresh(newest)
        reader.drawn.clear()
        draw(sampler, reader, 6, 64)
        versions = {int(universe.run_version[universe.run_offsets[s]]) for s, _ in reader.drawn}
        assert min(versions) >= newest - 10
    sampler.refresh(41)
    with pytest.raises(InvalidDataError, match="policy version 41"):
        sampler.next()
    number = book.episode("a", "online")
    book.segment(number, [(20, POLICY, 41)])
    universe.extend(book.index(universe.watermark))
    sampler.refresh(41)
    plan = sampler.next()
    reader.carry_out(plan, 64)
    assert set(plan.segments.tolist()) == {len(universe) - 1}
    assert len(reader.loaded) == 1, "what is too old has left memory"


@pytest.mark.parametrize("ratio", [0.3, 10.0])
def test_a_half_life_is_followed_while_versions_go_by(ratio):
    book, rng = Book(), np.random.default_rng(1)
    for version in range(1, 21):
        book.segment(book.episode("a", "online"), [(40, POLICY, version)])
    universe = book.universe(("a",))
    cost = by_step(universe)
    budget = int(rest(universe, cost) * ratio)
    sampler = Sampler(universe, uniform(factors=(lag_half_life(4),)), cost, budget, 64, 1, echo=4, newest_version=20)
    reader = Reader(universe, cost, budget)
    expected = np.zeros(int(universe.steps.sum()))
    for version in range(20, 50):
        number = book.episode("a", "online")
        book.segment(number, [(int(rng.integers(20, 60)), POLICY, version)])
        universe.extend(book.index(universe.watermark))
        sampler.refresh(version)
        expected = np.append(expected, np.zeros(int(universe.steps.sum()) - len(expected)))
        expected += 64 * 10 * per_step(universe, due_of(sampler))
        draw(sampler, reader, 10, 64)
    counts, first = reader.counts(), steps_before(universe)
    by_segment = np.add.reduceat(counts, first[:-1]), np.add.reduceat(expected, first[:-1])
    assert np.abs(by_segment[0] - by_segment[1]).max() < 0.25 * by_segment[1].max()
    assert np.corrcoef(*by_segment)[0, 1] > 0.97


def test_outcomes_count_when_they_are_known():
    book = Book()
    numbers = [book.episode("a", "online") for _ in range(4)]
    for number in numbers:
        book.segment(number, [(20, HUMAN, 1)])
    universe = book.universe(("a",))
    target = imitation(factors=(by_outcome({"success": 1}, unknown=0),))
    sampler = Sampler(universe, target, by_step(universe), 10**9, 32, 1)
    with pytest.raises(InvalidDataError, match="no weight"):
        sampler.next()
    book.segment(numbers[2], [(10, HUMAN, 1)], outcome=0)
    book.segment(numbers[3], [(10, HUMAN, 1)], outcome=1)
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    for _ in range(5):
        plan = sampler.next()
        assert set(universe.episode_numbers[universe.episode[plan.segments]].tolist()) == {numbers[2]}
    assert set(plan.segments.tolist()) == {2, 4}, "an old segment of the episode, too"


def test_what_a_person_discarded_is_drawn_no_more():
    book = Book()
    numbers = [book.episode("a", "online") for _ in range(2)]
    for number in numbers:
        book.segment(number, [(20, HUMAN, 1)])
    universe = book.universe(("a",))
    sampler = Sampler(universe, imitation(), by_step(universe), 10**9, 32, 1)
    assert set(np.concatenate([sampler.next().segments for _ in range(5)]).tolist()) == {0, 1}
    book.segment(numbers[0], [(10, HUMAN, 1)], outcome=DISCARDED)
    book.segment(numbers[1], [(10, HUMAN, 1)], outcome=OUTCOMES.index("unjudged"))
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    assert set(np.concatenate([sampler.next().segments for _ in range(5)]).tolist()) == {1, 3}
    assert universe.left_out.tolist() == [True, False, True, False]
    assert universe.finished(demonstration=False) == 1


# --- memory -----------------------------------------------------------------------------------------------------------


def test_data_that_outgrows_the_memory_is_swept_and_fits_again_after_a_prune():
    book, rng = Book(), np.random.default_rng(4)
    first = [book.record(rng.integers(10, 50, 3), "a") for _ in range(10)]
    universe = book.universe(("a",))
    cost = by_step(universe)
    budget = 2 * rest(universe, cost)
    sampler = Sampler(universe, imitation(), cost, budget, 64, 1, echo=1)
    reader = Reader(universe, cost, budget)
    draw(sampler, reader, 30, 64)
    assert sampler.stats.whole_strata == 1
    for _ in range(8):
        for _ in range(4):
            book.record(rng.integers(10, 50, 3), "a")
        universe.extend(book.index(universe.watermark))
        sampler.refresh(1)
        draw(sampler, reader, 5, 64)
    assert sampler.stats.sweeping_strata == 1
    draw(sampler, reader, 100, 64)
    book.prune({*first, *range(11, 30)})
    gone = book.follow(universe)
    assert len(gone) == 3 * 29
    sampler.refresh(1)
    reader.drawn.clear()
    draw(sampler, reader, 100, 64)
    assert sampler.stats.whole_strata == 1
    assert not {segment for segment, _ in reader.drawn} & set(gone.tolist())
    assert not reader.loaded & set(gone.tolist())


def test_a_new_task_gets_room_from_the_others():
    book, rng = Book(), np.random.default_rng(4)
    for _ in range(30):
        book.record(rng.integers(10, 50, 3), "a")
    universe = book.universe()
    cost = by_step(universe)
    budget = rest(universe, cost) // 3
    sampler = Sampler(universe, imitation(), cost, budget, 64, 1, echo=4)
    reader = Reader(universe, cost, budget)
    draw(sampler, reader, 40, 64)
    for _ in range(30):
        book.record(rng.integers(10, 50, 3), "b")
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    reader.drawn.clear()
    draw(sampler, reader, 300, 64)
    assert sampler.stats.sweeping_strata == 2
    expected = 300 * 64 * per_step(universe, due_of(sampler))
    assert np.abs(reader.counts() - expected).max() < 30
    assert reader.peak > 0.8 * budget


def test_a_memory_that_is_too_small_names_what_is_enough():
    book = Book()
    book.record([10, 4096, 20], "a")
    book.record([10, 500], "b")
    universe = book.universe()
    cost = by_step(universe)
    with pytest.raises(ConfigError, match="cache_bytes") as refused:
        Sampler(universe, imitation(), cost, 1_000_000, 64, 1)
    enough = int(str(refused.value).split("at least ")[1].split(",")[0])
    assert enough == 4_596_000
    sampler = Sampler(universe, imitation(), cost, enough, 64, 1)
    draw(sampler, Reader(universe, cost, enough), 300, 64)
    with pytest.raises(ConfigError):
        Sampler(universe, imitation(), cost, enough - 1, 64, 1)


def test_a_refused_refresh_is_made_up_for():
    book = Book()
    for _ in range(10):
        book.record([20, 20], "a")
    universe = book.universe(("a",))
    cost = by_step(universe)
    budget = rest(universe, cost)
    sampler = Sampler(universe, imitation(), cost, budget, 64, 1)
    reader = Reader(universe, cost, budget)
    draw(sampler, reader, 100, 64)
    huge, late = book.record([4096], "a"), book.record([7], "a")
    universe.extend(book.index(universe.watermark))
    with pytest.raises(ConfigError):
        sampler.refresh(1)
    with pytest.raises(ConfigError, match="cache_bytes"):
        sampler.next()
    book.prune({huge, 1})
    book.follow(universe)
    sampler.refresh(1)
    draw(sampler, reader, 100, 64)
    assert {late, 10} <= {int(universe.episode_numbers[universe.episode[s]]) for s, _ in reader.drawn}


def same_strata(one: Sampler, other: Sampler) -> None:
    """What two samplers know of their strata, to the last bit."""
    assert one._known.content == other._known.content
    for mine, its in zip(one._strata, other._strata, strict=True):
        for name in ("bytes", "largest", "steps", "mass"):
            assert getattr(mine, name) == getattr(its, name), name
        assert np.array_equal(mine._runs.all, its._runs.all) and mine.masses() == its.masses()
        for ours, theirs in ((mine._mass, its._mass), (mine._cost, its._cost)):
            # one may have more room than the other
            for these, those in zip(ours._levels, theirs._levels, strict=False):
                same = min(len(these), len(those))
                assert np.array_equal(these[:same], those[:same]) and not these[same:].any() and not those[same:].any()


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize(
    "factors",
    [(max_lag(3),), (by_outcome({"success": 2, "failure": 0.5}),), (max_lag(3), by_outcome({"success": 2}))],
)
def test_weights_that_move_lead_to_the_same_strata_as_new_ones(factors, prunes):
    rng = np.random.default_rng(5)
    book = Book()
    universe = SegmentIndex(("a", "b"))
    target = uniform(factors=factors)
    sampler = Sampler(universe, target, by_step(universe), 10**9, 64, 1)
    for version in range(1, 12):
        for _ in range(3):
            number = book.episode(str(rng.choice(["a", "b"])), str(rng.choice(["online", "demonstration"])))
            for part in range(3):
                run = int(rng.integers(1, 9)), int(rng.choice([POLICY, HUMAN])), version
                book.segment(number, [run], int(rng.integers(3)) if part == 2 else -1)
                if prunes and part == 1 and version > 6:
                    book.prune({int(rng.integers(1, number))})
                book.follow(universe)
                sampler.refresh(version)
        same_strata(sampler, Sampler(universe, target, by_step(universe), 10**9, 64, 1, newest_version=version))


@pytest.mark.parametrize("factor", [max_lag(3), by_outcome({"success": 2})])
def test_a_version_or_an_outcome_costs_what_it_changes(factor, monkeypatch):
    """Not what is there: runs that weigh as before are not weighed again."""
    book = Book()
    for version in range(1, 101):
        number = book.episode("a", "online")
        book.segment(number, [(4, POLICY, version)])
        book.segment(number, [(4, POLICY, version)], outcome=0)
    universe = SegmentIndex(("a", "b"))
    universe.extend(book.index())
    sampler = Sampler(universe, uniform(factors=(factor,)), by_step(universe), 10**9, 64, 1, newest_version=100)
    weighed, weights_at = [], sampler._known.weights_at

    def weigh(runs, *moment):
        weighed.append(len(runs))
        return weights_at(runs, *moment)

    monkeypatch.setattr(sampler._known, "weights_at", weigh)
    number = book.episode("a", "online")
    for outcome in (-1, 0):
        book.segment(number, [(4, POLICY, 101)], outcome)
    universe.extend(book.index(universe.watermark))
    sampler.refresh(101)
    # those of the versions 97 and 101, and of the episode that ended
    assert max(weighed) == (4 if factor.by_version else 2)
    weighed.clear()
    book.prune({7})
    assert len(book.follow(universe)) == 2
    sampler.refresh(101)
    assert weighed == [2], "and a prune what it takes"


# --- the same again ---------------------------------------------------------------------------------------------------


def some_target(rng: np.random.Generator, tasks: tuple[str, ...]) -> SamplingDistribution:
    factors = (
        max_lag(int(rng.integers(0, 6))),
        lag_half_life(float(rng.choice([0.5, 3]))),
        by_outcome({"success": 1, "failure": float(rng.choice([0, 0.5]))}, unknown=float(rng.choice([0, 1]))),
        by_actor({"human": 3, "policy": float(rng.choice([0, 1]))}),
    )
    chosen = tuple(factor for factor in factors if rng.random() < 0.25)
    online = (None, None, 0.0, 0.3, 1.0, OnlineShare())[rng.integers(6)]
    shares = None if rng.random() < 0.6 else {task: float(rng.choice([0.5, 1, 2])) for task in tasks}
    recent = Recent(float(rng.choice([0, 0, 0.3, 1])), int(rng.choice([1, 50, 500])))
    return (imitation if rng.random() < 0.4 else uniform)(recent, chosen, TaskMix(shares, online))


class Twin:
    """A sampler from the state of another, over its own universe of the same ledger."""

    def __init__(self, book: Book, tasks: tuple[str, ...], state: dict, **settings) -> None:
        self.universe = book.universe(tasks)
        cost = by_step(self.universe, settings.pop("bytes_per_step"))
        self.sampler = Sampler(self.universe, cost=cost, newest_version=9, **settings)
        assert self.sampler.restore(json.loads(json.dumps(state)))
        self.reader = Reader(self.universe, cost, settings["budget_bytes"])

    def follow(self, plan: BatchPlan, universe: SegmentIndex, batch: int) -> None:
        """Plan the same in ledger rows."""
        mine = self.sampler.next()
        self.reader.carry_out(mine, batch)
        assert mine.number == plan.number
        assert np.array_equal(self.universe.row[mine.segments], universe.row[plan.segments])
        assert np.array_equal(mine.offsets, plan.offsets)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_any_sampler_keeps_its_budget_and_goes_on_exactly(seed):
    """Random data, targets, budgets and events: every plan is carried out, and twins from its states follow it."""
    rng = np.random.default_rng(seed)
    tasks = ("a", "b", "c")[: rng.integers(1, 4)]
    book = Book()
    book.record_some(rng, int(rng.integers(0, 50)), tasks, far=int(rng.choice([2, 10, 60, 400])))
    universe = book.universe(tasks)
    bytes_per_step, batch = int(rng.choice([1, 1000])), int(rng.choice([1, 8, 64, 256]))
    cost = by_step(universe, bytes_per_step)
    budget = int((rest(universe, cost) or 1000) * rng.choice([0.1, 0.2, 0.5, 1.0, 3])) + 1
    settings = {
        "target": some_target(rng, tasks),
        "budget_bytes": budget,
        "batch": batch,
        "seed": seed,
        "echo": float(rng.choice([1, 1, 1.5, 8, 100])),
    }
    twin, version = None, 3
    try:
        sampler = Sampler(universe, cost=cost, newest_version=version, **settings)
        reader = Reader(universe, cost, budget)
        for _ in range(50):
            event = rng.random()
            if event < 0.15:
                book.record_some(rng, int(rng.integers(0, 8)), tasks)
                for one in (universe, twin.universe) if twin else (universe,):
                    one.extend(book.index(one.watermark))
            if event < 0.25:
                version += int(rng.integers(0, 2))
                sampler.refresh(version)
                if twin:
                    twin.sampler.refresh(version)
            elif event < 0.28:
                book.prune(set(rng.integers(1, book.row + 2, 2).tolist()))
                book.follow(universe)
                sampler.refresh(version)
                twin = None
            elif event < 0.4:
                twin = Twin(book, tasks, sampler.state(), bytes_per_step=bytes_per_step, **settings)
            if rng.random() < 0.5:
                note = str(rng.choice(tasks)), bool(rng.random() < 0.5), float(rng.random() * 3)
                sampler.note(*note)
                if twin:
                    twin.sampler.note(*note)
            try:
                plan = sampler.next()
            except InvalidDataError:
                if twin:
                    with pytest.raises(InvalidDataError):
                        twin.sampler.next()
                continue
            reader.carry_out(plan, batch)
            held = np.array(sorted(reader.loaded), np.int64)
            assert sampler.stats.loaded_bytes == cost(held).sum()
            if twin:
                twin.follow(plan, universe, batch)
    except ConfigError as refused:
        assert "cache_bytes" in str(refused)


def test_the_same_seed_plans_the_same_and_another_does_not():
    book = Book()
    book.record_some(np.random.default_rng(3), 30)
    universe = book.universe()
    cost = by_step(universe)
    for budget in (rest(universe, cost) // 4, 10**9):
        plans = [
            [sampler.next() for _ in range(20)]
            for sampler in (Sampler(universe, uniform(), cost, budget, 64, seed, echo=1) for seed in (1, 1, 2))
        ]
        assert all(same(one, two) for one, two in zip(plans[0], plans[1], strict=True))
        assert not any(same(one, two) for one, two in zip(plans[0], plans[2], strict=True))
        assert [plan.number for plan in plans[0]] == list(range(20))


def test_a_state_of_other_data_or_settings_is_gone_on_from_with_new_passes():
    book = Book()
    book.record_some(np.random.default_rng(3), 30)
    universe = book.universe()
    cost = by_step(universe)
    budget = rest(universe, cost) // 2
    sampler = Sampler(universe, uniform(), cost, budget, 64, 1, echo=1)
    for _ in range(20):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))
    other = Sampler(universe, uniform(), cost, budget * 2, 64, 1, echo=1)
    assert not other.restore(state)
    assert other.next().number == 20
    book.prune({3, 4})
    pruned = book.universe()
    other = Sampler(pruned, uniform(), by_step(pruned), budget, 64, 1, echo=1)
    assert not other.restore(state)
    draw(other, Reader(pruned, by_step(pruned), budget), 30, 64)
    assert other.stats.epochs > sampler.stats.epochs, "with other random numbers than before"
    fewer = book.universe(("b",))
    other = Sampler(fewer, uniform(), by_step(fewer), budget, 64, 1, echo=1)
    assert not other.restore(state)
    assert other.next().number == 20


def test_what_is_no_state_is_refused():
    book = Book()
    book.record([20, 20], "a")
    universe = book.universe(("a",))
    sampler = Sampler(universe, imitation(), by_step(universe), 10**9, 8, 1)
    good = sampler.state()
    for wrong in ({}, {**good, "strata": "x"}, {**good, "credit": None}):
        with pytest.raises(InvalidDataError, match="sampler"):
            Sampler(universe, imitation(), by_step(universe), 10**9, 8, 1).restore(wrong)
    sampler.next()
    with pytest.raises(InvalidDataError, match="before the first plan"):
        sampler.restore(good)


# --- odd data ---------------------------------------------------------------------------------------------------------


def carried_out(
    book: Book, target: SamplingDistribution, ratio: float, batch: int = 64, echo: float = 8.0, plans: int = 60
):
    universe = book.universe(("a", "b"))
    cost = by_step(universe)
    budget = max(int(rest(universe, cost) * ratio), int(cost(np.arange(len(universe))).max()) * 2)
    sampler = Sampler(universe, target, cost, budget, batch, 1, echo)
    reader = Reader(universe, cost, budget)
    draw(sampler, reader, plans, batch)
    return sampler, reader


@pytest.mark.parametrize("ratio", [0.1, 2.0])
@pytest.mark.parametrize("echo", [1.0, 7.3, 100.0])
@pytest.mark.parametrize(
    "episodes",
    [[[1]], [[4096]], [[1, 1, 1]], [[4096], [1], [2, 1]], [[1]] * 2000, [[3, 4096, 3], [20] * 40]],
    ids=["one step", "one huge segment", "three steps", "huge and tiny", "tiny episodes", "mixed"],
)
def test_small_and_lopsided_data_is_planned(episodes, echo, ratio):
    book = Book()
    for lengths in episodes:
        book.record(lengths, "a")
    _, reader = carried_out(book, imitation(), ratio, echo=echo)
    steps = sum(map(sum, episodes))
    if steps < 300:
        assert len(reader.drawn) == steps, "every step is drawn sooner or later"
        counts = np.array(list(reader.drawn.values()))
        assert counts.min() > 0.7 * 60 * 64 / steps


def test_weights_that_are_zero_almost_everywhere_load_almost_nothing():
    book = Book()
    for number in range(300):
        episode = book.episode("a", "online")
        runs = [(30, POLICY, 1), (2, HUMAN, 1), (8, HOLD, 1)] if number % 50 == 7 else [(30, POLICY, 1), (10, HOLD, 1)]
        book.segment(episode, runs)
    sampler, reader = carried_out(book, imitation(), 0.1)
    assert sampler.stats.eligible_steps == 12
    assert len(reader.drawn) == 12
    assert all(30 <= offset < 32 for _, offset in reader.drawn)
    assert reader.loads == 6


def test_one_step_with_nearly_all_the_weight_is_drawn_nearly_always():
    book = Book()
    book.segment(book.episode("a", "online"), [(1, HUMAN, 1)])
    for _ in range(200):
        book.segment(book.episode("a", "online"), [(50, POLICY, 1)])
    target = uniform(factors=(by_actor({"human": 1e6, "policy": 1}),))
    _, reader = carried_out(book, target, 0.05, plans=200)
    expected = 200 * 64 * 1e6 / (1e6 + 10_000)
    assert reader.drawn[0, 0] == pytest.approx(expected, rel=0.01)


def test_a_part_without_a_share_is_neither_drawn_nor_loaded():
    book = Book()
    for source in ("online", "demonstration"):
        for task in ("a", "b"):
            for _ in range(10):
                book.record([20, 30], task, source)
    target = imitation(Recent(0.3, 100), mix=TaskMix(shares={"a": 1}, online=0.0))
    _, reader = carried_out(book, target, 2.0)
    universe = reader.universe
    loaded = np.array(sorted(reader.loaded))
    assert set(zip(universe.task[loaded].tolist(), universe.online[loaded].tolist(), strict=True)) == {(0, False)}


def test_a_task_whose_data_comes_later_joins_in():
    book = Book()
    book.record([30, 30], "a")
    universe = book.universe()
    sampler = Sampler(universe, imitation(), by_step(universe), 10**9, 64, 1)
    assert set(universe.task[sampler.next().segments].tolist()) == {0}
    book.record([30, 30], "b")
    universe.extend(book.index(universe.watermark))
    assert set(universe.task[sampler.next().segments].tolist()) == {0}, "only what a refresh has seen"
    sampler.refresh(1)
    assert np.bincount(universe.task[sampler.next().segments]).tolist() == [32, 32]


def test_while_there_is_nothing_to_learn_from_it_says_why():
    universe = SegmentIndex(("a", "b"))
    sampler = Sampler(universe, imitation(mix=TaskMix(shares={"b": 1})), by_step(universe), 10**6, 8, 1)
    with pytest.raises(InvalidDataError, match="there is no step to learn from yet: no segment"):
        sampler.next()
    book = Book()
    book.segment(book.episode("a", "online"), [(20, POLICY, 1)])
    universe.extend(book.index())
    sampler.refresh(1)
    with pytest.raises(InvalidDataError, match="gives no weight to any of 1 segments at policy version 1"):
        sampler.next()
    book.record([20], "a")
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    with pytest.raises(InvalidDataError, match=r"no share to a \(offline\), the only data"):
        sampler.next()
    book.record([20], "b")
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    assert sampler.next().number == 0


def test_settings_that_cannot_work_are_refused():
    universe = SegmentIndex(("reach",))
    good = {"batch": 8, "seed": 1, "echo": 1.0}
    for wrong in ({"batch": 0}, {"seed": -1}, {"echo": 0.9}, {"echo": float("inf")}):
        with pytest.raises(ConfigError):
            Sampler(universe, imitation(), by_step(universe), 10**6, **{**good, **wrong})
    with pytest.raises(ConfigError, match="Did you mean 'reach'"):
        Sampler(universe, imitation(mix=TaskMix(shares={"raech": 1})), by_step(universe), 10**6, **good)
    book = Book()
    book.record([20], "reach")
    universe.extend(book.index())
    with pytest.raises(ConfigError, match="cost"):
        Sampler(universe, imitation(), lambda segments: -np.ones(len(segments)), 10**6, **good)


def test_a_backlog_enters_memory_in_parts():
    book = Book()
    book.record([20] * 5, "a")
    universe = book.universe(("a",))
    cost = by_step(universe)
    sampler = Sampler(universe, imitation(), cost, 10**9, 64, 1)
    reader = Reader(universe, cost, 10**9)
    draw(sampler, reader, 20, 64)
    for _ in range(100):
        book.record([20] * 5, "a")
    universe.extend(book.index(universe.watermark))
    sampler.refresh(1)
    before, most = reader.loads, 0
    for _ in range(60):
        reader.carry_out(sampler.next(), 64)
        most, before = max(most, reader.loads - before), reader.loads
    assert reader.loads > 495, "what is drawn is loaded"
    assert most <= 64


# --- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2.0, 0.1], ids=["resident", "sweep"])
@pytest.mark.slow
def test_a_plan_costs_the_same_over_a_hundred_times_the_runs(ratio):
    """Processor time of this thread, the shortest of many: how fast the machine is does not count."""
    from tests.cloud_learner.buffer.sampling.test_segment_index import large_index

    def shortest(segments: int) -> float:
        universe = SegmentIndex(("a",))
        universe.extend(large_index(0, segments))
        cost = by_step(universe)
        budget = int(rest(universe, cost) * ratio)
        sampler = Sampler(universe, uniform(), cost, budget, 256, 1, echo=8)
        took = []
        for _ in range(600):
            begin = time.thread_time()
            sampler.next()
            took.append(time.thread_time() - begin)
        assert sampler.stats.whole_strata == (ratio > 1)
        return min(took[300:])

    assert shortest(100_000) < 10 * shortest(1_000)
