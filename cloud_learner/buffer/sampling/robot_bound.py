"""How much of what is learned can come from one robot.

In a stratum in which N robots have brought at least `LEAST_STEPS` steps that may be drawn, 3 or more, no robot's steps
weigh together more than max(2 / N, `LEAST_SHARE`) of all: those of one that would are multiplied by a number below 1,
the same for all of them. A fleet whose robots bring about as much each is never touched. With fewer robots nobody can
say which of them is the odd one.
"""

from __future__ import annotations

import itertools

import numpy as np

LEAST_STEPS = 1000
"""that a robot must have brought to count: the bound must not leave most of the draws to a few steps"""
LEAST_SHARE = 0.25
_PER_OCTAVE = 8
"""factors are powers of 2 ** (1 / 8), rounded down: they change seldom, and each change costs all steps of the robot"""


def level(masses: np.ndarray, share: float) -> float:
    """The largest L with which no min(m, L), of float64[k] `masses` >= 0, is more than `share` of the sum of them all;
    the largest mass where none is."""
    falling = np.append(np.sort(masses)[::-1], 0.0).tolist()
    rest = sum(falling)
    for cut, (mass, following) in enumerate(itertools.pairwise(falling), 1):
        # If the first `cut` are brought down to the level, and no others.
        rest -= mass
        found = share * max(rest, 0.0) / (1 - share * cut) if share * cut < 1 else mass
        if found >= following:
            return min(found, falling[0])
    return falling[0]


def factors(masses: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """float64[k] by which the weights of each robot are multiplied, from float64[k] sums of their weights and int64[k]
    steps that may be drawn."""
    count = int((steps >= LEAST_STEPS).sum())
    if count < 3:
        return np.ones(len(masses))
    bound = level(masses, max(2 / count, LEAST_SHARE))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(masses > bound * (1 + 1e-9), bound / masses, 1.0)
        rounded = np.exp2(np.floor(np.log2(found) * _PER_OCTAVE) / _PER_OCTAVE)
    return np.where(found < 1, rounded, 1.0)


class RobotBound:
    """The sums of weights by stratum and robot, and the factors that follow."""

    def __init__(self, strata: int) -> None:
        self._masses: np.ndarray = np.zeros((strata, 0))
        self._steps: np.ndarray = np.zeros((strata, 0), np.int64)
        self.factor: np.ndarray = np.ones((strata, 0))
        """float64[strata, robots]"""

    def add(
        self, count: int, strata: np.ndarray, robots: np.ndarray, masses: np.ndarray, steps: np.ndarray
    ) -> np.ndarray:
        """Note int64[k] pairs of stratum and robot, of `count` robots, whose steps weigh so much more than before, and
        are so many more.

        bool[strata, robots]: where the factor is another one now.
        """
        if (more := count - self.factor.shape[1]) > 0:
            self._masses, self._steps = (np.pad(one, ((0, 0), (0, more))) for one in (self._masses, self._steps))
            self.factor = np.pad(self.factor, ((0, 0), (0, more)), constant_values=1.0)
        np.add.at(self._masses, (strata, robots), masses)
        np.add.at(self._steps, (strata, robots), steps)
        before = self.factor.copy()
        for one in np.unique(strata).tolist():
            self.factor[one] = factors(np.maximum(self._masses[one], 0.0), self._steps[one])
        return self.factor != before
