"""Draws that are decided but not yet due, in order: a calendar queue on a growing axis."""

from __future__ import annotations

import heapq

import numpy as np

_Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""key float64[t], slot int32[t], run int64[t], offset int32[t], in order of key"""


def _empty() -> _Part:
    return np.zeros(0), np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32)


class CalendarQueue:
    """Tokens by key. Those with equal keys come out in the order they were added.

    Keys are sorted into days of equal width, and only the current day is kept sorted, so that adding t tokens costs
    about t however many wait.
    """

    def __init__(self, width: float) -> None:
        """`width` of a day on the axis of keys."""
        self._width = width
        self._days: dict[int, list[_Part]] = {}
        self._order: list[int] = []
        self._today = -1
        self._now = _empty()
        self._at = 0
        self.count = 0
        """tokens that wait"""

    def add(self, keys: np.ndarray, slot: int, runs: np.ndarray, offsets: np.ndarray) -> None:
        """Tokens of one block; `keys` grow."""
        self._put((keys, np.full(len(keys), slot, np.int32), runs, offsets.astype(np.int32)))

    def pop(self, count: int, below: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """(slot, run, offset) of up to `count` tokens of one day with the least keys, all below `below`, and the last
        key; none if there is no such token."""
        if self._at == len(self._now[0]) and self._order:
            self._today = heapq.heappop(self._order)
            self._now, self._at = _sorted(self._days.pop(self._today)), 0
        keys, slots, runs, offsets = self._now
        end = min(self._at + count, int(np.searchsorted(keys, below, "left")))
        taken = slice(self._at, max(self._at, end))
        last = float(keys[taken.stop - 1]) if taken.stop > taken.start else 0.0
        self._at = taken.stop
        self.count -= taken.stop - taken.start
        return slots[taken], runs[taken], offsets[taken], last

    def remove(self, slot: int) -> None:
        """Forget the tokens of one block."""
        parts = self._take_all()
        for part in parts:
            stays = part[1] != slot
            self._put((part[0][stays], part[1][stays], part[2][stays], part[3][stays]))

    def set_width(self, width: float) -> None:
        """Sort anew into days of that width."""
        if not self._width / 2 <= width <= self._width * 2:
            parts = self._take_all()
            self._width = width
            for part in parts:
                self._put(part)

    def _put(self, part: _Part) -> None:
        keys = part[0]
        if not len(keys):
            return
        self.count += len(keys)
        days = np.floor(keys / self._width).astype(np.int64)
        first = np.flatnonzero(np.diff(days, prepend=days[0] - 1)).tolist()
        for begin, end, day in zip(first, [*first[1:], len(keys)], days[first].tolist(), strict=True):
            piece = (keys[begin:end], part[1][begin:end], part[2][begin:end], part[3][begin:end])
            if day <= self._today:
                left = tuple(column[self._at :] for column in self._now)
                self._now, self._at = _sorted([left, piece]), 0  # type: ignore[list-item]
            elif day in self._days:
                self._days[day].append(piece)
            else:
                self._days[day] = [piece]
                heapq.heappush(self._order, day)

    def _take_all(self) -> list[_Part]:
        left: _Part = tuple(column[self._at :] for column in self._now)  # type: ignore[assignment]
        parts = [left, *(_sorted(self._days[day]) for day in sorted(self._days))]
        self._days, self._order, self._today, self._now, self._at, self.count = {}, [], -1, _empty(), 0, 0
        return parts


def _sorted(parts: list[_Part]) -> _Part:
    keys, slots, runs, offsets = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(keys, kind="stable")
    return keys[order], slots[order], runs[order], offsets[order]
