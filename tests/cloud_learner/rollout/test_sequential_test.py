"""The test by betting: its error, its power, and what it is worth after a restart."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.rollout.sequential_test import BettingTest

DIFFERENCES = st.lists(st.floats(-1, 1), max_size=40)


def rejects(test: BettingTest, gain: float, seed: int, count: int) -> int:
    """After how many pairs of coins, one of which wins by `gain` more often; 0: never."""
    dice = random.Random(seed)
    for at in range(1, count + 1):
        test.observe((dice.random() < 0.5 + gain) - float(dice.random() < 0.5))
        if test.rejected:
            return at
    return 0


def test_its_error_holds_however_often_one_looks() -> None:
    runs, error = 300, 0.1
    wrong = sum(rejects(BettingTest(bound=0.0, error=error), 0.0, seed, 300) > 0 for seed in range(runs))
    assert wrong < error * runs


def test_the_error_holds_when_the_capital_is_divided_anew() -> None:
    wrong = 0
    for seed in range(200):
        dice, test = random.Random(seed), BettingTest(bound=0.0, error=0.1, reserve=0.5)
        for at in range(300):
            if at % 30 == 29:
                test.restart(0.2)
            test.observe(dice.choice((-1.0, 0.0, 1.0)))
        wrong += test.rejected
    assert wrong < 20


def test_what_is_so_is_found() -> None:
    took = sorted(rejects(BettingTest(bound=0.0, error=0.05), 0.4, seed, 1000) for seed in range(50))
    assert took[0] > 0
    assert took[25] < 40
    shown = sorted(rejects(BettingTest(bound=-0.2, error=0.05), 0.0, seed, 2000) for seed in range(50))
    assert shown[0] > 0, "not worse by the margin"


@given(DIFFERENCES, st.sampled_from((0.0, -0.2, -0.5, 0.3)), st.sampled_from((0.0, 0.5)))
def test_capital_stays_above_zero_and_is_what_the_formula_says(
    differences: list[float], bound: float, reserve: float
) -> None:
    test = BettingTest(bound=bound, error=0.05, reserve=reserve)
    for one in differences:
        test.observe(one)
    bets = [share / (1 + bound) for share in (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.97)]
    products = [math.prod(1 + bet * (one - bound) for one in differences) for bet in bets]
    assert all(product > 0 for product in products)
    assert test.log_wealth == pytest.approx(math.log(reserve + (1 - reserve) * sum(products) / len(bets)), abs=1e-9)


@given(DIFFERENCES, st.floats(0.01, 0.99))
def test_to_divide_anew_neither_makes_nor_loses_capital(differences: list[float], share: float) -> None:
    test = BettingTest(bound=0.0, error=0.01, reserve=0.5)
    for one in differences:
        test.observe(one)
    before = test.log_wealth
    test.restart(share)
    assert test.log_wealth == pytest.approx(before, abs=1e-9)


@given(DIFFERENCES, DIFFERENCES)
def test_it_goes_on_after_a_restart_where_it_was(before: list[float], after: list[float]) -> None:
    test = BettingTest(bound=-0.2, error=0.05)
    for one in before:
        test.observe(one)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(test), type=BettingTest)
    for one in after:
        test.observe(one)
        again.observe(one)
    assert again == test


@pytest.mark.parametrize("value", (1.01, -1.5, math.nan, math.inf))
def test_what_is_no_difference_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is not from -1 to 1"):
        BettingTest(bound=0.0, error=0.05).observe(value)
