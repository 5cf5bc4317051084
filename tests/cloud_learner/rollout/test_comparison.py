"""Two versions beside each other: what is compared with what, and what is kept."""

from __future__ import annotations

import msgspec
import pytest

from cloud_learner.rollout.comparison import Comparison, EpisodeResult, Measure

WON, LOST, UNKNOWN = EpisodeResult(True, 0.0, False), EpisodeResult(False, 0.0, False), EpisodeResult(None, 0.0, False)


def compare() -> Comparison:
    return Comparison.begin(margin=0.2, alpha=0.05, beta=0.05)


def test_only_episodes_of_one_task_are_compared() -> None:
    comparison = compare()
    assert not comparison.add("reach", WON, True, 1, 1)
    assert not comparison.add("push", WON, False, 1, 1)
    assert comparison.add("reach", LOST, False, 1, 1)
    assert comparison.worse[Measure.success].mean == -1


def test_either_may_come_first_and_each_is_in_one_block() -> None:
    comparison = compare()
    for _ in range(4):
        comparison.add("reach", WON, False, 1, 4)
    assert comparison.add("reach", LOST, True, 1, 4)
    assert not comparison.add("reach", LOST, True, 1, 4)
    assert comparison.worse[Measure.success].count == 1


def test_a_side_that_waits_long_takes_what_there_is() -> None:
    comparison = compare()
    comparison.add("reach", WON, True, 1, 4)
    assert not comparison.add("reach", LOST, False, 1, 4)
    assert comparison.add("reach", WON, True, 1, 4)


def test_each_measure_can_show_a_loss() -> None:
    for measure, bad in (
        (Measure.success, LOST),
        (Measure.human, EpisodeResult(True, 0.9, False)),
        (Measure.stops, EpisodeResult(True, 0.0, True)),
    ):
        comparison = compare()
        for _ in range(30):
            comparison.add("reach", WON, False, 1, 1)
            comparison.add("reach", bad, True, 1, 1)
        assert comparison.loss_of() is measure
        assert comparison.leaning() is measure


def test_what_nobody_judged_says_nothing_of_success() -> None:
    comparison = compare()
    for _ in range(30):
        comparison.add("reach", WON, False, 1, 1)
        comparison.add("reach", UNKNOWN, True, 1, 1)
    assert comparison.worse[Measure.success].count == 0
    assert comparison.worse[Measure.human].count == 30
    assert not comparison.is_good


def test_equal_versions_are_shown_not_to_be_worse_by_the_margin() -> None:
    comparison = compare()
    for _ in range(30):
        comparison.add("reach", WON, False, 1, 1)
        comparison.add("reach", WON, True, 1, 1)
    assert comparison.is_good
    assert comparison.loss_of() is None
    assert comparison.leaning() is None


def test_recorded_episodes_are_not_wasted() -> None:
    comparison = compare()
    comparison.preload(("reach", WON) for _ in range(10))
    made = [comparison.add("reach", WON, True, 8, 1) for _ in range(16)]
    assert made.count(True) == 2


@pytest.mark.parametrize("is_new", (True, False))
def test_memory_is_bounded(is_new: bool) -> None:
    comparison = compare()
    for number in range(3000):
        comparison.add(f"task{number}", WON, is_new, 1, 1)
        comparison.add("reach", WON, is_new, 1, 1)
    assert len(msgspec.msgpack.encode(comparison)) < 50_000
