"""What enters and leaves memory with one batch, and what that adds up to."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.epoch import Block


class CacheOps(msgspec.Struct):
    """What enters and leaves memory with one batch."""

    drop: list[Block] = msgspec.field(default_factory=list)
    """before anything enters"""
    admit: list[Block] = msgspec.field(default_factory=list)
    release: list[Block] = msgspec.field(default_factory=list)
    """after the batch"""

    def settle(self) -> None:
        """What is let enter and dropped at once does neither."""
        if self.admit and self.drop and (both := Counter(self.admit) & Counter(self.drop)):
            self.admit, self.drop = _without(self.admit, both), _without(self.drop, both)

    def clear(self) -> None:
        """For the next batch."""
        self.drop, self.admit, self.release = [], [], []


class CacheUsage:
    """Who holds which segment, and how many bytes they take."""

    def __init__(self) -> None:
        self._holders: np.ndarray = np.zeros(0, np.int32)
        self.bytes = 0
        """each held segment once"""

    def grow(self, segments: int) -> None:
        """There are so many segments now."""
        self._holders = np.append(self._holders, np.zeros(segments - len(self._holders), np.int32))

    def count(self, blocks: tuple[Block, ...], holders: int, cost: np.ndarray) -> None:
        """Each segment in `blocks` has so many holders more, or fewer; `cost` int64[segments] bytes."""
        if not blocks:
            return
        segments = np.fromiter((segment for block in blocks for segment in block), np.int64)
        touched = np.unique(segments)
        before = self._holders[touched] > 0
        np.add.at(self._holders, segments, holders)
        after = self._holders[touched] > 0
        self.bytes += int(cost[touched[after & ~before]].sum()) - int(cost[touched[before & ~after]].sum())


def _without(blocks: list[Block], some: Counter[Block]) -> list[Block]:
    left, rest = some.copy(), []
    for block in blocks:
        if left[block] > 0:
            left[block] -= 1
        else:
            rest.append(block)
    return rest
