"""What figures of success are worth: intervals of a share, and the test of two policies on the same scenes."""

from __future__ import annotations

import math

_Z = 1.959964
"""of a two-sided 95 % interval"""


def wilson(wins: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share of successes (Wilson 1927): (low, high)."""
    if trials < 1:
        raise ValueError("an interval of no trials.")
    share, z2 = wins / trials, _Z**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    reach = _Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(only_one: int, only_other: int) -> float:
    """Exact two-sided p-value that two policies succeed alike (McNemar 1947, by the binomial distribution).

    Of scenes on which both did the same nothing is learned; `only_one` and `only_other` are those where just one
    succeeded.
    """
    trials, fewer = only_one + only_other, min(only_one, only_other)
    tail = sum(math.comb(trials, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**trials)


def paired_difference(both: int, only_one: int, only_other: int, neither: int) -> tuple[float, float]:
    """95 % interval of one's share of successes less the other's, on the same scenes: (low, high).

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    method 10: Wilson's intervals of the two, and how far they go together.
    """
    trials = both + only_one + only_other + neither
    one, other = (both + only_one) / trials, (both + only_other) / trials
    low_one, high_one = wilson(both + only_one, trials)
    low_other, high_other = wilson(both + only_other, trials)
    margins = (both + only_one) * (only_other + neither) * (both + only_other) * (only_one + neither)
    phi = 0.0
    if margins:
        product = both * neither - only_one * only_other
        # with the correction for few scenes that go together
        phi = (max(product - trials / 2, 0.0) if product > 0 else float(product)) / math.sqrt(margins)

    def reach(below: float, above: float) -> float:
        return math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))

    difference = one - other
    low = difference - reach(one - low_one, high_other - other)
    return low, difference + reach(high_one - one, other - low_other)
