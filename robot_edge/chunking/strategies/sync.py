"""Stand still and wait for each chunk: what most robots do, and the baseline for reaction time."""

from __future__ import annotations

from robot_edge.chunking.base import Chosen
from robot_edge.chunking.request_tracker import ScheduledChunk
from robot_edge.chunking.single_chunk import SingleChunkScheduler
from wire.types import Observation


class SyncSchedule(SingleChunkScheduler):
    """Executes `execute_ticks` actions, then asks, and has no action until the answer is here.

    The robot stood still meanwhile, so the chunk begins with its action 0 when it arrives.
    """

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        return None if self._plan is None or self._due(self._plan, tick) else self._plan.at(tick)

    def _due(self, plan: ScheduledChunk, tick: int) -> bool:
        return tick >= min(plan.start + self._execute_ticks, plan.end)

    def _arrived(self, plan: ScheduledChunk, tick: int) -> None:
        # whatever else was asked for saw the robot before it moved on
        self._line.cancel()
        self._plan = plan.moved(tick)
