"""Sums, or maxima, over a growing column, kept for blocks, blocks of blocks, and so on."""

from __future__ import annotations

import numpy as np

_FAN = 32


class Tree:
    """A growing column of float64, 0 or more each: setting k of n costs k log n, and so does finding k by their sums.

    All it answers depends on the values alone, to the last bit, not on when or in which parts they were set.
    """

    def __init__(self, combine: np.ufunc = np.add) -> None:
        """`combine`: `np.add` or `np.maximum`; only sums can be searched."""
        self._combine = combine
        self._levels: list[np.ndarray] = [np.zeros((1, _FAN))]
        """float64[blocks, _FAN] with room for more: values, then what each block comes to, until it is one block"""

    @property
    def total(self) -> float:
        """Of all."""
        return float(self._combine.accumulate(self._levels[-1][0])[-1])

    @property
    def values(self) -> np.ndarray:
        """float64, in place, with zeros after the last: take it again after `put`, and do not write."""
        return self._levels[0].reshape(-1)

    def grow(self, length: int) -> None:
        """There are so many now; the new ones are 0."""
        length += 1
        for number, level in enumerate(self._levels):
            blocks = -(-length // _FAN)
            if blocks > len(level):
                # room that nobody writes to takes no memory
                self._levels[number] = np.zeros((2 * blocks, _FAN))
                self._levels[number][: len(level)] = level
            length = len(self._levels[number])
        while len(below := self._levels[-1]) > 1:
            self._levels.append(np.zeros((-(-len(below) // _FAN), _FAN)))
            self._levels[-1].reshape(-1)[: len(below)] = self._combine.accumulate(below, axis=1)[:, -1]

    def put(self, at: np.ndarray, values: np.ndarray) -> None:
        """Set those at growing int64[k] to float64[k]."""
        for level in self._levels:
            level.reshape(-1)[at] = values
            at = at // _FAN
            at = at[np.flatnonzero(np.diff(at, prepend=-1))]
            values = self._combine.accumulate(level[at], axis=1)[:, -1]

    def before(self, at: int) -> float:
        """Sum of those before `at`."""
        total = 0.0
        for level in self._levels:
            at, within = divmod(at, _FAN)
            total += float(level[at : at + 1, :within].sum())
        return total

    def since(self, at: int) -> float:
        """Sum of `at` and those after it: not a difference, so it is 0 where these are."""
        total = 0.0
        for level in self._levels:
            at, within = divmod(at, _FAN)
            total += float(level[at : at + 1, within:].sum())
            at += 1
        return total

    def find(self, sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the sum from the end on first exceeds float64[k] `sums`, which are below the total.

        (int64[k] positions, none of a value of 0, and float64[k] what is left of each of `sums` there.)
        """
        at, each = np.zeros(len(sums), np.int64), np.arange(len(sums))
        for level in reversed(self._levels):
            until = np.cumsum(level[at, ::-1], axis=1)
            # by rounding, what a block comes to may exceed the sum from its end
            within = np.minimum((until <= sums[:, None]).sum(1), until.argmax(1))
            sums = sums - np.where(within > 0, until[each, within - 1], 0.0)
            at = at * _FAN + _FAN - 1 - within
        return at, sums
