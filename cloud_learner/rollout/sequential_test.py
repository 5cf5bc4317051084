"""Is a mean above a bound? Asked after every observation, with an error that holds at any time.

Testing by betting (Waudby-Smith and Ramdas 2020, arXiv 2010.09686, section 4): whoever doubts H0 bets on it. While H0
holds no bet gains on average, so the chance that the wealth ever reaches 1 / error is at most `error` (Ville's
inequality), however often and for whatever reason one looks and stops.
"""

from __future__ import annotations

import math

import msgspec

_BETS = 8


class BettingTest(msgspec.Struct):
    """H0: the mean of D in [-1, 1], given what came before, is at most `bound`."""

    bound: float
    """above -1 and below 1"""
    logs: list[float] = []
    """of the wealth of each bet"""
    count: int = 0

    def add(self, value: float) -> None:
        """Observe a D; values beyond [-1, 1] count as the nearest of it."""
        logs = self.logs or [0.0] * _BETS
        gain = max(-1.0, min(1.0, value)) - self.bound
        # Several bets share the money: none has to be right about how far above the bound the mean is.
        most = 1.0 / (1.0 + self.bound)
        self.logs = [one + math.log1p(most * (k + 1) / (_BETS + 1) * gain) for k, one in enumerate(logs)]
        self.count += 1

    @property
    def wealth(self) -> float:
        """1 at the beginning; 1 / error rejects H0."""
        return sum(math.exp(min(700.0, one)) for one in self.logs) / _BETS if self.logs else 1.0

    def rejects(self, error: float) -> bool:
        """Whether H0 is rejected, which happens with a chance of at most `error` while it holds."""
        return self.wealth >= 1.0 / error
