"""What a strategy is: it decides when a chunk is asked for, and which action of which chunk belongs to a tick."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import ActionChunk, Observation

Chosen = tuple[np.ndarray, ActionChunk]
"""float32[da] and the chunk it is from; the action's place in it is `tick - chunk.first_tick`"""


class ChunkScheduler(Protocol):
    """Turns chunks that arrive when they arrive into one action per tick.

    At every tick, in this order: `offer` what came, `ask`, `offer` what was answered within the tick, `action`, and
    `executed` after the robot was written to.
    """

    @property
    def delay_ticks(self) -> int:
        """Measured: ticks from the running chunk's observation until the chunk was here, -1 when there is none."""
        ...

    def reset(self, tick: int) -> None:
        """A new episode starts at `tick`: chunks made for earlier ticks are void. What is known of delays stays."""
        ...

    def ask(self, tick: int, observation: Observation) -> ChunkRequest | None:
        """What to ask inference for at `tick`, None for nothing. A request that cannot be sent is answered with
        `offer(ChunkReply(None, tick=tick), tick)`."""
        ...

    def offer(self, reply: ChunkReply, tick: int) -> None:
        """Inference answered; its chunk can be used from `tick` on. Without a chunk it failed."""
        ...

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        """The action for `tick` and its chunk; None when there is nothing fresh: then the robot holds."""
        ...

    def executed(self, tick: int, action: np.ndarray) -> None:
        """float32[da]: what the robot really did at `tick`, whoever asked for it, after all limits."""
        ...
