from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.scheduler.episodes import TaskBalancer

TASKS = ("a", "b", "c", "d")

counts = st.dictionaries(
    st.sampled_from(TASKS),
    st.tuples(st.integers(0, 2000), st.integers(0, 100)).map(lambda two: (two[0], two[0] * two[1] // 100)),
)


def test_before_anything_is_known_all_come_in_turn_and_robots_begin_at_others() -> None:
    spread = TaskBalancer()
    assert spread.shares(TASKS) == pytest.approx(dict.fromkeys(TASKS, 0.25))
    assert [spread.cycle(TASKS, n)[0] for n in range(5)] == ["a", "b", "c", "d", "a"]
    assert spread.cycle(TASKS, 2) == ("c", "d", "a", "b")
    assert spread.cycle(()) == ()
    assert spread.cycle(("a", "a")) == ("a",)


def test_the_shares_are_those_of_the_formula() -> None:
    spread = TaskBalancer({"a": (10, 10), "b": (10, 5), "c": (4, 0)})
    mean = 8
    needs = {
        "a": (1 - 11 / 12) * (mean + 1) / 11,
        "b": (1 - 6 / 12) * (mean + 1) / 11,
        "c": (1 - 1 / 6) * (mean + 1) / 5,
    }
    total = sum(needs.values())
    assert spread.shares("abc") == pytest.approx({task: 0.25 / 3 + 0.75 * need / total for task, need in needs.items()})


def test_the_least_successful_and_the_least_sampled_get_more() -> None:
    spread = TaskBalancer({task: (50, won) for task, won in zip(TASKS, (50, 40, 20, 0), strict=True)})
    shares = spread.shares(TASKS)
    assert shares["a"] < shares["b"] < shares["c"] < shares["d"]
    fresh = TaskBalancer({"a": (100, 50), "b": (20, 10)}).shares("ab")
    assert fresh["b"] > 2 * fresh["a"]


def test_what_was_learned_counts_not_what_was_long_ago() -> None:
    spread = TaskBalancer({"a": (1000, 0), "b": (1000, 500)})
    before = spread.shares("ab")["a"]
    for _ in range(50):
        spread.add("a", True)
    assert spread.shares("ab")["a"] < before / 3
    assert spread.episodes["a"] == 1050


@settings(max_examples=50, deadline=None, derandomize=True)
@given(counts, st.integers(1, 4), st.integers(0, 9))
def test_shares_sum_to_one_keep_the_floor_and_the_cycle_follows_them(
    found: dict[str, tuple[int, int]], number: int, start: int
) -> None:
    spread, tasks = TaskBalancer(found), TASKS[:number]
    shares = spread.shares(tasks)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0.25 / number - 1e-12
    cycle = spread.cycle(tasks, start)
    assert set(cycle) == set(tasks), "each has its floor in every cycle"
    assert len(cycle) <= 4 * number
    have = Counter(cycle)
    for task in tasks:
        assert abs(have[task] / len(cycle) - shares[task]) <= 1.0 / number
    assert Counter(spread.cycle(tasks, start + 1)) == have


@settings(max_examples=50, deadline=None, derandomize=True)
@given(counts)
def test_a_cycle_is_smooth(found: dict[str, tuple[int, int]]) -> None:
    """From one turn of a task to its next is at most as far as in a perfectly even order, and one for each task."""
    cycle = TaskBalancer(found).cycle(TASKS)
    for task in TASKS:
        places = [place for place, name in enumerate(cycle) if name == task]
        gaps = [
            (after - before) % len(cycle) or len(cycle)
            for before, after in zip(places, [*places[1:], places[0]], strict=True)
        ]
        assert max(gaps) <= len(cycle) / len(places) + len(TASKS)


def test_practice_evens_success_out() -> None:
    """A task that is learned at a quarter of the speed gets more episodes, and the easy one is not dropped."""
    drawn = random.Random(0)
    spread, done = TaskBalancer(), Counter[str]()
    for _ in range(100):
        for task in spread.cycle(("easy", "hard")):
            done[task] += 1
            rate = min(0.95, done[task] / (100 if task == "easy" else 400))
            spread.add(task, drawn.random() < rate)
    assert done["hard"] > 1.3 * done["easy"]
    assert done["easy"] > 0.1 * done["hard"]
