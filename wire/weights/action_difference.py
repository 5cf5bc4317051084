"""How far apart the actions of two versions lie for the same observations: sums that robots send and a gateway adds."""

from __future__ import annotations

import math
from itertools import zip_longest

import msgspec
import numpy as np

from wire.errors import InvalidDataError

_LEAST = 1e-4
_BINS_A_DECADE = 20
BINS = 4 * _BINS_A_DECADE + 1
"""of differences below 1e-4, then 20 for each power of ten up to 1"""
_MOST_VALUES = 10**9
"""of one sum: more than any robot compares in a year"""


class ActionDifference(msgspec.Struct, frozen=True):
    """Numbers are shares of their action dimension's range, high - low of the spec: 0 the same, 1 from end to end."""

    chunks: int = 0
    """that were compared"""
    total: float = 0.0
    """sum over all numbers"""
    bins: tuple[int, ...] = ()
    """how many numbers lie in each of `BINS`; () for none"""
    largest: tuple[float, ...] = ()
    """by action dimension"""

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray, low: np.ndarray, high: np.ndarray) -> ActionDifference:
        """Of two chunks float32[n, da]; `low`, `high`: float32[da]. Raises `InvalidDataError`."""
        if one.shape != other.shape or not len(one):
            raise InvalidDataError(f"chunks of shape {list(one.shape)} and {list(other.shape)} cannot be compared.")
        shares = np.abs(one.astype(np.float64) - other) / (high - low)
        if not np.isfinite(shares).all():
            raise InvalidDataError("chunks with actions that are not finite cannot be compared.")
        places = np.floor(np.log10(np.maximum(shares, _LEAST / 10) / _LEAST) * _BINS_A_DECADE) + 1
        bins = np.bincount(np.clip(places, 0, BINS - 1).astype(int).ravel(), minlength=BINS)
        return cls(1, float(shares.sum()), tuple(bins.tolist()), tuple(shares.max(axis=0).tolist()))

    @property
    def values(self) -> int:
        """Numbers that were compared."""
        return sum(self.bins)

    @property
    def mean(self) -> float:
        return self.total / max(self.values, 1)

    @property
    def p95(self) -> float:
        """At most an eighth above the 95th percentile."""
        wanted, seen = 0.95 * self.values, 0
        for place, count in enumerate(self.bins):
            seen += count
            if seen >= wanted:
                return min(_LEAST * 10 ** (place / _BINS_A_DECADE), max(self.largest))
        return 0.0

    def plus(self, other: ActionDifference) -> ActionDifference:
        """Of both together; robots of several shapes have not the same dimensions."""
        if not (self.chunks and other.chunks):
            return self if self.chunks else other
        bins = tuple(mine + theirs for mine, theirs in zip(self.bins, other.bins, strict=True))
        largest = tuple(map(max, zip_longest(self.largest, other.largest, fillvalue=0.0)))
        return ActionDifference(self.chunks + other.chunks, self.total + other.total, bins, largest)

    def require_valid(self, dimensions: int) -> None:
        """Raise `InvalidDataError` for what cannot have come of comparing chunks of so many dimensions."""
        if self == ActionDifference():
            return
        fits = len(self.bins) == BINS and len(self.largest) == dimensions and min(self.bins) >= 0
        # actions are clipped to their limits before they are compared
        fits = fits and 0 < self.chunks <= self.values <= _MOST_VALUES and 0 <= self.total <= 1.001 * self.values
        if not (fits and all(math.isfinite(one) and 0 <= one <= 1.001 for one in self.largest)):
            raise InvalidDataError("a difference of actions that no two chunks can have.")
