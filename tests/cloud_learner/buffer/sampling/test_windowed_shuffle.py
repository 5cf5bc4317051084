"""The sweep: its bound holds whatever the data, the window stays in its room, and it goes on exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_learner.buffer.sampling.cache_ops import CacheOps
from cloud_learner.buffer.sampling.calendar_queue import CalendarQueue
from cloud_learner.buffer.sampling.epoch import BLOCK_STEPS, Epoch, EpochState, Population, cut, generator
from cloud_learner.buffer.sampling.windowed_shuffle import WindowedShuffle, WindowedShuffleState


def population(counts, weights, costs=None, segments=None, first_run: int = 0) -> Population:
    counts = np.array(counts, np.int64)
    segment = np.arange(len(counts)) + first_run if segments is None else np.array(segments)
    return Population(
        run=np.arange(len(counts)) + first_run,
        segment=segment,
        first=np.zeros(len(counts), np.int64),
        count=counts,
        weight=np.array(weights, float),
        cost=counts * 10 if costs is None else np.array(costs, np.int64),
    )


def some_population(rng: np.random.Generator) -> Population:
    """Unequal segments and weights, sometimes hugely."""
    k = int(rng.integers(1, 120))
    counts = np.maximum(1, rng.lognormal(2.5, rng.choice([0.1, 1.2]), k).astype(np.int64))
    counts = np.minimum(counts, 4096)
    weights = rng.lognormal(0, rng.choice([0.01, 1.0, 3.0]), k)
    return population(counts, weights, counts * int(rng.integers(1, 50)) + int(rng.integers(0, 100)))


@dataclass
class Driven:
    """A sweep over one population, and what came out of it."""

    population: Population
    draws: float
    ratio: float = 0.0
    """of the data that fits a window; 0: all"""
    seed: int = 0
    keep: bool = False
    block_bytes: int = 10**9
    moves: CacheOps = field(default_factory=CacheOps)
    passes: int = 0

    def __post_init__(self) -> None:
        self.cost = dict(zip(self.population.segment.tolist(), self.population.cost.tolist(), strict=True))
        self.sweep = WindowedShuffle(self.make, self.costs, self.moves, self.keep)
        self.alive = np.ones(int(self.population.run.max()) + 1, bool)
        self.first = np.concatenate([[0], np.cumsum(self.population.count)])
        self.counts = np.zeros(self.first[-1], np.int64)
        self.probability = np.repeat(self.population.weight, self.population.count) / self.population.mass
        self.taken = 0
        self.held: dict[tuple[int, ...], int] = {}

    def costs(self, block: tuple[int, ...]) -> list[int]:
        return [self.cost[segment] for segment in block]

    def make(self) -> Epoch:
        scale, window_bytes = self.draws / self.population.mass, int(self.ratio * sum(self.cost.values()))
        state = EpochState(self.passes, 0, scale, window_bytes, self.block_bytes, [(0, 0)])
        self.passes += 1
        made = Epoch(state, (self.seed,))
        made.join(self.population)
        return made

    def remake(self, state: EpochState) -> Epoch:
        made = Epoch(state, (self.seed,))
        made.join(self.population)
        return made

    def take(self, count: int, room: int = 10**12) -> tuple[np.ndarray, np.ndarray]:
        self.sweep.start_batch()
        runs, offsets = self.sweep.take(count, room, self.alive)
        for block in self.moves.drop:
            self._leave(block)
        for block in self.moves.admit:
            self.held[block] = self.held.get(block, 0) + 1
        assert {segment for block in self.held for segment in block} >= set(self.population.segment[runs].tolist())
        for block in self.moves.release:
            self._leave(block)
        self.moves.clear()
        np.add.at(self.counts, self.first[runs] + offsets, 1)
        self.taken += len(runs)
        return runs, offsets

    def _leave(self, block: tuple[int, ...]) -> None:
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]

    def check_bound(self) -> None:
        """The bound of windowed_shuffle.py's docstring."""
        p, newest = self.probability, self.sweep.newest
        largest = int(newest.tokens.max()) + 1
        bound = self.passes * (1 + p) + (newest.draws + newest.window + largest) * p
        assert (np.abs(self.counts - self.taken * p) < bound + 1e-6).all()


