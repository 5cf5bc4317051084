"""What strategies with one running chunk share. They differ in when they ask, what for, and what they do on arrival."""

from __future__ import annotations

import numpy as np

from robot_edge.chunking.base import Chosen
from robot_edge.chunking.request_tracker import RequestTracker, ScheduledChunk
from wire.errors import ConfigError
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import Observation


class SingleChunkScheduler:
    """A `ChunkScheduler` that asks for the state as it is and executes the newest chunk at the ticks it is meant for.

    A chunk that is used up is never repeated; one whose last tick is over when it arrives is dropped.
    """

    def __init__(self, execute_ticks: int, line: RequestTracker | None = None) -> None:
        """`execute_ticks`: actions of a chunk after which the next chunk should take over. Raises `ConfigError`."""
        if execute_ticks < 1:
            raise ConfigError(f"{execute_ticks} actions executed of each chunk; give 1 or more.")
        self._execute_ticks = execute_ticks
        self._line = line or RequestTracker()
        self.reset(0)

    @property
    def delay_ticks(self) -> int:
        return -1 if self._plan is None else self._plan.delay_ticks

    def reset(self, tick: int) -> None:
        self._line.reset()
        self._plan: ScheduledChunk | None = None

    def ask(self, tick: int, observation: Observation) -> ChunkRequest | None:
        if not self._line.free(tick) or (self._plan is not None and not self._due(self._plan, tick)):
            return None
        return self._line.ask(self._request(tick, observation))

    def offer(self, reply: ChunkReply, tick: int) -> None:
        plan = self._line.take(reply, tick)
        if plan is not None:
            self._arrived(plan, tick)

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        return None if self._plan is None else self._plan.at(tick)

    def executed(self, tick: int, action: np.ndarray) -> None:
        self._line.executed(action)

    # --- what strategies change -----------------------------------------------------------------------------------

    def _due(self, plan: ScheduledChunk, tick: int) -> bool:
        """Whether it is time to ask for what comes after `plan`.

        After `execute_ticks` of its time, or earlier if the answer would come when it is used up.
        """
        first = plan.chunk.first_tick
        return tick >= min(first + self._execute_ticks, plan.end - self._line.forecast.ticks)

    def _request(self, tick: int, observation: Observation) -> ChunkRequest:
        return ChunkRequest(tick, observation, tick, observation.state)

    def _arrived(self, plan: ScheduledChunk, tick: int) -> None:
        if plan.end > tick:
            self._plan = plan
