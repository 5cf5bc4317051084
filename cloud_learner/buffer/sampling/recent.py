"""The newest eligible steps of each task: they stay in memory, and a part of all draws goes to them."""

from __future__ import annotations

import numpy as np

from cloud_learner.buffer.sampling.cache_ops import CacheOps
from cloud_learner.buffer.sampling.snapshot import Choice, SamplingSnapshot
from cloud_learner.buffer.sampling.target import Recent


class RecentSampler:
    """What `Recent` asks for. `moves` collects what enters and leaves memory."""

    def __init__(self, scope: SamplingSnapshot, recent: Recent, moves: CacheOps) -> None:
        self._scope, self._recent, self._moves = scope, recent, moves
        self._choices: dict[int, Choice] = {}
        self._segments = np.zeros(0, np.int64)

    def find(self, drawn: np.ndarray) -> int:
        """After the scope moved: look for them in the strata of bool[tasks, 2] that are drawn from at all.

        Bytes of their segments; `hold` them if they fit.
        """
        self._choices = {}
        for task in np.flatnonzero(drawn.any(1)).tolist() if self._recent.share else ():
            self._find(task, np.flatnonzero(drawn[task]).tolist())
        runs = [choice.runs for choice in self._choices.values()]
        self._wanted = np.unique(self._scope.universe.run_segment[np.concatenate(runs)]) if runs else np.zeros(0, int)
        return int(self._scope.cost[self._wanted].sum())

    def hold(self) -> None:
        """Have in memory what was found, and nothing else."""
        self._moves.drop += [(s,) for s in np.setdiff1d(self._segments, self._wanted, assume_unique=True).tolist()]
        self._moves.admit += [(s,) for s in np.setdiff1d(self._wanted, self._segments, assume_unique=True).tolist()]
        self._segments = self._wanted

    def choice(self, task: int) -> Choice | None:
        """Where to draw from; None for a task without data."""
        return self._choices.get(task)

    def _find(self, task: int, parts: list[int]) -> None:
        scope = self._scope
        # as each run has a step at least, so many are enough
        most = self._recent.newest
        runs = np.sort(np.concatenate([scope.views[2 * task + part].runs[-most:] for part in parts]))
        counts = scope.universe.run_count[runs].astype(np.int64)
        above = np.cumsum(counts[::-1])[::-1]
        # the last run that has enough steps in it and after it
        first = max(0, int(np.searchsorted(-above, -most, "right")) - 1)
        self._choices[task] = Choice(scope, runs[first:], max(0, int(above[first]) - most))
