"""Limits from how a person moved a robot by hand: what the task needs, not what the motors could."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hal.safety.limits import SafetyLimits
from wire.errors import InvalidDataError

SHARE = 0.8
"""of the fastest motion seen"""
_WINDOW_S = 0.12
"""a speed is measured over so long: encoders count in steps, and a step within one sample is no motion"""
_MOVED = 5.0
"""a dimension that went through less, in its own unit, was not shown"""
_DIGITS = 3


def limits_from_motion(
    names: Sequence[str], times_s: np.ndarray, positions: np.ndarray, share: float = SHARE
) -> SafetyLimits:
    """Velocity and acceleration of the dimensions that moved: `share` of the greatest, each over a tenth of a second.

    `times_s`: float64[n], growing; `positions`: float64[n, d] of `names`. An emergency stop may brake twice as hard.
    Raises `InvalidDataError` for a recording that is too short.
    """
    if len(times_s) < 4 or times_s[-1] - times_s[0] < 4 * _WINDOW_S:
        raise InvalidDataError(f"{len(times_s)} positions are too few to measure a motion; watch for longer.")
    # Evenly, so that a reading that came late is no jump.
    even = np.arange(times_s[0], times_s[-1], _WINDOW_S / 4)
    velocity: dict[str, float] = {}
    acceleration: dict[str, float] = {}
    for name, column in zip(names, np.asarray(positions, np.float64).T, strict=True):
        if np.ptp(column) < _MOVED:
            continue
        speed = _slope(np.interp(even, times_s, column))
        velocity[name] = _rounded(share * np.abs(speed).max())
        acceleration[name] = _rounded(share * np.abs(_slope(speed)).max())
    stop = {name: _rounded(2 * value) for name, value in acceleration.items()}
    return SafetyLimits(velocity, acceleration, stop)


def _slope(values: np.ndarray) -> np.ndarray:
    """Per second, over one window."""
    return (values[4:] - values[:-4]) / _WINDOW_S


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
