"""Counters of a run that live in the robots' processes, summed over their restarts."""

from __future__ import annotations

from typing import Any


class RunCounters:
    """Fed with snapshots of the page; each control process counts from zero, so the newest value of each is kept."""

    def __init__(self) -> None:
        self._ticks: dict[tuple[str, int], tuple[int, int, int]] = {}

    def take(self, snapshot: dict[str, Any]) -> None:
        """Take in one snapshot."""
        for robot in snapshot["robots"]:
            if robot["pids"]:
                key = (robot["name"], robot["pids"][0])
                self._ticks[key] = (robot["ticks"], robot["missed_ticks"], robot["starved_ticks"])

    @property
    def ticks(self) -> int:
        return sum(ticks for ticks, _, _ in self._ticks.values())

    @property
    def missed_ticks(self) -> int:
        return sum(missed for _, missed, _ in self._ticks.values())

    @property
    def starved_ticks(self) -> int:
        """Ticks a robot held because inference was late."""
        return sum(starved for _, _, starved in self._ticks.values())