# --- passes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.003, 0.3, 1.0, 2.5, 8.0, 40.0]))
@pytest.mark.slow
def test_in_a_pass_every_step_gets_what_it_is_due_to_within_one(seed, echo):
    rng = np.random.default_rng(seed)
    some = some_population(rng)
    draws = max(1.0, echo * float(some.count.sum()))
    driven = Driven(some, draws, float(rng.choice([0, 0.05])), seed, block_bytes=int(rng.choice([1, 300, 10**9])))
    made = driven.make()
    counts = np.zeros(len(driven.counts), np.int64)
    assert made.tokens.max() <= max(64, made.window / 4)
    for block in made.queue.tolist():
        tokens = made.draw(block)
        assert len(tokens.run) == made.tokens[block] > 0
        assert (np.diff(tokens.time) >= 0).all()
        assert set(tokens.segments) == set(some.segment[tokens.run].tolist())
        assert made.bytes[block] >= sum(driven.costs(tokens.segments))
        assert (tokens.offset < some.count[tokens.run]).all()
        np.add.at(counts, driven.first[tokens.run] + tokens.offset, 1)
    assert (np.abs(counts - draws * driven.probability) < 1 + 1e-6).all()
    assert abs(counts.sum() - draws) < 1 + 1e-6


@pytest.mark.slow
def test_systematic_sampling_has_no_bias():
    some = population([3, 1, 7, 2], [1.0, 0.3, 2.0, 0.05])
    expected = 4.0 * np.repeat(some.weight, some.count) / some.mass
    total = np.zeros(13)
    rounds = 3000
    for seed in range(rounds):
        driven = Driven(some, 4.0, 0, seed)
        made = driven.make()
        for block in made.queue.tolist():
            tokens = made.draw(block)
            np.add.at(total, driven.first[tokens.run] + tokens.offset, 1)
    spread = np.sqrt(expected * (1 - np.minimum(expected, 1)) / rounds) + 1e-9
    assert (np.abs(total / rounds - expected) < 5 * spread + 1e-9).all()


def test_blocks_are_whole_segments_of_enough_steps_or_bytes():
    segment = np.array([0, 0, 1, 2, 2, 3, 4, 5])
    count = np.array([100, 100, 60, 10, 10, 255, 1, 300])
    cost = np.array([5, 5, 5, 5, 5, 5, 5, 5])
    assert cut(segment, count, cost, 10**9).tolist() == [0, 3, 6, 8]
    assert cut(segment, count, cost, 11).tolist() == [0, 3, 6, 8]
    assert cut(segment, count, cost, 5).tolist() == [0, 2, 3, 5, 6, 7, 8]
    assert cut(segment, count, cost, 0).tolist() == [0, 2, 3, 5, 6, 7, 8]
    assert cut(segment[:0], count[:0], cost[:0], 9).tolist() == [0]
    tiny = np.arange(5000)
    bounds = cut(tiny, np.ones(5000, np.int64), np.ones(5000, np.int64), 10**9)
    assert (np.diff(bounds)[:-1] == BLOCK_STEPS).all()


@given(st.integers(0, 2**32 - 1))
def test_no_block_is_above_its_bytes_unless_it_is_one_segment(seed):
    rng = np.random.default_rng(seed)
    segment = np.repeat(np.arange(40), rng.integers(1, 4, 40))
    cost = rng.integers(1, 100, 40)[segment]
    count = rng.integers(1, 200, len(segment))
    most = int(rng.integers(1, 300))
    bounds = cut(segment, count, cost, most)
    assert bounds[0] == 0
    assert bounds[-1] == len(segment)
    for begin, end in pairwise(bounds.tolist()):
        inside = np.unique(segment[begin:end])
        assert end > begin
        assert not np.isin(segment[end:], inside).any(), "a segment is never cut"
        used = sum(int(cost[segment == one][0]) for one in inside)
        assert used <= most or len(inside) == 1


