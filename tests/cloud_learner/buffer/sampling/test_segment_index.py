"""The universe: what is left out, who is whose neighbour, and that it does not matter how it grew."""

from __future__ import annotations

import contextlib
import itertools
import time

import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import EpisodeFacts, Journaled, SegmentColumns
from cloud_learner.buffer.sampling.sampler import Sampler
from cloud_learner.buffer.sampling.segment_index import SegmentIndex
from cloud_learner.buffer.sampling.target import uniform
from tests.cloud_learner.buffer.sampling.planned import HUMAN, POLICY, Book, by_step
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import ConfigError, InvalidDataError

COLUMNS = (
    "row",
    "index",
    "first_tick",
    "steps",
    "frames",
    "task",
    "online",
    "demonstration",
    "reward_sum",
    "last",
    "gone",
)


def test_columns_are_those_of_the_ledger():
    book = Book()
    number = book.episode("b", "online")
    book.segment(number, [(4, POLICY, 3), (2, HUMAN, 4)], reward=1.5)
    book.segment(number, [(5, POLICY, 4)], outcome=1, reward=2.0)
    universe = book.universe()
    assert len(universe) == 2
    assert universe.watermark == 2
    assert universe.row.tolist() == [1, 2]
    assert universe.steps.tolist() == [6, 5]
    assert universe.first_tick.tolist() == [0, 6]
    assert universe.task.tolist() == [1, 1]
    assert universe.online.all()
    assert not universe.demonstration.any()
    assert universe.last.tolist() == [False, True]
    assert universe.reward_sum.tolist() == [1.5, 2.0]
    assert universe.run_offsets.tolist() == [0, 2, 3]
    assert universe.run_segment.tolist() == [0, 0, 1]
    assert universe.run_first.tolist() == [0, 4, 0]
    assert universe.run_count.tolist() == [4, 2, 5]
    assert universe.run_actor.tolist() == [POLICY, HUMAN, POLICY]
    assert universe.run_version.tolist() == [3, 4, 4]
    assert universe.episode_numbers[universe.episode].tolist() == [number, number]
    with pytest.raises(ValueError):
        universe.row[0] = 7


def test_evaluations_and_other_tasks_are_left_out():
    book = Book()
    book.record([3], "a", "evaluation")
    book.record([3], "other")
    kept = [book.record([3], "a") for _ in range(6)]
    universe = SegmentIndex(("a",))
    assert universe.extend(book.index()).tolist() == list(range(6))
    assert universe.watermark == book.row
    assert universe.episode_numbers.tolist() == kept


def test_neighbours_are_found_whoever_comes_first_and_only_where_ticks_adjoin():
    book = Book()
    number = book.episode("a")
    book.segment(number, [(5, POLICY, 1)], at=(2, 9))
    book.segment(number, [(4, POLICY, 1)], at=(0, 0))
    book.segment(number, [(3, POLICY, 1)], at=(4, 99))  # index 3 is missing
    universe = SegmentIndex(("a",))
    universe.extend(book.index())
    assert universe.previous.tolist() == [-1, -1, -1]
    book.segment(number, [(5, POLICY, 1)], at=(1, 4))
    book.segment(number, [(7, POLICY, 1)], at=(3, 14))
    added = universe.extend(book.index(universe.watermark))
    assert added.tolist() == [3, 4]
    # 0 -> 1 -> 2 -> 3 in the episode are segments 1, 3, 0, 4; segment 2 (index 4) does not adjoin: 21 is not 99
    assert universe.following.tolist() == [4, 3, -1, 0, -1]
    assert universe.previous.tolist() == [3, -1, -1, 1, 0]


def test_segments_that_came_in_any_order_are_joined():
    for order in itertools.permutations(range(4)):
        book = Book()
        universe, number = book.universe(), book.episode("a")
        for index in order:
            book.segment(number, [(2, POLICY, 1)], at=(index, 2 * index))
            universe.extend(book.index(universe.watermark))
        at = np.argsort(order)
        assert universe.following[at].tolist() == [*at[1:].tolist(), -1], order
        assert universe.previous[at].tolist() == [-1, *at[:-1].tolist()], order


