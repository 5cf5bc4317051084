"""Several ranks on one buffer: none is ever without data, they share it evenly, and each step counts as much."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.check import SOURCES
from cloud_learner.buffer.sampling.sampler import BatchPlan, Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import SamplingDistribution, TaskMix, imitation, max_lag, uniform
from tests.cloud_learner.buffer.sampling.planned import HUMAN, POLICY, Book, Reader, by_step, due_of, per_step, same
from wire.errors import InvalidDataError

BATCH = 8
PLENTY = 10**9


class Rank:
    """A sampler that carries out its plans, as a trainer's process would."""

    def __init__(self, book: Book, rank: int, world: int, target: SamplingDistribution, budget: int = PLENTY) -> None:
        self.index = SegmentIndex(("a", "b"), rank, world)
        self.index.extend(book.index())
        cost = by_step(self.index)
        self.sampler = Sampler(self.index, target, cost, budget, BATCH, 5, newest_version=1)
        self.reader = Reader(self.index, cost, budget)

    def follow(self, book: Book, version: int = 1) -> None:
        book.follow(self.index)
        self.sampler.refresh(version)

    def next(self) -> BatchPlan | None:
        """None while there is no step to learn from."""
        try:
            plan = self.sampler.next()
        except InvalidDataError:
            return None
        self.reader.carry_out(plan, BATCH)
        return plan

    def episodes(self, batches: int) -> set[int]:
        """Ledger numbers of the episodes of so many batches."""
        plans = [self.sampler.next() for _ in range(batches)]
        return {int(self.index.episode_numbers[self.index.episode[one]]) for plan in plans for one in plan.segments}


def ranks(book: Book, world: int, target: SamplingDistribution | None = None, budget: int = PLENTY) -> list[Rank]:
    return [Rank(book, rank, world, target or uniform(), budget) for rank in range(world)]


def strata_of(index: SegmentIndex, segments: np.ndarray) -> np.ndarray:
    return 2 * index.task[segments] + index.online[segments]


def positive(rank: Rank) -> np.ndarray:
    """bool[runs] that may be drawn by whoever has them."""
    known = rank.sampler._known
    return known.weights_at(np.arange(len(known.weight)), known.watermark, known.newest_version) > 0


def parted(index: SegmentIndex, eligible: np.ndarray) -> list[set[int]]:
    """By stratum the ranks with runs of their own that bool[runs] says may be drawn."""
    found: list[set[int]] = [set() for _ in range(4)]
    segments = index.run_segment[np.flatnonzero(eligible)]
    for stratum, rank in zip(strata_of(index, segments), index.ranks(segments), strict=True):
        found[stratum].add(int(rank))
    return found


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("budget", [PLENTY, 150_000])
def test_every_rank_has_a_batch_as_soon_as_any_has_and_only_of_its_own_where_each_has_some(world, budget):
    rng = np.random.default_rng(world)
    book, recorded = Book(), 0
    target = imitation(mix=TaskMix(online=0.5))
    group = ranks(book, world, target, budget)
    assert [one.next() for one in group] == [None] * world
    while recorded < 30:
        more = min(30 - recorded, int(rng.integers(1, 6)))
        # what the policy did alone in online episodes is not imitated
        book.record_some(rng, more, far=12)
        recorded += more
        for one in group:
            one.follow(book)
        index = group[0].index
        with_data = [parted(one.index, positive(one)) for one in group]
        assert all(here == with_data[0] for here in with_data), "ranks agree on who has what"
        for rank, one in enumerate(group):
            for _ in range(3):
                plan = one.next()
                assert (plan is not None) == any(with_data[0])
                if plan is None:
                    continue
                whose, stratum = index.ranks(plan.segments), strata_of(index, plan.segments)
                for number in np.unique(stratum).tolist():
                    if len(with_data[0][number]) == world:
                        assert set(whose[stratum == number].tolist()) == {rank}
    assert sum(with_data[0][n] == set(range(world)) for n in range(4)) >= (4 if world == 1 else world < 5)


@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_are_disjoint_where_a_task_and_source_has_as_many_episodes_as_ranks(world):
    rng = np.random.default_rng(world)
    book = Book()
    group = ranks(book, world)
    kinds: dict[tuple[str, str], set[int]] = {(task, source): set() for task in "ab" for source in SOURCES[:2]}
    for _ in range(world + 2):
        for kind, numbers in kinds.items():
            numbers.add(book.record(rng.integers(1, 30, rng.integers(1, 4)).tolist(), *kind))
    for one in group:
        one.follow(book)
    drawn = [one.episodes(60) for one in group]
    assert sum(map(len, drawn)) == len(set.union(*drawn)) == 4 * (world + 2)
    for numbers in kinds.values():
        mine = [len(numbers & some) for some in drawn]
        assert max(mine) - min(mine) <= 1


