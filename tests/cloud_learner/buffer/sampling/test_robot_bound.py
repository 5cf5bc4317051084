"""No robot gets more than its bounded part of a task's draws, and a fleet of robots alike is not touched."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cloud_learner.buffer.sampling.robot_bound import LEAST_SHARE, LEAST_STEPS, factors, level
from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.target import Recent, imitation, lag_half_life
from tests.cloud_learner.buffer.sampling.planned import HUMAN, Book, Reader, by_step, same

PLENTY = 10**9
BATCH = 64
ROUNDED = 2 ** (-1 / 8)
"""factors are rounded down by so much at most"""


def record(book: Book, robot: str, steps: int, task: str = "a", source: str = "online", version: int = 1) -> None:
    """Episodes of 200 steps in segments of 50."""
    for _ in range(steps // 200):
        episode = book.episode(task, source, robot)
        for position in range(4):
            book.segment(episode, [(50, HUMAN, version)], 0 if position == 3 else -1)


class Trainer:
    """A sampler that carries out its plans."""

    def __init__(self, book: Book, budget: int = PLENTY, seed: int = 3, **target) -> None:
        self.book, self.index = book, book.universe()
        cost = by_step(self.index)
        self.sampler = Sampler(self.index, imitation(**target), cost, budget, BATCH, seed, newest_version=1)
        self.reader = Reader(self.index, cost, budget)

    def share_of(self, robot: str, batches: int) -> float:
        """Of the draws of the next batches."""
        drawn = []
        for _ in range(batches):
            plan = self.sampler.next()
            self.reader.carry_out(plan, BATCH)
            drawn.append(self.index.robots(plan.segments) == self.index.robot_names[robot])
        return float(np.concatenate(drawn).mean())

    def follow(self) -> None:
        self.book.follow(self.index)
        self.sampler.refresh(1)


MASSES = st.lists(st.floats(0, 1e6), min_size=1, max_size=12)


@given(MASSES, st.floats(0.05, 0.95))
def test_the_level_is_the_largest_that_leaves_nobody_above_the_share(masses: list[float], share: float) -> None:
    values = np.array(masses)
    share = max(share, 1 / len(values))
    found = level(values, share)
    cut = np.minimum(values, found)
    assert found <= values.max() and cut.max() <= share * cut.sum() * (1 + 1e-9) + 1e-9
    if found < values.max() * (1 - 1e-6):
        more = np.minimum(values, found * (1 + 1e-3) + 1e-3)
        assert more.max() > share * more.sum() * (1 - 1e-9)


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=12))
def test_each_robot_has_at_most_twice_its_part_of_the_weights_once_three_have_brought_enough(steps: list[int]) -> None:
    counts = np.array(steps)
    found = factors(counts.astype(float), counts)
    count = int((counts >= LEAST_STEPS).sum())
    assert ((found > 0) & (found <= 1)).all()
    if count < 3:
        assert (found == 1).all()
        return
    mass = counts * found
    assert mass.max() <= max(2 / count, LEAST_SHARE) / ROUNDED * mass.sum()
    if counts.max() * count <= 2 * counts.sum():
        assert (found == 1).all()


@pytest.mark.parametrize("budget", [PLENTY, 12_000_000])
@pytest.mark.parametrize("source", ["online", "demonstration"])
def test_a_flood_of_one_robot_is_bounded_from_the_first_draws_on(budget: int, source: str) -> None:
    book = Book()
    for robot in ("r1", "r2", "r3"):
        record(book, robot, 2000, source=source)
    record(book, "flood", 60_000, source=source)
    # Without a bound it would be 0.91. Where few segments fit, which ones are held first is chance: over some seeds.
    first = [Trainer(book, budget, seed).share_of("flood", 12) for seed in range(8)]
    assert 0.5 * ROUNDED - 0.06 < np.mean(first) < 0.5 + 0.06
    assert Trainer(book, budget).share_of("flood", 80) < 0.5 + 0.08


def test_what_comes_and_goes_moves_the_bound() -> None:
    book = Book()
    for robot in ("r1", "r2"):
        record(book, robot, 2000)
    record(book, "flood", 40_000)
    trainer = Trainer(book)
    # Of three robots each may have two thirds.
    assert abs(trainer.share_of("flood", 60) - 2 / 3) < 0.08
    for number in range(3, 9):
        record(book, f"r{number}", 2000)
    before = set(book._facts)
    record(book, "flood", 20_000)
    trainer.follow()
    assert trainer.share_of("flood", 60) < LEAST_SHARE + 0.04
    # It was found out, and is forgotten but for a little: it is one of nine.
    kept = [number for number in before if book._facts[number].robot == "flood"][:10]
    book.prune({n for n, facts in book._facts.items() if facts.robot == "flood" and n not in kept})
    trainer.follow()
    assert abs(trainer.share_of("flood", 60) - 1 / 9) < 0.04


def test_robots_that_are_alike_are_drawn_from_as_if_there_were_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    book = Book()
    for _ in range(40):
        for robot in rng.permutation(["r1", "r2", "r3"]):
            record(book, str(robot), 200 * int(rng.integers(1, 4)), task=str(rng.choice(["a", "b"])))
    plans = []
    for bounded in (True, False):
        if not bounded:
            monkeypatch.setattr("cloud_learner.buffer.sampling.robot_bound.LEAST_STEPS", 10**9)
        sampler = Trainer(book, 900_000, factors=(lag_half_life(3),)).sampler
        plans.append([sampler.next() for _ in range(50)])
    assert all(same(one, other) for one, other in zip(*plans, strict=True))


def test_a_trainer_that_goes_on_draws_what_it_would_have_drawn() -> None:
    book = Book()
    for robot in ("r1", "r2", "r3"):
        record(book, robot, 2000)
    record(book, "flood", 40_000)
    sampler = Trainer(book, 1_500_000).sampler
    for _ in range(30):
        sampler.next()
    state, wanted = sampler.state(), [sampler.next() for _ in range(30)]
    record(book, "flood", 60_000)
    again = Trainer(book, 1_500_000).sampler
    assert again.restore(state)
    for one in wanted:
        other = again.next()
        assert np.array_equal(one.segments, other.segments) and np.array_equal(one.offsets, other.offsets)


def test_a_part_for_what_is_recent_is_outside_of_the_bound() -> None:
    book = Book()
    for robot in ("r1", "r2", "r3"):
        record(book, robot, 2000)
    record(book, "flood", 60_000)
    trainer = Trainer(book, recent=Recent(share=0.25, newest=1200))
    assert trainer.share_of("flood", 60) < 0.25 + 0.75 * 0.5 + 0.04
