"""Which of two is better, by the same scenes."""

from __future__ import annotations

import pytest

from fleet.evaluation.held_out import MeasuredEpisode
from fleet.evaluation.paired import Verdict, compare_outcomes


def outcomes(task: str, wins: str) -> list[MeasuredEpisode]:
    return [MeasuredEpisode(task, seed, win == "x", 10) for seed, win in enumerate(wins)]


def test_it_is_said_plainly_who_is_better() -> None:
    good, bad = outcomes("push", "xxxxxxxxxx"), outcomes("push", "..x.......")
    whole, by_task = compare_outcomes(good, bad)
    assert (whole.a, whole.b, whole.only_a, whole.only_b) == (10, 1, 9, 0)
    assert whole.p == pytest.approx(2 / 2**9)
    assert whole.difference == 0.9 and 0.4 < whole.low < 0.9 < whole.high <= 1.0
    assert whole.verdict == Verdict.a and by_task == {"push": whole}
    # in whatever order they came
    turned, _ = compare_outcomes(list(reversed(bad)), good)
    assert turned.verdict == Verdict.b and (turned.low, turned.high) == pytest.approx((-whole.high, -whole.low))


def test_few_scenes_show_nothing() -> None:
    whole, _ = compare_outcomes(outcomes("push", "xxxxx"), outcomes("push", "....."))
    assert whole.p == pytest.approx(0.0625) and whole.verdict == Verdict.none
    same, _ = compare_outcomes(outcomes("push", "x.x."), outcomes("push", "x.x."))
    assert same.p == 1.0 and same.verdict == Verdict.none


def test_many_tasks_are_many_chances() -> None:
    a = [one for task in "abcd" for one in outcomes(task, "xxxxxx")]
    b = [one for task in "abcd" for one in outcomes(task, "......" if task == "a" else "xxxxxx")]
    whole, by_task = compare_outcomes(a, b)
    assert whole.p == pytest.approx(2 / 2**6) and whole.verdict == Verdict.a
    assert by_task["a"].p == pytest.approx(4 * 2 / 2**6) and by_task["a"].verdict == Verdict.none
    assert by_task["b"].p == 1.0


def test_other_scenes_are_not_compared() -> None:
    for other in ([], outcomes("push", "x"), outcomes("pick", "xx")):
        with pytest.raises(ValueError, match="the same scenes"):
            compare_outcomes(outcomes("push", "xx"), other)