def due(group: Sequence[Rank]) -> np.ndarray:
    """float64[steps]: what is due to each, summed over ranks."""
    return np.sum([per_step(one.index, due_of(one.sampler)) for one in group], axis=0)


@pytest.mark.parametrize("episodes", [1, 2, 3])
def test_each_step_counts_as_much_however_few_episodes_there_are(episodes):
    book = Book()
    for number in range(episodes):
        book.record([10 * (number + 1)], "a")
    group = ranks(book, 4)
    np.testing.assert_allclose(due(group), 4 / (5 * episodes * (episodes + 1)))
    plans = [one.next() for one in group]
    assert len({tuple(zip(p.segments.tolist(), p.offsets.tolist(), strict=True)) for p in plans}) == 4, "not the same"


def test_what_all_draw_from_counts_as_much_as_what_is_dealt():
    book = Book()
    for number in range(14):
        book.record([10], "a", "online" if number < 2 else "demonstration")
    group = ranks(book, 4)
    np.testing.assert_allclose(due(group), 4 / 140)
    assert all({1, 2} < one.episodes(100) for one in group)


def test_a_rank_that_had_nothing_gets_its_own_when_it_comes_and_keeps_to_it(caplog):
    book = Book()
    group = ranks(book, 3, imitation(factors=(max_lag(2),)))
    book.record([20], "a", "online")
    with caplog.at_level("INFO", "cloud_learner.buffer.sampling.stratum"):
        for so_far in ({1}, {1, 2}):
            for one in group:
                one.follow(book)
            assert [one.episodes(9) for one in group] == [so_far] * 3
            book.record([20], "a", "online")
    assert len(caplog.messages) == 3 and "a (online): all ranks draw from all of it" in caplog.text, "each says it once"
    for one in group:
        one.follow(book)
    drawn = [one.episodes(20) for one in group]
    assert sorted(map(len, drawn)) == [1, 1, 1] and set.union(*drawn) == {1, 2, 3}
    # what they have grows old; a newer one comes for one of them
    number = book.episode("a", "online")
    book.segment(number, [(20, HUMAN, 9)], 0)
    for one in group:
        one.follow(book, version=9)
    assert [one.episodes(20) for one in group] == [{number}] * 3


@pytest.mark.parametrize("budget", [PLENTY, 60_000])
def test_plans_follow_from_a_state_whether_all_is_shared_or_dealt(budget):
    rng = np.random.default_rng(2)
    book = Book()
    group = ranks(book, 3, uniform(), budget)
    for _ in range(12):
        book.record(rng.integers(5, 20, 3).tolist(), "ab"[int(rng.integers(2))], actor=int(rng.choice([HUMAN, POLICY])))
        for rank, one in enumerate(group):
            one.follow(book)
            for _ in range(int(rng.integers(4))):
                one.next()
            state = msgspec.json.decode(msgspec.json.encode(one.sampler.state()))
            twin = Rank(book, rank, 3, uniform(), budget)
            assert twin.sampler.restore(state)
            assert all(same(one.next(), twin.next()) for _ in range(6))


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_more_or_fewer_ranks_go_on_from_a_state(world):
    book = Book()
    kept = {book.record([9], "ab"[number % 2]) for number in range(16)}
    before = Rank(book, 1, 3, uniform())
    before.episodes(4)
    group = ranks(book, world)
    for one in group:
        assert not one.sampler.restore(before.sampler.state())
        assert one.sampler._number == 4
    drawn = [one.episodes(40) for one in group]
    assert set.union(*drawn) == kept and sum(map(len, drawn)) == len(kept)


@pytest.mark.parametrize(("world", "goes_on"), [(1, True), (3, False)])
def test_a_state_is_not_gone_on_from_where_episodes_are_dealt_in_another_way(world, goes_on):
    book = Book()
    for _ in range(9):
        book.record([9])
    before = Rank(book, 0, world, uniform())
    book.prune({1})
    before.follow(book)
    before.episodes(2)
    assert Rank(book, 0, world, uniform()).sampler.restore(before.sampler.state()) == goes_on
