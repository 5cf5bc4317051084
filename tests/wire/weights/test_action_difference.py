"""Differences of actions, added up, are those of all chunks together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import InvalidDataError
from wire.weights.action_difference import ActionDifference

LOW, HIGH = np.array([-1.0, 0.0, 5.0], np.float32), np.array([1.0, 10.0, 5.5], np.float32)


def chunks(seed: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    one = draw.uniform(LOW, HIGH, (7, 3)).astype(np.float32)
    return one, np.clip(one + scale * draw.standard_normal((7, 3)) * (HIGH - LOW), LOW, HIGH).astype(np.float32)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from((0.0, 1e-4, 0.003, 0.1, 2.0))), min_size=1, max_size=20)
)
def test_sums_are_those_of_all_together(drawn: list[tuple[int, float]]) -> None:
    found, shares = ActionDifference(), []
    for seed, scale in drawn:
        one, other = chunks(seed, scale)
        found = found.plus(ActionDifference.of(one, other, LOW, HIGH))
        shares.append(np.abs(one.astype(np.float64) - other) / (HIGH - LOW))
    every = np.concatenate(shares)
    assert (found.chunks, found.values) == (len(drawn), every.size)
    assert found.mean == pytest.approx(every.mean(), abs=1e-9)
    assert found.largest == pytest.approx(every.max(axis=0).tolist())
    exact = float(np.quantile(every, 0.95, method="inverted_cdf"))
    assert exact - 1e-9 <= max(found.p95, 0) + 1e-9 and found.p95 <= max(exact * 1.13, 1e-4)
    found.require_valid(3)


def test_nothing_is_added_to_nothing() -> None:
    nothing = ActionDifference()
    nothing.require_valid(3)
    assert (nothing.mean, nothing.p95, nothing.values, nothing.plus(nothing)) == (0, 0, 0, nothing)
    one = ActionDifference.of(*chunks(1, 0.1), LOW, HIGH)
    assert one.plus(nothing) == nothing.plus(one) == one


@pytest.mark.parametrize(
    "other", [np.zeros((6, 3), np.float32), np.zeros((7, 2), np.float32), np.full((7, 3), np.nan, np.float32)]
)
def test_what_cannot_be_compared_is_refused(other: np.ndarray) -> None:
    with pytest.raises(InvalidDataError, match="cannot be compared"):
        ActionDifference.of(chunks(1, 0.1)[0], other, LOW, HIGH)
