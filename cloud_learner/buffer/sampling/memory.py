"""Which segments lie in memory, and who keeps them there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cloud_learner.buffer.sampling.growing import Growing


class LoadedSegments:
    """A segment that was loaded stays while visits hold it, or while independent draws may come to it."""

    def __init__(self) -> None:
        self._visits, self._loaded = Growing(np.int32), Growing(np.bool_)
        self._may_leave: list[np.ndarray] = []
        self.bytes = 0

    @property
    def visits(self) -> np.ndarray:
        """int32[segments] that hold each of them, to be written; who ends one calls `let_leave`"""
        return self._visits.all

    def grow(self, segments: int) -> None:
        """There are so many segments now."""
        more = segments - len(self.visits)
        self._visits.append(np.zeros(more, np.int32))
        self._loaded.append(np.zeros(more, bool))

    def let_leave(self, segments: np.ndarray) -> None:
        """int64[k] that have a visit less, or that independent draws may not come to any more."""
        self._may_leave.append(segments)

    def settle(
        self, drawn: np.ndarray, cost: np.ndarray, drawable: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(drop, load) int64 segments, growing, of the batch that draws from int64[b] `drawn`.

        `drawable`: to which of growing int64[k] segments, bool[k], independent draws may come. What a batch draws from
        leaves with a later one.
        """
        loaded = self._loaded.all
        drop = np.zeros(0, np.int64)
        if self._may_leave:
            drop = np.unique(np.concatenate(self._may_leave))
            needed = np.isin(drop, drawn)
            self._may_leave = [drop[needed]] if needed.any() else []
            drop = drop[~needed & loaded[drop] & (self.visits[drop] == 0)]
            drop = drop[~drawable(drop)]
        load = drawn[~loaded[drawn]]
        if len(load) or len(drop):
            load = np.unique(load)
            loaded[drop], loaded[load] = False, True
            self.bytes += int(cost[load].sum()) - int(cost[drop].sum())
        return drop, load
