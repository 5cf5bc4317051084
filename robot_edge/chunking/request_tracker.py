"""What is asked of inference, what came back, and how long that took: the bookkeeping all strategies share."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import numpy as np

from hal.safety.bounds import hold_numbers
from robot_edge.chunking.base import Chosen
from robot_edge.chunking.delay_estimate import DelayEstimator
from robot_edge.chunking.strategies.quantise import quantise
from wire.errors import ConfigError
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import ActionChunk, RobotSpec

log = logging.getLogger(__name__)

_MOST_OPEN = 4
"""requests remembered at once; more than one only when answers take longer than patience"""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A chunk with its place in time."""

    chunk: ActionChunk
    """as it is executed: `actions[i]` at tick `first_tick + i`"""
    made: ActionChunk
    """as the policy made it, before any speed-up"""
    start: int
    """the first tick it can be executed at: its first tick, or when it arrived"""
    delay_ticks: int

    @property
    def end(self) -> int:
        """The first tick it has no action for."""
        return self.chunk.first_tick + len(self.chunk.actions)

    def at(self, tick: int) -> Chosen | None:
        index = tick - self.chunk.first_tick
        return (self.chunk.actions[index], self.chunk) if 0 <= index < len(self.chunk.actions) else None

    def moved(self, tick: int) -> ScheduledChunk:
        """The same actions, from `tick` on."""
        return ScheduledChunk(msgspec.structs.replace(self.chunk, first_tick=tick), self.made, tick, self.delay_ticks)


class RequestTracker:
    """One request at a time, and each answer once.

    An answer is worth nothing if it is of an earlier episode, came before, is older than one already taken, was
    cancelled, failed, or holds numbers that are none; the last two are asked for again.
    """

    def __init__(
        self,
        patience_ticks: int = 40,
        forecast: DelayEstimator | None = None,
        spec: RobotSpec | None = None,
        speed_up: int = 1,
    ) -> None:
        """A request that nobody answers is repeated after `patience_ticks`.

        `spec`: the robot's, to check chunks against; it is needed for a `speed_up` above 1. Raises
        `ConfigError` without it.
        """
        if speed_up != 1 and (spec is None or speed_up < 1):
            raise ConfigError(f"speed-up {speed_up}: give 1 or more, and the robot's spec, which says what adds up.")
        self.forecast = forecast or DelayEstimator()
        self.speed_up = speed_up
        self._patience_ticks = patience_ticks
        self._spec = spec
        self._fault = ""
        self.reset()

    def reset(self) -> None:
        """Whatever is under way is void."""
        self._moved_ticks = 0
        self._last: np.ndarray | None = None
        self._open: dict[int, ChunkRequest] = {}
        self._asked: int | None = None
        self._newest: int | None = None

    def free(self, tick: int) -> bool:
        """Whether a request may be made at `tick`: at most one a tick, and none while another may be answered."""
        if self._asked is None:
            return True
        return tick > self._asked and (self._asked not in self._open or tick - self._asked >= self._patience_ticks)

    def ask(self, request: ChunkRequest) -> ChunkRequest:
        """`request` as it goes on its way."""
        if self._spec is not None:
            request = msgspec.structs.replace(request, moved_ticks=self._moved_ticks)
        self._open[request.tick] = request
        self._asked = request.tick
        if len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]
        return request

    def executed(self, action: np.ndarray) -> None:
        """float32[da]: what the robot did at a tick; counts for how long it has moved."""
        if self._spec is not None:
            last = action if self._last is None else self._last
            self._moved_ticks = 0 if action.tolist() == hold_numbers(self._spec, last) else self._moved_ticks + 1
            # A driver may use its array again.
            self._last = action.copy()

    def cancel(self) -> None:
        """No answer to what was asked so far is wanted; the next request need not wait."""
        self._open.clear()

    def take(self, reply: ChunkReply, tick: int) -> ScheduledChunk | None:
        """The plan that `reply` brings at `tick`, None when it is worth nothing."""
        request = self._open.pop(reply.tick, None)
        if request is None or reply.chunk is None:
            return None
        fault = self._fault_of(reply.chunk, request)
        if fault and fault != self._fault:
            log.warning("a chunk is dropped: %s", fault)
        self._fault = fault
        if fault:
            return None
        delay_ticks = tick - reply.tick
        self.forecast.add(delay_ticks)
        if self._newest is not None and reply.tick < self._newest:
            return None
        self._newest = reply.tick
        self._open = {asked: other for asked, other in self._open.items() if asked > reply.tick}
        made = reply.chunk
        chunk = quantise(made, self.speed_up, self._spec) if self._spec and self.speed_up > 1 else made
        return ScheduledChunk(chunk, made, max(tick, chunk.first_tick), delay_ticks)

    def _fault_of(self, chunk: ActionChunk, request: ChunkRequest) -> str:
        """What is wrong with `chunk`, '' for nothing."""
        actions = chunk.actions
        if actions.ndim != 2 or len(actions) == 0 or actions.dtype.kind not in "fiu":
            return f"actions {actions.dtype}{list(actions.shape)}, expected float32[H, da] with H of 1 or more."
        if self._spec is not None and actions.shape[1] != self._spec.action_dim:
            return (
                f"{actions.shape[1]} numbers an action; robot '{self._spec.embodiment}' takes {self._spec.action_dim}."
            )
        if not np.isfinite(actions).all():
            return "an action of it is not finite."
        if chunk.first_tick != request.first_tick:
            return f"it begins at tick {chunk.first_tick}, asked was for {request.first_tick}."
        return ""
