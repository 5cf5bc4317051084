"""Average what several chunks say about the same tick (ACT, arXiv 2304.13705, section IV-A: temporal ensembling)."""

from __future__ import annotations

from collections import deque

import numpy as np

from robot_edge.chunking.base import Chosen
from robot_edge.chunking.request_tracker import RequestTracker, ScheduledChunk
from robot_edge.chunking.single_chunk import SingleChunkScheduler
from wire.types import Observation


class EnsembleSchedule(SingleChunkScheduler):
    """Asks as often as answers come and executes w-weighted averages, w_i = exp(-m i) with i = 0 the oldest chunk.

    A small m trusts new chunks sooner. Late actions are skipped as in `AlignedSchedule`. The chunk that an action is
    said to be from is the newest of those averaged.
    """

    def __init__(
        self, m: float = 0.01, most: int = 16, every_ticks: int = 1, line: RequestTracker | None = None
    ) -> None:
        """`most`: chunks kept; `every_ticks`: least time between two requests."""
        self._m = m
        self._plans: deque[ScheduledChunk] = deque(maxlen=most)
        super().__init__(every_ticks, line)

    def reset(self, tick: int) -> None:
        super().reset(tick)
        self._plans.clear()

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        while self._plans and self._plans[0].end <= tick:
            self._plans.popleft()
        said = [chosen for plan in self._plans if (chosen := plan.at(tick)) is not None]
        if not said:
            return None
        weights = np.exp(-self._m * np.arange(len(said)))
        actions = np.stack([action for action, _ in said])
        mean = (weights / weights.sum()) @ actions
        return mean.astype(np.float32), said[-1][1]

    def _due(self, plan: ScheduledChunk, tick: int) -> bool:
        return tick >= plan.chunk.first_tick + self._execute_ticks

    def _arrived(self, plan: ScheduledChunk, tick: int) -> None:
        super()._arrived(plan, tick)
        if plan.end > tick:
            self._plans.append(plan)
