"""How the robots do on their own: the figure that costs nothing and is there from the first minute."""

from __future__ import annotations

from collections import deque
from typing import Any

EPISODES = 60
"""the figure is over so many of the newest"""
FINISHED = ("success", "failure")
"""outcomes that count: not those of episodes that were broken off"""


class UnaidedSuccess:
    """Share of the newest finished episodes that succeeded with nobody's help.

    An episode that somebody helped in did not succeed on its own, whatever came of it. Scenes are those the robots
    practise, and several versions acted in them: the held-out figure is the one to compare policies by.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[int, bool]] = deque(maxlen=EPISODES)

    def add(self, version: int, outcome: str, *, helped: bool) -> None:
        """An episode has ended, `version` being the last that acted in it; aborted ones do not count."""
        if outcome in FINISHED:
            self._newest.append((version, outcome == "success" and not helped))

    def summary(self) -> dict[str, Any] | None:
        """`success` 0 to 1, `episodes`, and the oldest and newest of their `versions`; None before the first."""
        if not self._newest:
            return None
        versions = [version for version, _ in self._newest]
        return {
            "success": sum(alone for _, alone in self._newest) / len(self._newest),
            "episodes": len(self._newest),
            "versions": [min(versions), max(versions)],
        }
