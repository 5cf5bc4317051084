"""Which action of which chunk belongs to this tick."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from wire.types import ActionChunk


class ChunkSchedule(Protocol):
    """Turns chunks that arrive when they arrive into one action per tick."""

    delay_ticks: int
    """measured: ticks from the running chunk's observation until the chunk was here, -1 when there is none"""

    def reset(self, tick: int) -> None:
        """A new episode starts at `tick`: chunks made for earlier ticks are void."""
        ...

    def wants(self, tick: int) -> bool:
        """Whether a chunk should be asked for at `tick`."""
        ...

    def asked(self, tick: int) -> None:
        """A request for `tick` is on its way."""
        ...

    def offer(self, chunk: ActionChunk | None, tick: int) -> None:
        """Inference answered at `tick`; None when it failed."""
        ...

    def action(self, tick: int) -> tuple[np.ndarray, ActionChunk] | None:
        """float32[da] for `tick` and the chunk it is from; None when there is nothing fresh: then the robot holds."""
        ...


class AlignedSchedule:
    """Executes the newest chunk from the action that is meant for now; the late ones are skipped.

    `actions[i]` of a chunk belongs to tick `first_tick + i`, whenever the chunk arrives. A chunk that is used up is
    never repeated.
    """

    def __init__(self, replan_ticks: int, patience_ticks: int = 40) -> None:
        """Ask again `replan_ticks` after the running chunk's first tick.

        A request that nobody answers is repeated after `patience_ticks`.
        """
        self._replan_ticks = replan_ticks
        self._patience_ticks = patience_ticks
        self.reset(0)

    def reset(self, tick: int) -> None:
        self._start = tick
        self._chunk: ActionChunk | None = None
        self._asked: int | None = None
        self.delay_ticks = -1

    def wants(self, tick: int) -> bool:
        if self._asked is not None and tick - self._asked < self._patience_ticks:
            return False
        return self._chunk is None or tick - self._chunk.first_tick >= self._replan_ticks

    def asked(self, tick: int) -> None:
        self._asked = tick

    def offer(self, chunk: ActionChunk | None, tick: int) -> None:
        if chunk is None:
            self._asked = None
            return
        if chunk.first_tick < self._start:
            return
        self._asked = None
        if self._chunk is None or chunk.first_tick >= self._chunk.first_tick:
            self._chunk = chunk
            self.delay_ticks = tick - chunk.first_tick

    def action(self, tick: int) -> tuple[np.ndarray, ActionChunk] | None:
        chunk = self._chunk
        if chunk is None or not 0 <= tick - chunk.first_tick < len(chunk.actions):
            return None
        return chunk.actions[tick - chunk.first_tick], chunk
