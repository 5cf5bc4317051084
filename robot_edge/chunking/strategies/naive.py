"""Ask early and switch on arrival, as if the chunk had been made for now: the baseline for late actions."""

from __future__ import annotations

from robot_edge.chunking.scheduler import AlignedScheduler, ScheduledChunk


class NaiveScheduler(AlignedScheduler):
    """Asks one forecast delay before `execute_ticks` are over and begins with action 0 of whatever arrives.

    Nothing is skipped, so each action is executed later than it was meant for, by the delay.
    """

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        return tick + self.tracker.delay.ticks >= min(running.start + self._execute_ticks, running.end)

    def _on_chunk(self, chunk: ScheduledChunk, tick: int) -> None:
        # Whatever else was asked for saw the robot before it began anew.
        self.tracker.cancel()
        self._running = chunk.starting_at(tick)