def test_growing_in_any_parts_gives_the_same_universe():
    rng = np.random.default_rng(1)
    book = Book()
    book.record_some(rng, 60)
    whole = book.universe()
    for size in (1, 7, 50):
        universe = SegmentIndex(("a", "b"))
        while universe.watermark < book.row:
            universe.extend(book.index(universe.watermark, universe.watermark + size))
        for name in (*COLUMNS, "previous", "following", "run_offsets", "run_segment", "run_first", "run_actor"):
            assert np.array_equal(getattr(universe, name), getattr(whole, name)), name
        everything = np.arange(len(whole))
        assert np.array_equal(universe.outcome(everything), whole.outcome(everything))
        assert np.array_equal(universe.return_after(everything), whole.return_after(everything), equal_nan=True)
        assert np.array_equal(universe.episode_numbers[universe.episode], whole.episode_numbers[whole.episode])


def test_rows_already_seen_are_not_added_twice():
    book = Book()
    book.record([3, 4])
    universe = book.universe()
    assert universe.extend(book.index()).tolist() == []
    assert len(universe) == 2


def test_the_return_is_known_once_the_episode_is_finished_and_whole():
    book = Book()
    number = book.episode("a")
    book.segment(number, [(2, POLICY, 1)], reward=1.0)
    book.segment(number, [(2, POLICY, 1)], outcome=0, reward=4.0, at=(2, 4))
    universe = book.universe()
    everything = np.arange(2)
    assert universe.outcome(everything).tolist() == [0, 0]
    assert np.isnan(universe.return_after(everything)).all()
    assert universe.last_tick(everything).tolist() == [5, 5], "its last segment is here"
    book.segment(number, [(2, POLICY, 1)], reward=2.0, at=(1, 2))
    universe.extend(book.index(universe.watermark))
    assert universe.return_after(np.array([0, 1, 2])).tolist() == [6.0, 0.0, 4.0]


def test_an_unfinished_episode_has_neither_outcome_nor_return():
    book = Book()
    book.segment(book.episode("a"), [(2, POLICY, 1)], reward=1.0)
    universe = book.universe()
    assert universe.outcome(np.array([0])).tolist() == universe.last_tick(np.array([0])).tolist() == [-1]
    assert np.isnan(universe.return_after(np.array([0]))).all()


def test_what_was_pruned_is_gone_but_keeps_its_number():
    book = Book()
    first = book.record([3, 4, 5])
    book.record([3, 4])
    universe = book.universe()
    book.prune({first})
    third = book.record([6])
    assert book.follow(universe).tolist() == [0, 1, 2]
    assert universe.gone.tolist() == [True, True, True, False, False, False]
    assert universe.episode_numbers[universe.episode[5]] == third
    assert universe.following.tolist() == [-1, -1, -1, 4, -1, -1]
    assert universe.find(np.array([1, 4, 5, 6, 77])).tolist() == [-1, 3, 4, 5, -1]


def test_a_damaged_segment_cuts_its_episode():
    book = Book()
    number = book.episode("a")
    for position in range(3):
        book.segment(number, [(2, POLICY, 1)], outcome=0 if position == 2 else -1, reward=1.0)
    universe = book.universe()
    assert universe.return_after(np.array([0])).tolist() == [2.0]
    book.damage({2})
    assert book.follow(universe).tolist() == [1]
    assert universe.following.tolist() == [-1, -1, -1]
    assert np.isnan(universe.return_after(np.array([0]))).all()
    assert universe.outcome(np.array([0])).tolist() == [0]
    book.damage({3})
    book.follow(universe)
    assert universe.outcome(np.array([0])).tolist() == [-1]