# --- the bound --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 1.0, 3.0, 10.0]), st.sampled_from([0.02, 0.1, 0.5, 1.0]))
@pytest.mark.slow
def test_the_bound_holds_at_every_moment_of_many_passes(seed, echo, ratio):
    rng = np.random.default_rng(seed)
    some = some_population(rng)
    draws = max(8.0, min(echo * float(some.count.sum()), 30_000))
    driven = Driven(some, draws, ratio, seed, block_bytes=max(1, int(some.cost.sum() * ratio / 8)))
    # also with so little room that blocks have to wait for it
    room = max(int(some.cost[np.unique(some.segment, return_index=True)[1]].sum() * ratio), int(some.cost.max()) * 3)
    driven.sweep.begin()
    while driven.passes < 6:
        driven.take(int(rng.integers(1, max(2, int(draws / 7)))), room)
        driven.check_bound()
        assert driven.sweep.bytes <= room


@pytest.mark.slow
def test_over_many_passes_only_rounding_is_left():
    """Independent draws would have a chi-square of about the number of steps."""
    rng = np.random.default_rng(3)
    some = population(rng.integers(1, 60, 100), rng.lognormal(0, 1, 100))
    driven = Driven(some, 6.0 * some.count.sum(), 0.1, 1, block_bytes=2000)
    driven.sweep.begin()
    while driven.passes <= 60:
        driven.take(512)
    expected = driven.taken * driven.probability
    chi_square = float(((driven.counts - expected) ** 2 / expected).sum())
    assert chi_square < 0.2 * len(expected)
    driven.check_bound()


def test_the_window_mixes_blocks_and_keeps_them_a_window_long():
    some = population([32] * 400, [1.0] * 400)
    draws = 4.0 * some.count.sum()
    driven = Driven(some, draws, 0.1, 2, block_bytes=320)
    driven.sweep.begin()
    for _ in range(30):
        driven.take(256)
    blocks = []
    for _ in range(50):
        runs, _ = driven.take(256)
        blocks.append(len(np.unique(some.segment[runs])))
        assert driven.sweep.bytes <= 1.3 * some.cost.sum() / 10
    assert np.mean(blocks) > 35, "most of the forty segments in memory are in every batch"


def test_a_block_that_does_not_fit_waits_until_others_have_left():
    some = population([10] * 9, [1.0] * 9, [100] * 9)
    driven = Driven(some, 900.0, 0, 4, block_bytes=100)
    driven.sweep.begin()
    for _ in range(200):
        driven.take(8, room=250)
        assert driven.sweep.bytes <= 250
        assert len(driven.held) <= 2
    driven.check_bound()
    assert driven.passes >= 2


def test_when_memory_cannot_hold_the_blocks_of_a_batch_it_is_shorter():
    some = population([10] * 9, [1.0] * 9, [100] * 9)
    driven = Driven(some, 90.0, 0, 4, block_bytes=100)
    driven.sweep.begin()
    runs, _ = driven.take(50, room=150)
    assert len(runs) == 10, "the one block there is room for"
    assert len(driven.take(50, room=150)[0]) == 10, "the next one, since the first has left"


# --- changes ----------------------------------------------------------------------------------------------------------


