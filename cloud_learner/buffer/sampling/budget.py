"""Dividing bytes and draws among strata: pure functions."""

from __future__ import annotations

import numpy as np


def allot(budget: int, share: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray | None:
    """int64[k] bytes each stratum may hold, together at most `budget`, by water-filling.

    Everybody gets bytes in proportion to its `share` (float64[k]), but at least `least` and at most `most` (int64[k]);
    None if the least are too much. If the most fit, everybody gets the most.
    """
    least = np.minimum(least, most)
    if most.sum() <= budget:
        return most.astype(np.int64)
    if least.sum() > budget:
        return None
    # the level is found by halving: what it fills grows with it
    low, high = 0.0, float(budget) / max(share[share > 0].min(initial=1.0), 1e-12)
    for _ in range(100):
        level = (low + high) / 2
        if np.clip(level * share, least, most).sum() <= budget:
            low = level
        else:
            high = level
    return np.floor(np.clip(low * share, least, most)).astype(np.int64)


def apportion(count: int, share: np.ndarray, credit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[k] draws that sum to `count`, float64[k] credit to carry on) by `share`, float64[k] that sums to 1.

    What rounding takes from one batch the next ones give back, so that over any number of batches each part gets its
    share to within a draw or two. A part without a share gets nothing and loses its credit.
    """
    some = share > 0
    wish = np.where(some, credit + count * share, 0.0)
    wish[some] += (count - wish.sum()) / some.sum()
    draws = np.floor(np.maximum(wish, 0)).astype(np.int64)
    missing = count - int(draws.sum())
    rest = np.where(some, wish - draws, -np.inf)
    if missing > 0:
        # they are fewer than the parts, for each wish was rounded down by less than 1
        draws[np.argsort(-rest, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        draws[np.argmin(np.where(draws > 0, wish - draws, np.inf))] -= 1
    return draws, wish - draws
