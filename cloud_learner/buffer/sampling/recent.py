"""The newest steps of a task, drawn from independently."""

from __future__ import annotations

import numpy as np

from cloud_learner.buffer.sampling.eligible import EligibleSteps


class RecentSteps:
    """The last steps of some runs, by weight."""

    def __init__(self, known: EligibleSteps, runs: np.ndarray, steps: int) -> None:
        """The last `steps` of int64[k] growing eligible `runs`, or all."""
        self._index = known.index
        count = self._index.run_count[runs].astype(np.int64)
        # of each run what is above the steps of those after it, of `steps`
        count = np.minimum(count, steps - np.append(np.cumsum(count[::-1])[::-1], 0)[1:])
        here = count > 0
        self.runs, self._count, self._weight = runs[here], count[here], known.weight[runs[here]]
        self._until = np.cumsum(self._weight * self._count)

    @property
    def mass(self) -> float:
        """Sum of the weights of the steps."""
        return float(self._until[-1])

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of steps, with replacement."""
        point = rng.random(count) * self._until[-1]
        at = np.minimum(self._until.searchsorted(point, "right"), len(self._until) - 1)
        back = ((self._until[at] - point) / self._weight[at]).astype(np.int64)
        runs = self.runs[at]
        last = self._index.run_first[runs] + self._index.run_count[runs] - 1
        return runs, last - np.minimum(back, self._count[at] - 1)

    def chance(self, runs: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """float64[k]: how probable each of the int64[k] steps is in one draw."""
        at = np.minimum(self.runs.searchsorted(runs), len(self.runs) - 1)
        begin = self._index.run_first[runs] + self._index.run_count[runs] - self._count[at]
        there = (self.runs[at] == runs) & (offsets >= begin)
        return np.where(there, self._weight[at] / self.mass, 0.0)
