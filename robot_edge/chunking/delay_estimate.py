"""How long the next answer will take, judged by the last ones."""

from __future__ import annotations

import math
from collections import deque

from wire.errors import ConfigError


class DelayEstimator:
    """A high percentile of the last measured delays, in control ticks.

    It is of use from the first measurement on: of few delays it is the longest. One slow answer counts until enough
    quick ones came after it, and none for longer than the window. It outlives episodes; give it to the next schedule
    too when weights of another training come.
    """

    def __init__(self, window: int = 50, quantile: float = 0.95, first: int = 1) -> None:
        """`first`: what to expect before anything was measured, in ticks. Raises `ConfigError` for what cannot be."""
        if window < 1 or not 0 < quantile <= 1 or first < 0:
            raise ConfigError(
                f"delay forecast of window {window}, quantile {quantile}, first {first}: give a window of at least 1, "
                "a quantile in (0, 1] and a first delay of 0 or more ticks."
            )
        self._last: deque[int] = deque(maxlen=window)
        self._quantile = quantile
        self.ticks = first
        """the forecast"""

    def add(self, delay_ticks: int) -> None:
        """An answer took `delay_ticks`."""
        self._last.append(max(delay_ticks, 0))
        ordered = sorted(self._last)
        # the smallest delay that at least `quantile` of the answers kept; the margin is for 0.95 * 20 = 19.000...1
        self.ticks = ordered[math.ceil(self._quantile * len(ordered) - 1e-9) - 1]
