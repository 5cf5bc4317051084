"""Intervals and the paired test, against textbook figures and by counting."""

from __future__ import annotations

import itertools

import pytest

from fleet.evaluation.statistics import mcnemar, paired_difference, wilson


def test_wilson_is_the_textbook_interval() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-3)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no trials"):
        wilson(0, 0)


@pytest.mark.parametrize(("one", "other"), [(0, 0), (3, 3), (1, 9), (0, 6), (7, 2)])
def test_mcnemar_counts_the_coin_throws_that_are_as_uneven(one: int, other: int) -> None:
    throws = list(itertools.product((0, 1), repeat=one + other))
    uneven = [throw for throw in throws if abs(2 * sum(throw) - len(throw)) >= abs(one - other)]
    assert mcnemar(one, other) == pytest.approx(len(uneven) / len(throws))
    assert mcnemar(one, other) == mcnemar(other, one)


@pytest.mark.parametrize(
    ("cells", "interval"),
    [
        # Newcombe 1998, table III, method 10
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((20, 12, 2, 16), (0.0562, 0.3292)),
        ((53, 1, 0, 0), (-0.0508, 0.0979)),
    ],
)
def test_the_paired_interval_is_newcombes(cells: tuple[int, int, int, int], interval: tuple[float, float]) -> None:
    assert paired_difference(*cells) == pytest.approx(interval, abs=2e-3)
    both, one, other, neither = cells
    low, high = paired_difference(both, other, one, neither)
    assert (-high, -low) == pytest.approx(paired_difference(*cells))
