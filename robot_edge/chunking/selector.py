"""The chunk schedule that fits the weights that run: a checkpoint says what it was trained for."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from robot_edge.chunking.base import Chosen, ChunkScheduler
from wire.errors import ConfigError
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import Observation, PolicyCapabilities

log = logging.getLogger(__name__)

MakeSchedule = Callable[[PolicyCapabilities], ChunkScheduler]
"""raises `ConfigError` for weights that were not trained for the strategy one insists on"""


class ChunkSchedulerSelector:
    """Keeps one schedule until weights with another training come; `refused` says why there is none, '' otherwise."""

    def __init__(self, make: MakeSchedule) -> None:
        self._make = make
        self._trained: PolicyCapabilities | None = None
        self.schedule: ChunkScheduler = NoChunks()
        self.refused = ""

    def outdated(self, trained: PolicyCapabilities) -> bool:
        """Whether the schedule was made for weights of another training."""
        return self._trained is not None and trained != self._trained

    def follow(self, trained: PolicyCapabilities) -> bool:
        """Whether the schedule is another one than before; between two episodes only."""
        if trained == self._trained:
            return False
        self._trained = trained
        try:
            self.schedule, self.refused = self._make(trained), ""
        except ConfigError as error:
            self.schedule, self.refused = NoChunks(), str(error)
        return True


class NoChunks:
    """Asks for nothing and has nothing: the robot holds."""

    delay_ticks = -1

    def reset(self, tick: int) -> None:
        pass

    def ask(self, tick: int, observation: Observation) -> ChunkRequest | None:
        return None

    def offer(self, reply: ChunkReply, tick: int) -> None:
        pass

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        return None

    def executed(self, tick: int, action: np.ndarray) -> None:
        pass
