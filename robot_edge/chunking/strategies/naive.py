"""Ask early and switch on arrival, as if the chunk had been made for now: the baseline for late actions."""

from __future__ import annotations

from robot_edge.chunking.request_tracker import ScheduledChunk
from robot_edge.chunking.single_chunk import SingleChunkScheduler


class NaiveSchedule(SingleChunkScheduler):
    """Asks one forecast delay before `execute_ticks` are over and begins with action 0 of whatever arrives.

    Nothing is skipped, so each action is executed later than it was meant for, by the delay.
    """

    def _due(self, plan: ScheduledChunk, tick: int) -> bool:
        return tick + self._line.forecast.ticks >= min(plan.start + self._execute_ticks, plan.end)

    def _arrived(self, plan: ScheduledChunk, tick: int) -> None:
        self._plan = plan.moved(tick)
