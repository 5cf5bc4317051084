"""Average what several chunks say about the same tick (ACT, arXiv 2304.13705, section IV-A: temporal ensembling).

ACT weighs the oldest chunk most. Where answers are late, old chunks know least of what has happened since: on a goal
that turns round their average was worse than executing late actions as they come, so here the newest weighs most.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from robot_edge.chunking.scheduler import AlignedScheduler, PlannedAction, RequestTracker, ScheduledChunk
from wire.types import Observation


class EnsembleScheduler(AlignedScheduler):
    """Asks as often as answers come and executes w-weighted averages, w_i = exp(-m i) with i = 0 the newest chunk.

    A small m smooths more. Late actions are skipped as in `AlignedScheduler`. The chunk that an action is
    said to be from is the newest of those averaged.
    """

    def __init__(self, tracker: RequestTracker, m: float = 2.0, most: int = 16) -> None:
        """`most`: chunks kept."""
        self._m = m
        self._chunks: deque[ScheduledChunk] = deque(maxlen=most)
        super().__init__(tracker)

    def void(self) -> None:
        super().void()
        self._chunks.clear()

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        while self._chunks and self._chunks[0].end <= tick:
            self._chunks.popleft()
        planned = [action for chunk in self._chunks if (action := chunk.at(tick)) is not None]
        if not planned:
            return None
        weights = np.exp(-self._m * np.arange(len(planned))[::-1])
        actions = np.stack([action for action, _ in planned])
        mean = (weights / weights.sum()) @ actions
        return mean.astype(np.float32), planned[-1][1]

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        return True

    def _on_chunk(self, chunk: ScheduledChunk, tick: int) -> None:
        super()._on_chunk(chunk, tick)
        if chunk.end > tick:
            self._chunks.append(chunk)
