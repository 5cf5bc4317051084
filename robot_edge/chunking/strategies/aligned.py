"""Skip the actions that came too late."""

from __future__ import annotations

from robot_edge.chunking.scheduler import SingleChunkScheduler


class AlignedScheduler(SingleChunkScheduler):
    """Executes the newest chunk from the action that is meant for now; the late ones are skipped.

    `actions[i]` of a chunk belongs to tick `first_tick + i`, whenever the chunk arrives. With a delay of d ticks the
    first d actions of each chunk are made for nothing, and a horizon below `execute_ticks` + d is used up early.

    It asks again `execute_ticks` after the running chunk's first tick, or in time before that is used up.
    """
