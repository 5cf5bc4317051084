"""Robots that run another version than they were told to: when each is told again."""

from __future__ import annotations

from typing import NamedTuple

AGAIN_NS, LONGEST_AGAIN_NS = 10_000_000_000, 320_000_000_000
"""until a robot is told again; each time twice as long"""


class _Mismatch(NamedTuple):
    wanted: int
    next_ns: int
    """when it is told again"""
    wait_ns: int


class VersionMismatches:
    """By robot."""

    def __init__(self) -> None:
        self._found: dict[str, _Mismatch] = {}

    def is_due(self, robot: str, runs: int, wanted: int, now_ns: int) -> bool:
        """It runs a version and is to run `wanted`: whether it is to be told again now."""
        if runs == wanted:
            self._found.pop(robot, None)
            return False
        found = self._found.get(robot)
        if found is None or found.wanted != wanted:
            self._found[robot] = _Mismatch(wanted, now_ns + AGAIN_NS, AGAIN_NS)
            return False
        if now_ns < found.next_ns:
            return False
        wait_ns = min(2 * found.wait_ns, LONGEST_AGAIN_NS)
        self._found[robot] = _Mismatch(wanted, now_ns + wait_ns, wait_ns)
        return True
