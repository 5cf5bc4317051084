"""A test that may be looked at after every episode: betting against a hypothesis about a bounded mean."""

from __future__ import annotations

import math

import msgspec

_BETS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.97)
"""as shares of the largest bet that never loses all"""


class BettingTest(msgspec.Struct, kw_only=True):
    """One-sided test of H0: the mean of each D, given those before it, is at most `bound`; D in [-1, 1].

    Capital of 1 is divided among bets b of a grid, each of which has made prod(1 + b (D_i - bound)); 0 <= b < 1 / (1 +
    bound) keeps it above zero. Under H0 the sum is a non-negative supermartingale, so by Ville's inequality it ever
    reaches 1 / error with a probability of at most `error`, whenever and however often one looks and whatever stops it
    (Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, JRSS B 2024, arXiv 2010.09686,
    section 4; the mixture over a grid: their section 4.3 and appendix). Not needed: equal distributions, independence,
    or a number of episodes chosen before.

    Plain data: what `msgspec` made of it goes on where it was.
    """

    bound: float
    error: float
    reserve: float = 0.0
    """share of the capital that is not bet, at the start and after `restart`"""
    log_capital: list[float] = []
    """of the reserve, then of each bet; filled by the first difference"""
    count: int = 0
    total: float = 0.0
    rejected: bool = False
    """the capital has reached 1 / error; for good"""

    def observe(self, difference: float) -> None:
        """The next D. Raises `ValueError` when it is not from -1 to 1."""
        if not -1 <= difference <= 1:
            raise ValueError(f"a difference of {difference} is not from -1 to 1.")
        if not self.log_capital:
            self.log_capital = self._fresh(0.0)
        gain = (difference - self.bound) / (1 + self.bound)
        for at, bet in enumerate(_BETS, start=1):
            self.log_capital[at] += math.log1p(bet * gain)
        self.count += 1
        self.total += difference
        self.rejected = self.rejected or self.is_over

    @property
    def log_wealth(self) -> float:
        """Natural logarithm of the capital now: 0 at the start, positive speaks against H0."""
        if not self.log_capital:
            return 0.0
        most = max(self.log_capital)
        return most + math.log(sum(math.exp(one - most) for one in self.log_capital))

    @property
    def is_over(self) -> bool:
        """Whether the capital is 1 / error or more now."""
        return self.log_wealth >= -math.log(self.error)

    @property
    def mean(self) -> float:
        """Of all D, 0 before the first."""
        return self.total / self.count if self.count else 0.0

    def restart(self, share: float) -> None:
        """Divide `share` of the capital anew, as at the start: what comes may differ from what was.

        It is a bet like any other, known before the next D, so that the test's error stays what it was; fixed share of
        Herbster and Warmuth, Tracking the best expert, Machine Learning 32, 1998.
        """
        if not self.log_capital:
            return
        moved = self._fresh(self.log_wealth + math.log(share))
        kept = math.log1p(-share)
        self.log_capital = [_log_add(one + kept, new) for one, new in zip(self.log_capital, moved, strict=True)]

    def _fresh(self, log_capital: float) -> list[float]:
        reserve = math.log(self.reserve) if self.reserve else -1e9
        each = math.log((1 - self.reserve) / len(_BETS))
        return [log_capital + reserve] + [log_capital + each] * len(_BETS)


def _log_add(one: float, other: float) -> float:
    most = max(one, other)
    return most + math.log(math.exp(one - most) + math.exp(other - most))
