"""Whether one policy is better than another, by the same scenes run with both."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from fleet.evaluation.held_out import MeasuredEpisode
from fleet.evaluation.statistics import mcnemar, paired_difference

LEVEL = 0.05
"""a difference counts as shown below this p-value"""


class Verdict(StrEnum):
    """What was shown."""

    a = "A is better"
    b = "B is better"
    none = "no difference shown"


class PairedComparison(msgspec.Struct, frozen=True):
    """A and B on the same scenes."""

    episodes: int
    a: int
    """successes"""
    b: int
    only_a: int
    """scenes on which A alone succeeded"""
    only_b: int
    difference: float
    """A's share of successes less B's"""
    low: float
    """95 % interval of it (Newcombe, paired)"""
    high: float
    p: float
    """that they succeed alike (exact McNemar); of a single task it is multiplied by the number of tasks (Bonferroni)"""
    verdict: Verdict


def compare_outcomes(
    a: Iterable[MeasuredEpisode], b: Iterable[MeasuredEpisode]
) -> tuple[PairedComparison, dict[str, PairedComparison]]:
    """In all, and by task. Both have the same scenes, at least one; raises `ValueError` otherwise."""
    ours = {(one.task, one.seed): one.success for one in a}
    theirs = {(one.task, one.seed): one.success for one in b}
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError("a comparison needs the same scenes, and some.")
    pairs = [(scene[0], success, theirs[scene]) for scene, success in ours.items()]
    tasks = list(dict.fromkeys(task for task, _, _ in pairs))
    by_task = {task: _compare([p[1:] for p in pairs if p[0] == task], len(tasks)) for task in tasks}
    return _compare([pair[1:] for pair in pairs]), by_task


def _compare(pairs: list[tuple[bool, bool]], tests: int = 1) -> PairedComparison:
    outcomes = (True, True), (True, False), (False, True), (False, False)
    both, only_a, only_b, neither = (pairs.count(one) for one in outcomes)
    low, high = paired_difference(both, only_a, only_b, neither)
    p = min(1.0, tests * mcnemar(only_a, only_b))
    better = Verdict.a if only_a > only_b else Verdict.b
    return PairedComparison(
        episodes=len(pairs),
        a=both + only_a,
        b=both + only_b,
        only_a=only_a,
        only_b=only_b,
        difference=(only_a - only_b) / len(pairs),
        low=low,
        high=high,
        p=p,
        verdict=better if p < LEVEL else Verdict.none,
    )