def test_what_may_not_be_drawn_any_more_is_passed_over_and_not_even_loaded():
    some = population([20] * 30, [1.0] * 30)
    driven = Driven(some, 1200.0, 0.2, 5, block_bytes=200)
    driven.sweep.begin()
    driven.take(100)
    dead = np.arange(30) % 2 == 0
    driven.alive = ~dead
    driven.sweep.look_again()
    before = driven.counts.copy()
    loaded = 0
    for _ in range(40):
        driven.sweep.start_batch()
        runs, offsets = driven.sweep.take(50, 10**9, driven.alive)
        assert len(runs) == 50
        assert not dead[runs].any()
        np.add.at(driven.counts, driven.first[runs] + offsets, 1)
        loaded += sum(dead[some.segment[list(block)]].all() for block in driven.moves.admit)
        driven.moves.clear()
    assert loaded == 0
    assert np.array_equal(before.reshape(30, 20)[dead], driven.counts.reshape(30, 20)[dead])


def test_when_nothing_may_be_drawn_it_ends_instead_of_turning_for_ever():
    driven = Driven(population([20] * 3, [1.0] * 3), 60.0)
    driven.sweep.begin()
    driven.alive[:] = False
    assert len(driven.take(10)[0]) == 0


def test_blocks_put_back_keep_their_tokens():
    some = population([20] * 30, [1.0] * 30)
    driven = Driven(some, 600.0, 0.5, 6, block_bytes=200)
    driven.sweep.begin()
    rng = np.random.default_rng(0)
    while driven.passes < 4:
        driven.take(int(rng.integers(1, 40)))
        if rng.random() < 0.3:
            room = int(rng.integers(0, 3000))
            driven.sweep.start_batch()
            driven.sweep.shrink(room)
            assert driven.sweep.bytes <= room
    # what is left of the begun passes comes out; then each step was drawn once per pass
    passes = driven.passes
    driven.sweep.keep = True
    driven.sweep.take(10**6, 10**9, driven.alive)
    assert driven.passes == passes
    p, n = driven.probability, driven.taken
    assert (np.abs(driven.counts - n * p) < 4 * (1 + p) + (600 + 600 + 21) * p).all()


@pytest.mark.slow
def test_late_steps_join_as_if_they_had_been_there_from_the_start():
    """Averaged over seeds, after a join at any moment: each step gets the same, whether old or new."""
    old, new = population([20] * 40, [1.0] * 40), population([20] * 10, [1.0] * 10, first_run=40)
    counts, total = np.zeros(50), 0
    for seed in range(150):
        driven = Driven(population([20] * 50, [1.0] * 50), 0.0, 0, seed, block_bytes=400)
        passes = 0

        def make(seed=seed) -> Epoch:
            nonlocal passes
            made = Epoch(EpochState(passes, 0, 4.0, 2000, 400, [(0, 0)]), (seed,))
            made.join(old if passes == 0 else population([20] * 50, [1.0] * 50))
            passes += 1
            return made

        driven.sweep = WindowedShuffle(make, driven.costs, driven.moves, False)
        driven.sweep.begin()
        driven.take(1500 + 10 * seed % 900)  # of 3200, a window of 800
        driven.counts[:] = 0
        driven.sweep.join(new, driven.alive)
        driven.take(1000)
        counts += driven.counts.reshape(50, 20).sum(1)
        total += 1000
    share = counts[40:].sum() / total
    assert share == pytest.approx(10 / 50, abs=0.015)


def test_a_sweep_that_keeps_its_blocks_makes_one_pass():
    some = population([20] * 30, [1.0] * 30)
    driven = Driven(some, 600.0, 0, 7, keep=True, block_bytes=200)
    driven.sweep.begin()
    while not driven.sweep.finished:
        assert len(driven.take(20)[0]) == 20
    assert sorted({segment for block in driven.held for segment in block}) == list(range(30))
    assert set(driven.sweep.blocks) == set(driven.held)
    assert driven.passes == 1


