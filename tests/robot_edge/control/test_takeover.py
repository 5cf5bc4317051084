"""The gate of the scripted operator: when it takes over, and whom it leaves alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from robot_edge.control.config import GateConfig
from robot_edge.control.takeover import Gate
from wire.errors import ConfigError

ONE, OTHER = np.zeros(4, np.float32), np.ones(4, np.float32)


def opens_after(ticks: int, gate: Gate, outlook: float = math.nan, progress: float = 1.0) -> int | None:
    """The tick at which it took over; nobody gets on."""
    return next((tick for tick in range(ticks) if gate.update(ONE, OTHER, progress, outlook)), None)


@pytest.mark.parametrize(
    ("trust", "outlook", "at"),
    [(0.0, 1.0, 2), (0.8, math.nan, 2), (0.8, 0.79, 2), (0.8, 0.8, 9), (0.8, 1.0, 9)],
)
def test_a_policy_that_is_trusted_may_disagree_and_not_stand_still(trust: float, outlook: float, at: int) -> None:
    gate = Gate(GateConfig(disagreement_ticks=3, stall_ticks=9, trust=trust))
    assert opens_after(20, gate, outlook) == at


def test_trust_ends_no_takeover() -> None:
    gate = Gate(GateConfig(disagreement_ticks=1, min_ticks=4, trust=0.8))
    assert gate.update(ONE, OTHER, 1.0, 0.5)
    assert [gate.update(ONE, OTHER, 0.5, 1.0) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_is_asked_of_a_person_than_may_be_and_what_was_saved_may_be_asked_later(seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = GateConfig(disagreement_ticks=1, min_ticks=10, most_share=0.2, saved_ticks=200)
    gate, driven = Gate(config), []
    for tick in range(6000):
        if rng.random() < 0.02:
            gate.reset()
        calm = tick < 600
        driven.append(gate.update(ONE, ONE if calm else OTHER, -tick))
    assert not any(driven[:600])
    total = np.concatenate([[0], np.cumsum(driven)])
    for length in (100, 500, 2000):
        most = (total[length:] - total[:-length]).max()
        assert most <= config.most_share * (length + config.saved_ticks) + config.min_ticks
    assert 30 <= total[650] <= 50, "what was saved, at once"
    assert total[-1] - total[1600] > 0.19 * 4400, "and then what may be"


def test_a_share_that_lets_nobody_take_over_is_refused() -> None:
    for share in (0.0, 1.1, 0.01):
        with pytest.raises(ConfigError, match="most_share"):
            GateConfig(most_share=share)
