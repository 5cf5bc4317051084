"""Confidence intervals for benchmarks of a few seeds and many episodes each."""

from __future__ import annotations

import numpy as np

_DRAWS = 2000


def bootstrap(scores: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of float[seeds, episodes]: (low, high).

    Seeds are drawn with replacement, then episodes of each: what other trainings and other scenes would give. Of few
    seeds it is rather too narrow.
    """
    rng = np.random.default_rng(seed)
    seeds, episodes = scores.shape
    chosen = rng.integers(0, seeds, (_DRAWS, seeds))
    within = rng.integers(0, episodes, (_DRAWS, seeds, episodes))
    means = scores[chosen[..., None], within].mean((1, 2))
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def shown(mean: float, interval: tuple[float, float]) -> str:
    """`0.96 [0.93, 0.98]`"""
    return f"{mean:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