def test_what_is_left_after_forgetting_is_as_if_the_rest_had_never_been():
    rng = np.random.default_rng(3)
    book = Book()
    universe = book.universe()
    for _ in range(20):
        book.record_some(rng, 6)
        universe.extend(book.index(universe.watermark))
        universe.return_after(np.arange(len(universe)))
        book.prune(set(rng.integers(1, 100, 2).tolist()))
        book.damage(set(rng.integers(1, book.row + 1, 3).tolist()))
        book.follow(universe)
        rest = SegmentIndex(("a", "b"))
        rest.extend(book.index())
        there = universe.find(rest.row)
        assert (there >= 0).all() and (~universe.gone).sum() == len(rest)
        for name in ("previous", "following"):
            beside = getattr(rest, name)
            found = np.where(beside >= 0, there[beside], -1)
            assert np.array_equal(getattr(universe, name)[there], found)
        assert np.array_equal(universe.outcome(there), rest.outcome(np.arange(len(rest))))
        assert np.array_equal(universe.last_tick(there), rest.last_tick(np.arange(len(rest))))
        after = rest.return_after(np.arange(len(rest)))
        assert np.array_equal(universe.return_after(there), after, equal_nan=True)
        assert [universe.finished(part) for part in (False, True)] == [rest.finished(part) for part in (False, True)]


def test_a_segment_is_not_joined_to_one_that_is_gone():
    book = Book()
    number = book.episode("a")
    book.segment(number, [(2, POLICY, 1)])
    universe = book.universe()
    book.damage({1})
    book.follow(universe)
    book.segment(number, [(2, POLICY, 1)])
    universe.extend(book.index(universe.watermark))
    assert universe.previous.tolist() == universe.following.tolist() == [-1, -1]


def test_the_segments_of_an_episode_are_found_among_those_of_others():
    rng = np.random.default_rng(4)
    book = Book()
    numbers = [book.episode("a") for _ in range(9)]
    universe = book.universe()
    for _ in range(20):
        for number in rng.choice(numbers, int(rng.integers(0, 7))).tolist():
            book.segment(number, [(2, POLICY, 1)] * int(rng.integers(0, 3)))
        universe.extend(book.index(universe.watermark))
    some = np.array([0, 3, 5])
    assert universe.members(some).tolist() == np.flatnonzero(np.isin(universe.episode, some)).tolist()
    assert universe.members(some[:0]).tolist() == []
    runs = universe.runs_of(universe.members(some))
    assert runs.tolist() == np.flatnonzero(np.isin(universe.run_segment, universe.members(some))).tolist()


def test_an_outcome_that_came_later_is_not_known_earlier():
    book = Book()
    number = book.episode("a")
    book.segment(number, [(2, POLICY, 1)])
    book.segment(number, [(2, POLICY, 1)], outcome=2)
    universe = book.universe()
    assert universe.runs(slice(0, 2), 2).outcome.tolist() == [2, 2]
    assert universe.runs(slice(0, 2), 1).outcome.tolist() == [-1, -1]
    assert universe.prefix(1) == (1, 1)


def test_an_empty_last_segment_has_no_runs():
    book = Book()
    number = book.episode("a")
    book.segment(number, [(2, POLICY, 1)])
    book.segment(number, [], outcome=0)
    universe = book.universe()
    assert universe.run_offsets.tolist() == [0, 1, 1]
    assert universe.following.tolist() == [1, -1]
    assert universe.outcome(np.array([0])).tolist() == [0]


def test_wrong_settings_and_wrong_answers_are_refused():
    with pytest.raises(ConfigError):
        SegmentIndex(())
    with pytest.raises(ConfigError):
        SegmentIndex(("a", "a"))
    book = Book()
    book.record([3, 3])
    index = book.index()
    index.row[:] = [2, 1]
    with pytest.raises(InvalidDataError, match="do not grow"):
        SegmentIndex(("a",)).extend(index)


