"""What a strategy is: it decides when a chunk is asked for, and which action of which chunk belongs to a tick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from robot_edge.chunking.request_tracker import PlannedAction, RequestTracker, ScheduledChunk
from wire.errors import ConfigError
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import Observation, PolicyCapabilities


class ChunkScheduler(Protocol):
    """Turns chunks that arrive when they arrive into one action per tick.

    At every tick, in this order: `submit` what came, `request_chunk`, `submit` what was answered within the tick,
    `next_action`, and `on_executed` after the robot was written to.
    """

    @property
    def delay_ticks(self) -> int:
        """Measured: ticks from the running chunk's observation until the chunk was here, -1 when there is none."""
        ...

    def reset(self, tick: int) -> None:
        """A new episode starts at `tick`: chunks made for earlier ticks are void. What is known of delays stays."""
        ...

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        """What to ask inference for at `tick`, None for nothing. A request that cannot be sent is answered with
        `submit(ChunkReply(None, tick=tick), tick)`."""
        ...

    def submit(self, reply: ChunkReply, tick: int) -> None:
        """Inference answered; its chunk can be used from `tick` on. Without a chunk it failed."""
        ...

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        """The action for `tick` and its chunk; None when there is nothing fresh: then the robot holds."""
        ...

    def on_executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot really did at `tick`, whoever asked for it, after all limits."""
        ...


MakeScheduler = Callable[[PolicyCapabilities], ChunkScheduler]
"""raises `ConfigError` for weights that were not trained for the strategy one insists on"""


class SingleChunkScheduler:
    """Asks for the state as it is and executes the newest chunk at the ticks it is meant for.

    What strategies with one running chunk share. They differ in when they ask, what for, and what they do on arrival.
    A chunk that is used up is never repeated; one whose last tick is over when it arrives is dropped.
    """

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._execute_ticks = tracker.config.execute_ticks
        self.reset(0)

    @property
    def delay_ticks(self) -> int:
        return -1 if self._running is None else self._running.delay_ticks

    def reset(self, tick: int) -> None:
        self._tracker.reset()
        self._running: ScheduledChunk | None = None

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        if not self._tracker.can_request(tick) or (self._running is not None and not self._is_due(self._running, tick)):
            return None
        return self._tracker.register(self._make_request(tick, observation))

    def submit(self, reply: ChunkReply, tick: int) -> None:
        chunk = self._tracker.pop(reply, tick)
        if chunk is not None:
            self._on_chunk(chunk, tick)

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        return None if self._running is None else self._running.at(tick)

    def on_executed(self, tick: int, action: np.ndarray) -> None:
        self._tracker.on_executed(action)

    # --- what strategies change -----------------------------------------------------------------------------------

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        """Whether it is time to ask for what comes after `running`.

        After `execute_ticks` of its time, or earlier if the answer would come when it is used up.
        """
        first = running.chunk.first_tick
        return tick >= min(first + self._execute_ticks, running.end - self._tracker.delay.ticks)

    def _make_request(self, tick: int, observation: Observation) -> ChunkRequest:
        return ChunkRequest(tick, observation, tick, observation.state)

    def _on_chunk(self, chunk: ScheduledChunk, tick: int) -> None:
        if chunk.end > tick:
            self._running = chunk


class NoChunks:
    """Asks for nothing and has nothing: the robot holds."""

    delay_ticks = -1

    def reset(self, tick: int) -> None:
        pass

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        return None

    def submit(self, reply: ChunkReply, tick: int) -> None:
        pass

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        return None

    def on_executed(self, tick: int, action: np.ndarray) -> None:
        pass


class ChunkSchedulerSelector:
    """Keeps one scheduler until weights with another training come; `refused` says why there is none, '' otherwise."""

    def __init__(self, make: MakeScheduler) -> None:
        self._make = make
        self._trained: PolicyCapabilities | None = None
        self.scheduler: ChunkScheduler = NoChunks()
        self.refused = ""

    def is_outdated(self, trained: PolicyCapabilities) -> bool:
        """Whether the scheduler was made for weights of another training."""
        return self._trained is not None and trained != self._trained

    def select(self, trained: PolicyCapabilities) -> bool:
        """Whether the scheduler is another one than before; between two episodes only."""
        if trained == self._trained:
            return False
        self._trained = trained
        try:
            self.scheduler, self.refused = self._make(trained), ""
        except ConfigError as error:
            self.scheduler, self.refused = NoChunks(), str(error)
        return True
