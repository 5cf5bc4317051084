"""The gate of the scripted operator: when it takes over, and whom it leaves alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from robot_edge.control.config import GateConfig
from robot_edge.control.takeover import Gate

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