def test_it_takes_in_what_a_ledger_answers(ledger_place):
    spec = fake_spec(1, size=16)
    with contextlib.closing(Ledger.open(ledger_place)) as ledger:
        ledger.see_robot("r1", spec, "clock", 1)
        kept = fake_episode(spec, "kept", task="a", steps=90, segment_steps=40, seed=1)
        others = (
            fake_episode(spec, "other", task="b", steps=30, seed=2),
            fake_episode(spec, "held-out", task="a", source="evaluation", steps=30, seed=3),
            fake_episode(spec, "shown", task="a", source="demonstration", steps=30, seed=4),
        )
        for segment in (*kept, *(segment for segments in others for segment in segments)):
            ledger.commit_segments([(segment, Journaled(1, 0, 1, "0" * 64), 1)], 2)
        universe = SegmentIndex(("a",))
        universe.extend(ledger.index(0, spec.data_hash))
        assert universe.watermark == ledger.totals().newest_row
        assert universe.steps.tolist() == [40, 40, 10, 30]
        assert universe.following.tolist() == [1, 2, -1, -1]
        assert universe.demonstration.tolist() == [False, False, False, True]
        assert universe.episode.tolist() == [0, 0, 0, 1]
        for number, segment in enumerate(kept):
            begin, end = universe.run_offsets[number : number + 2]
            lengths = universe.run_count[begin:end]
            assert np.array_equal(np.repeat(universe.run_actor[begin:end], lengths), segment.actor)
            assert np.array_equal(np.repeat(universe.run_version[begin:end], lengths), segment.version)
        after = universe.return_after(np.arange(3))
        rewards = [segment.reward.sum(dtype=np.float64) for segment in kept]
        assert after.tolist() == pytest.approx([rewards[1] + rewards[2], rewards[2], 0.0])
        sampler = Sampler(universe, uniform(), by_step(universe), 10**9, 16, 1)
        plan = sampler.next()
        assert (universe.steps[plan.segments] > plan.offsets).all()
        ledger.prune(["kept"], 5)
        assert universe.forget(*ledger.gone_since(0)).tolist() == [0, 1, 2]
        sampler.refresh(1)
        assert set(sampler.next().segments.tolist()) == {3}


def large_index(first: int, count: int) -> SegmentColumns:
    """Segments [first, first + count) of episodes of three, each of two runs of ten steps."""
    at = np.arange(first, first + count)
    runs = np.zeros((2 * count, 4), np.int32)
    runs[:, 1] = 10
    runs[1::2, 0] = 10
    return SegmentColumns(
        row=at + 1,
        episode=at // 3 + 1,
        index=(at % 3).astype(np.int32),
        first_tick=(at % 3) * 20,
        steps=np.full(count, 20, np.int32),
        frames=np.full(count, 40, np.int32),
        reward_sum=np.ones(count),
        last=at % 3 == 2,
        newest_version=np.zeros(count, np.int32),
        outcome=np.where(at % 3 == 2, 0, -1).astype(np.int8),
        run_offsets=np.arange(count + 1) * 2,
        runs=runs,
        episodes={n: EpisodeFacts(str(n), "r", "a", "online", 0) for n in np.unique(at // 3 + 1).tolist()},
    )


def test_a_refresh_of_a_large_universe_costs_what_is_new():
    segments = 150_000
    universe, index = SegmentIndex(("a",)), large_index(0, segments)
    begin = time.thread_time()
    universe.extend(index)
    whole = time.thread_time() - begin
    assert len(universe.episode_numbers) == 50_000
    assert len(universe.run_actor) == 300_000
    took = []
    for first in range(segments, segments + 300, 30):
        more = large_index(first, 30)
        begin = time.thread_time()
        universe.extend(more)
        took.append(time.thread_time() - begin)
    assert universe.following[-30:].tolist() == [
        number + 1 if number % 3 != 2 else -1 for number in range(segments + 270, segments + 300)
    ]
    assert min(took) < whole / 20, "what is new costs little, however much is there"
