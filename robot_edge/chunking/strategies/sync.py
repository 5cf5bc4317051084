"""Stand still and wait for each chunk: what most robots do, and the baseline for reaction time."""

from __future__ import annotations

from robot_edge.chunking.scheduler import PlannedAction, ScheduledChunk
from robot_edge.chunking.strategies.naive import NaiveScheduler
from wire.types import Observation


class SyncScheduler(NaiveScheduler):
    """Executes `execute_ticks` actions, then asks, and has no action until the answer is here.

    The robot stood still meanwhile, so the chunk begins with its action 0 when it arrives.
    """

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        return None if self._running is None or self._is_due(self._running, tick) else self._running.at(tick)

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        return tick >= min(running.start + self._execute_ticks, running.end)
