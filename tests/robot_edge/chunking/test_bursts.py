"""Answers that are late now and then: a few of them do not make every chunk old."""

from __future__ import annotations

import numpy as np
import pytest

from hal.safety.limits import SafetyLimits
from tests.robot_edge.chunking.moving_target import kept

LIMITS = SafetyLimits({"x": 1.75}, {"x": 50.0})
"""m/s, m/s²: after each gust they bind"""
RUNS = 4


def bursts(seed: int) -> list[int]:
    """15 % of the answers take 12 ticks, the others 2."""
    return np.where(np.random.default_rng(seed).random(400) < 0.15, 12, 2).tolist()


def anything(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 9, 400).tolist()


def mean(strategy: str, delays, safety: SafetyLimits | None) -> float:
    return float(np.mean([kept(strategy, delays(run), run, safety) for run in range(RUNS)]))


@pytest.mark.parametrize("safety", [None, LIMITS], ids=["free", "limited"])
@pytest.mark.parametrize("delays", [bursts, anything])
def test_what_looks_ahead_keeps_a_moving_target_no_less_than_what_does_not(delays, safety: SafetyLimits | None) -> None:
    naive, aligned = mean("naive", delays, safety), mean("aligned", delays, safety)
    for strategy in ("rtc_guided", "rtc_trained", "future_state"):
        found = mean(strategy, delays, safety)
        assert found >= aligned, strategy
        assert found >= naive - 0.02, strategy


def test_bursts_cost_less_than_if_every_answer_were_as_late() -> None:
    for strategy in ("rtc_guided", "rtc_trained", "future_state"):
        usual, late = mean(strategy, lambda run: [2] * 400, None), mean(strategy, lambda run: [12] * 400, None)
        assert mean(strategy, bursts, None) > (usual + late) / 2 > late, strategy
