"""What does not fit: the bound holds at every moment, whatever the data, and nothing is forgotten when data changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.target import by_actor, imitation, max_lag, uniform
from tests.cloud_learner.buffer.sampling.planned import HUMAN, POLICY, Book, Reader, by_step, due_of, per_step

RATIOS = [0.05, 0.1, 0.5, 1.0, 2.0]


def made(book: Book, ratio: float, seed: int = 1, target=None, batch: int = 64, echo: float = 1.0, **options):
    """A sampler over all of a book of task a, and its reader."""
    universe = book.universe(("a",))
    cost = by_step(universe)
    least = 12 * int(cost(np.arange(len(universe))).max())
    budget = max(least, int(cost(np.arange(len(universe))).sum() * ratio))
    sampler = Sampler(universe, target or imitation(), cost, budget, batch, seed, echo, **options)
    return sampler, Reader(universe, cost, budget)


def episodes_of(lengths: list[list[int]], source: str = "demonstration") -> Book:
    book = Book()
    for each in lengths:
        book.record(each, "a", source)
    return book


def deviation(counts: np.ndarray, due: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(counts / counts.sum() - due).sum()) / 2


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.3, 0.7]), st.sampled_from([1.0, 2.5, 8.0]))
@pytest.mark.slow
def test_the_bound_holds_at_every_moment_of_many_epochs(seed, ratio, echo):
    rng = np.random.default_rng(seed)
    book = Book()
    for _ in range(int(rng.integers(20, 80))):
        actors = [(int(rng.integers(5, 60)), int(rng.choice([POLICY, HUMAN])), 1) for _ in range(2)]
        book.segment(book.episode("a", "online"), actors)
    target = uniform(factors=(by_actor({"human": float(rng.choice([1, 3])), "policy": 1}),))
    sampler, reader = made(book, ratio, int(rng.integers(100)), target, echo=echo)
    probability = per_step(reader.universe, due_of(sampler))
    steps = len(probability)
    stratum = sampler._strata[1]
    for number in range(1, int(4 * echo * steps / 64)):
        reader.carry_out(sampler.next(), 64)
        if number % 7:
            continue
        n, window = 64 * number, stratum.sweep.window
        # a draw of an epoch before may still wait: then it is missing
        bound = (stratum.epochs + 2) * (1 + probability) + (3 * echo * steps + 2 * window) * probability
        # what had to be repeated was drawn beside the plan
        assert sampler.stats.repeated < 0.01 * n + 64
        bound += sampler.stats.repeated
        assert (np.abs(reader.counts() - n * probability) < bound).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_from_the_first_batch_to_three_epochs_the_deviation_stays_below_what_is_stated(ratio):
    """Per episode: where all fits that of independent draws. Else what the held part, of random segments, allows at
    first, which falls in the first epoch, and is below one window's share from then on."""
    book = episodes_of([[80] * 4] * 100)
    due = np.full(100, 0.01)
    steps = 100 * 320
    found = {}
    for seed in range(3):
        sampler, reader = made(book, ratio, seed)
        counts, drawn = np.zeros(100, np.int64), 0
        for moment in (64, 0.1 * steps, 0.5 * steps, steps, 3 * steps):
            while drawn < moment:
                plan = sampler.next()
                reader.carry_out(plan, 64)
                counts += np.bincount(reader.universe.episode[plan.segments], minlength=100)
                drawn += 64
            found.setdefault(moment, []).append((deviation(counts, due), (counts == 0).mean()))
    rng = np.random.default_rng(0)
    for moment, figures in found.items():
        ours, never = np.mean(figures, 0)
        n = -(-int(moment) // 64) * 64
        independent = np.mean([deviation(rng.multinomial(n, due), due) for _ in range(50)])
        if ratio >= 1:
            assert ours < 1.2 * independent
            continue
        # a random part of the segments had its draws: an episode has that part of its four, give or take
        part = min(1.0, ratio + 0.75 * moment / steps)
        allowed = 0.55 * np.sqrt((1.05 - part) / (4 * part)) if moment < steps else ratio / 8
        assert ours < independent + allowed, moment
        if moment >= steps:
            assert never <= 0.05


def test_no_episode_waits_longer_than_with_independent_draws_where_all_fits():
    book = episodes_of([[80] * 4] * 48)
    longest = []
    for seed in range(5):
        sampler, reader = made(book, 2.0, seed)
        left, number = set(range(48)), 0
        while left:
            left -= set(reader.universe.episode[sampler.next().segments].tolist())
            number += 1
        longest.append(number)
    # coupons: 48 (ln 48 + 2) draws are enough in nine of ten runs
    assert np.median(longest) <= np.ceil(48 * (np.log(48) + 2) / 64)


@pytest.mark.parametrize("ratio", [0.3, 2.0])
def test_a_prune_takes_from_memory_what_is_gone_and_nothing_else(ratio):
    """One of twenty episodes: the others stay loaded."""
    book = episodes_of([[20] * 3] * 20)
    sampler, reader = made(book, ratio)
    for _ in range(60):
        reader.carry_out(sampler.next(), 64)
    before, loads = set(reader.loaded), reader.loads
    gone = set(np.flatnonzero(reader.universe.episode == 7).tolist())
    book.prune({8})
    assert set(book.follow(reader.universe).tolist()) == gone
    sampler.refresh(1)
    plan = sampler.next()
    reader.carry_out(plan, 64)
    assert not gone & reader.loaded
    assert len(before - gone - reader.loaded) <= 2, "but for segments whose draws were done"
    assert reader.loads - loads <= 64 // 20 + 2 if ratio < 1 else reader.loads == loads


@pytest.mark.parametrize("ratio", [0.1, 0.5])
@pytest.mark.parametrize("event", ["prune", "damage", "replace"])
def test_what_leaves_in_the_middle_of_an_epoch_changes_nothing_for_what_stays(event, ratio):
    """Episodes pruned, or a segment of theirs damaged, or the oldest pruned and another recorded: a bounded buffer."""
    book = episodes_of([[40, 40]] * 100)
    sampler, reader = made(book, ratio, batch=32)
    universe, batches = reader.universe, 100 * 80 // 32
    for number in range(batches):
        if number % 25 == 12:
            episode = 1 + number // 25
            if event == "damage":
                book.damage({2 * episode})
            else:
                book.prune({episode})
            if event == "replace":
                book.record([40, 40], "a")
            assert len(book.follow(universe)) == (1 if event == "damage" else 2)
            sampler.refresh(1)
        reader.carry_out(sampler.next(), 32)
    stayed = np.flatnonzero(~universe.gone[:200])
    assert len(stayed) == (190 if event == "damage" else 180)
    drawn = np.bincount([s for s, _ in reader.drawn.elements()], minlength=len(universe))[stayed]
    even = np.full(len(stayed), 1 / len(stayed))
    independent = np.random.default_rng(1).multinomial(drawn.sum(), even)
    assert drawn.min() > 20, "no episode is passed over, for 40 draws were due to each segment"
    assert deviation(drawn, even) < 0.75 * deviation(independent, even)


@pytest.mark.parametrize("ratio", [0.3, 10.0])
def test_a_bound_on_lag_loads_nothing_twice_that_fits(ratio):
    book = Book()
    for version in range(1, 25):
        for _ in range(10):
            book.segment(book.episode("a", "online"), [(20, POLICY, version)])
    sampler, reader = made(book, ratio, target=uniform(factors=(max_lag(8),)), newest_version=24)
    version = 24
    for _ in range(24):
        version += 1
        for _ in range(10):
            book.segment(book.episode("a", "online"), [(20, POLICY, version)])
        reader.universe.extend(book.index(reader.universe.watermark))
        sampler.refresh(version)
        eligible = np.flatnonzero(reader.universe.run_version >= version - 8)
        reader.drawn.clear()
        for _ in range(10):
            plan = sampler.next()
            reader.carry_out(plan, 64)
            assert set(plan.segments.tolist()) <= set(eligible.tolist())
    if ratio > 1:
        assert reader.loads <= len(reader.universe), "each once"
        assert len(reader.loaded) <= len(eligible)


def test_data_that_streams_in_has_its_share_from_its_first_batch():
    """Also while it makes the rest too large for memory, which forgets no more than has no room."""
    book = episodes_of([[40] * 2] * 30)
    sampler, reader = made(book, 1.3)
    for _ in range(100):
        reader.carry_out(sampler.next(), 64)
    switched = False
    for _ in range(30):
        book.record([40] * 2, "a")
        reader.universe.extend(book.index(reader.universe.watermark))
        before, loads = set(reader.loaded), reader.loads
        sampler.refresh(1)
        newest, drawn = len(reader.universe) - 2, 0
        for number in range(10):
            plan = sampler.next()
            reader.carry_out(plan, 64)
            drawn += int((plan.segments >= newest).sum())
            if number == 0 and sampler.stats.sweeping_strata and not switched:
                switched = True
                kept = reader.used - sum(80_000 for _ in range(reader.loads - loads))
                assert len(before & reader.loaded) > 0.6 * len(before) and kept
        due = 640 * 2 / len(reader.universe)
        assert abs(drawn - due) < 5 * np.sqrt(due) + 1
    assert switched


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_resumed_sampler_keeps_the_distribution_and_the_order(ratio):
    book = episodes_of([[40] * 3] * 40)
    sampler, reader = made(book, ratio, echo=2.0)
    for _ in range(37):
        reader.carry_out(sampler.next(), 64)
    state = json.dumps(sampler.state())
    assert len(state) < 60_000
    other, _ = made(book, ratio, echo=2.0)
    assert other.restore(json.loads(state))
    for _ in range(200):
        mine, theirs = other.next(), sampler.next()
        assert np.array_equal(mine.segments, theirs.segments)
        assert np.array_equal(mine.offsets, theirs.offsets)


def test_echo_may_change_on_the_way():
    book = episodes_of([[40] * 3] * 40)
    sampler, reader = made(book, 0.2)
    for _ in range(75):
        reader.carry_out(sampler.next(), 64)
    before, sampler.echo = reader.loads, 8.0
    for _ in range(150):
        reader.carry_out(sampler.next(), 64)
    loaded_at_one = before / (75 * 64)
    # the first of them were still planned with one
    assert (reader.loads - before) / (150 * 64) < loaded_at_one / 2
