"""Limits from a motion whose speed is known."""

from __future__ import annotations

import numpy as np
import pytest

from hal.safety.measured import limits_from_motion
from wire.errors import InvalidDataError

TIMES_S = np.arange(0, 8, 0.02)
STEP_DEG = 360 / 4095


def swing(amplitude: float, period_s: float) -> np.ndarray:
    """Degrees, as an encoder of 4096 steps has them."""
    return np.round(amplitude * np.sin(2 * np.pi * TIMES_S / period_s) / STEP_DEG) * STEP_DEG


def test_a_share_of_the_fastest_is_proposed_and_what_did_not_move_is_left_out() -> None:
    positions = np.stack([swing(30, 2), swing(10, 4), swing(1, 1)], 1)
    found = limits_from_motion(["pan", "lift", "grip"], TIMES_S, positions, share=0.5)
    omega = np.pi
    assert found.velocity["pan"] == pytest.approx(0.5 * 30 * omega, rel=0.05)
    assert found.velocity["lift"] == pytest.approx(0.5 * 10 * omega / 2, rel=0.1)
    assert found.acceleration["pan"] == pytest.approx(0.5 * 30 * omega**2, rel=0.1)
    assert found.stop_deceleration["pan"] == pytest.approx(2 * found.acceleration["pan"], rel=0.01)
    assert set(found.velocity) == set(found.acceleration) == {"pan", "lift"}


def test_a_reading_that_comes_late_is_no_jump() -> None:
    keep = np.ones(len(TIMES_S), bool)
    keep[100:110] = False
    found = limits_from_motion(["pan"], TIMES_S[keep], swing(30, 2)[keep, None], share=1.0)
    assert found.velocity["pan"] == pytest.approx(30 * np.pi, rel=0.1)


def test_too_little_is_refused() -> None:
    with pytest.raises(InvalidDataError, match="too few"):
        limits_from_motion(["pan"], TIMES_S[:3], np.zeros((3, 1)))
