"""Skip the actions that came too late."""

from __future__ import annotations

from robot_edge.chunking.request_tracker import RequestTracker
from robot_edge.chunking.single_chunk import SingleChunkScheduler


class AlignedSchedule(SingleChunkScheduler):
    """Executes the newest chunk from the action that is meant for now; the late ones are skipped.

    `actions[i]` of a chunk belongs to tick `first_tick + i`, whenever the chunk arrives. With a delay of d ticks the
    first d actions of each chunk are made for nothing, and a horizon below `replan_ticks` + d is used up early.
    """

    def __init__(self, replan_ticks: int, patience_ticks: int = 40, line: RequestTracker | None = None) -> None:
        """Ask again `replan_ticks` after the running chunk's first tick, or in time before it is used up.

        A request that nobody answers is repeated after `patience_ticks` (`line` brings its own).
        """
        super().__init__(replan_ticks, line or RequestTracker(patience_ticks))