# --- going on ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
@pytest.mark.slow
def test_it_goes_on_exactly_from_any_moment(seed, keep):
    rng = np.random.default_rng(seed)
    some = some_population(rng)
    draws = max(8.0, float(rng.choice([0.3, 2.0, 6.0])) * float(some.count.sum()))
    draws = min(draws, 20_000)
    ratio = 0.0 if keep else float(rng.choice([0.1, 0.7]))
    arguments = (some, draws, ratio, seed, keep, max(1, int(some.cost.sum() / 20)))
    driven = Driven(*arguments)
    driven.sweep.begin()
    for _ in range(int(rng.integers(0, 12))):
        driven.take(int(rng.integers(1, max(2, int(draws / 9)))))
        if rng.random() < 0.2 and not keep:
            driven.sweep.start_batch()
            driven.sweep.shrink(int(some.cost.max()) * 3)
    state = msgspec.json.decode(json.dumps(msgspec.to_builtins(driven.sweep.state())), type=WindowedShuffleState)
    other = Driven(*arguments)
    other.passes = driven.passes
    other.sweep.restore(state, other.remake)
    assert sorted(other.moves.admit) == sorted(driven.sweep.blocks)
    for _ in range(12):
        count = int(rng.integers(1, max(2, int(draws / 9))))
        for one, two in zip(driven.take(count), other.take(count), strict=True):
            assert np.array_equal(one, two)
    assert other.sweep.state() == driven.sweep.state()


# --- the queue --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_the_queue_gives_back_what_it_got_in_order(seed):
    rng = np.random.default_rng(seed)
    pending = CalendarQueue(float(rng.choice([0.5, 3.0, 1000.0])))
    waiting: list[tuple[float, int, int, int]] = []
    added = 0
    for _ in range(40):
        kind = rng.random()
        if kind < 0.5:
            # few different keys, so that many are equal
            keys = np.sort(rng.integers(0, 60, int(rng.integers(0, 30))) / 4.0)
            runs = np.arange(added, added + len(keys))
            pending.add(keys, added % 5, runs, runs % 7)
            waiting += [
                (key, position, added % 5, position) for key, position in zip(keys.tolist(), runs.tolist(), strict=True)
            ]
            added += len(keys)
        elif kind < 0.9:
            count, below = int(rng.integers(1, 20)), float(rng.integers(0, 70)) / 4
            waiting.sort()
            slots, runs, offsets, last = pending.pop(count, below)
            expected = waiting[: len(slots)]
            assert runs.tolist() == [token[1] for token in expected]
            assert slots.tolist() == [token[2] for token in expected]
            assert offsets.tolist() == [token[1] % 7 for token in expected]
            if expected:
                assert last == expected[-1][0] < below
            else:
                assert not waiting or waiting[0][0] >= below
            waiting = waiting[len(slots) :]
        elif kind < 0.95:
            slot = int(rng.integers(5))
            pending.remove(slot)
            waiting = [token for token in waiting if token[2] != slot]
        else:
            pending.set_width(float(rng.choice([0.25, 2.0, 50.0])))
        assert pending.count == len(waiting)


def test_random_numbers_depend_on_their_key_alone():
    first = generator(1, 2, 3).random(4)
    assert np.array_equal(first, generator(1, 2, 3).random(4))
    for other in ((1, 2, 4), (2, 2, 3), (1, 3, 2)):
        assert not np.array_equal(first, generator(*other).random(4))
    # Were these ever to change, a training that was stopped would not go on as it would have.
    expected = [0.7198955456932165, 0.012702050455707714, 0.09963616681365695, 0.8874396368723878]
    assert first.tolist() == expected


def test_a_heavy_block_is_visited_often_instead_of_long():
    """Half of all draws belong to one step of a thousand; the window holds a twentieth of them."""
    some = population([1] + [20] * 50, [1000.0] + [1.0] * 50)
    driven = Driven(some, 8000.0, 0.05, 3, block_bytes=200)
    driven.sweep.begin()
    for _ in range(200):
        before = driven.counts[0]
        driven.take(100)
        driven.check_bound()
        assert driven.counts[0] - before < 85, "there is always something else"
        assert abs(driven.counts[0] - driven.taken / 2) < 150, "and never a long time without it"
