"""How much may be under way, so that a long fast line is full and people's commands do not wait behind weights."""

from __future__ import annotations

from typing import NamedTuple

from robot_edge.uplink.weights.plan import Part

MOST_PART, _LEAST_PART = 256 * 1024, 16 * 1024
MOST_UNDER_WAY = 16
_SLOW_NS, _FAST_NS = 400_000_000, 200_000_000
_QUEUED_NS, _FREE_NS = 100_000_000, 25_000_000
"""the window is halved where a part takes longer than that, or so much longer than the quickest one: what people
command waits behind it. It doubles in a round trip where parts take less, and hardly longer than the quickest one"""


class Asked(NamedTuple):
    """A part that is under way."""

    part: Part
    at_ns: int


class RequestWindow:
    """Grows and shrinks with how long parts take."""

    def __init__(self, most_bytes: int = MOST_UNDER_WAY * MOST_PART) -> None:
        self.size_bytes = MOST_PART
        """under way at most"""
        self._most_bytes = most_bytes
        self._quickest_ns = _SLOW_NS
        self._halved_ns = 0

    @property
    def part_bytes(self) -> int:
        """of one part at most"""
        return min(MOST_PART, self.size_bytes)

    def begin(self) -> None:
        """Another version: all robots begin at once, and the gateway has so much of each in memory."""
        self.size_bytes = self.part_bytes

    def halve(self) -> None:
        self.size_bytes = max(_LEAST_PART, self.size_bytes // 2)

    def adapt(self, asked_ns: int, now_ns: int, size: int) -> None:
        """A part has come, of so many bytes, that was asked for at `asked_ns`."""
        took_ns = now_ns - asked_ns
        # The line may be another one by now.
        self._quickest_ns = min(self._quickest_ns * 513 // 512, took_ns)
        more_ns = took_ns - self._quickest_ns
        if took_ns > _SLOW_NS or more_ns > _QUEUED_NS:
            # Those that were asked for before say the same once more.
            if asked_ns >= self._halved_ns:
                self.halve()
                self._halved_ns = now_ns
        elif took_ns < _FAST_NS and more_ns < _FREE_NS:
            self.size_bytes = min(self._most_bytes, self.size_bytes + size)
