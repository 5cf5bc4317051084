"""When a chunk is asked for, and which action of which chunk belongs to a tick.

A strategy is a `ChunkScheduler`. What all share: what is asked of inference, what came back, and how long that took
(`RequestTracker`). The strategy `aligned` is here, for most others derive from it; each of those has a file in
`strategies`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from hal.safety.limiter import hold_numbers
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.config import ChunkingConfig
from wire.errors import ConfigError
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import ActionChunk, CommandType, Observation, PolicyCapabilities, RobotSpec

log = logging.getLogger(__name__)

_MOST_OPEN = 4
"""requests remembered at once; more than one only when answers take longer than `timeout_ticks`"""

PlannedAction = tuple[np.ndarray, ActionChunk]
"""float32[da] and the chunk it is from; the action's place in it is `tick - chunk.first_tick`"""


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

    def at(self, tick: int) -> PlannedAction | None:
        index = tick - self.chunk.first_tick
        return (self.chunk.actions[index], self.chunk) if 0 <= index < len(self.chunk.actions) else None

    def starting_at(self, tick: int) -> ScheduledChunk:
        """The same actions, from `tick` on."""
        return ScheduledChunk(msgspec.structs.replace(self.chunk, first_tick=tick), self.made, tick, self.delay_ticks)


class DelayEstimator:
    """Forecasts from the last 50 measured delays, in control ticks.

    They are of use from the first measurement on: of few delays `ticks` is the longest. One slow answer counts until
    enough quick ones came after it, and none for longer than the window. It outlives episodes; give it to the next
    scheduler too when weights of another training come.
    """

    def __init__(self, first: int = 1) -> None:
        """`first`: what to expect before anything was measured, in ticks."""
        self._last: deque[int] = deque(maxlen=50)
        self.ticks = first
        """what hardly any answer exceeds, the 95th percentile: for asking before actions run out"""
        self.usual_ticks = first
        """what an answer mostly takes, the median: for what a chunk is made for. Of all forecasts it is least ticks off
        in the mean, and a few slow answers do not make every chunk as old as they are."""

    def add(self, delay_ticks: int) -> None:
        """An answer took `delay_ticks`."""
        self._last.append(max(delay_ticks, 0))
        ordered = sorted(self._last)
        # The margin is for 0.95 * 20 = 19.000...1
        self.ticks = ordered[math.ceil(0.95 * len(ordered) - 1e-9) - 1]
        self.usual_ticks = ordered[(len(ordered) - 1) // 2]


@dataclass(slots=True)
class OpenRequest:
    """A request that may still be answered."""

    first_tick: int
    waited_ticks: int = 0
    """ticks from `first_tick` on at which the robot stood still for want of an action"""


class RequestTracker:
    """One request at a time, and each answer once.

    An answer is worth nothing if it is of an earlier episode, came before, is older than one already popped, was
    cancelled, failed, or holds numbers that are none; the last two are asked for again.

    A robot that waits for an action stands still, and no action of a chunk is spent meanwhile: the chunk that comes
    begins later by as many ticks as the robot waited since its first tick.
    """

    def __init__(self, spec: RobotSpec, config: ChunkingConfig, delay: DelayEstimator | None = None) -> None:
        """`delay`: what an earlier scheduler of this robot learned."""
        self.spec = spec
        self.config = config
        self.delay = delay or DelayEstimator()
        self._fault = ""
        self.reset()

    def reset(self) -> None:
        """Whatever is under way is void."""
        self._moved_ticks = 0
        self._last: np.ndarray | None = None
        self._open: dict[int, OpenRequest] = {}
        self._asked: int | None = None
        self._newest: int | None = None

    def can_request(self, tick: int) -> bool:
        """Whether a request may be made at `tick`: at most one a tick, and none while another may be answered."""
        if self._asked is None:
            return True
        return tick > self._asked and (self._asked not in self._open or tick - self._asked >= self.config.timeout_ticks)

    def register(self, request: ChunkRequest) -> ChunkRequest:
        """`request` as it goes on its way."""
        request = msgspec.structs.replace(request, moved_ticks=self._moved_ticks)
        self._open[request.tick] = OpenRequest(request.first_tick)
        self._asked = request.tick
        if len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]
        return request

    def on_executed(self, tick: int, action: np.ndarray, waited: bool) -> None:
        """float32[da]: what the robot did at a tick; counts for how long it has moved. `waited`: for an action."""
        for request in self._open.values():
            request.waited_ticks += waited and tick >= request.first_tick
        last = action if self._last is None else self._last
        self._moved_ticks = 0 if action.tolist() == hold_numbers(self.spec, last) else self._moved_ticks + 1
        # A driver may use its array again.
        self._last = action.copy()

    def cancel(self) -> None:
        """No answer to what was asked so far is wanted; the next request need not wait."""
        self._open.clear()

    def pop(self, reply: ChunkReply, tick: int) -> ScheduledChunk | None:
        """The chunk that `reply` brings at `tick`, None when it is worth nothing."""
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
        self.delay.add(delay_ticks)
        if self._newest is not None and reply.tick < self._newest:
            return None
        self._newest = reply.tick
        self._open = {asked: other for asked, other in self._open.items() if asked > reply.tick}
        made = reply.chunk
        chunk = quantise(made, self.config.speed_up, self.spec)
        chunk = msgspec.structs.replace(chunk, first_tick=chunk.first_tick + request.waited_ticks)
        return ScheduledChunk(chunk, made, max(tick, chunk.first_tick), delay_ticks)

    def _fault_of(self, chunk: ActionChunk, request: OpenRequest) -> str:
        """What is wrong with `chunk`, '' for nothing."""
        actions = chunk.actions
        if actions.ndim != 2 or len(actions) == 0 or actions.dtype.kind not in "fiu":
            return f"actions {actions.dtype}{list(actions.shape)}, expected float32[H, da] with H of 1 or more."
        if actions.shape[1] != self.spec.action_dim:
            return f"{actions.shape[1]} numbers an action; robot '{self.spec.embodiment}' takes {self.spec.action_dim}."
        if not np.isfinite(actions).all():
            return "an action of it is not finite."
        if chunk.first_tick != request.first_tick:
            return f"it begins at tick {chunk.first_tick}, asked was for {request.first_tick}."
        return ""


def quantise(chunk: ActionChunk, q: int, spec: RobotSpec) -> ActionChunk:
    """`chunk` with ceil(H / q) actions, q times as fast (action quantisation, VLASH, arXiv 2512.01031, section 3.4).

    q neighbours become one action by what a dimension means: the last of a group for absolute targets, the sum for
    deltas and velocities, for each action lasts one control tick. The last action stands for what is left; the first
    tick stays. A sum beyond the limits of its dimension is clipped: that much of the motion is lost, and the robot ends
    up short of where the chunk wanted it. So a speed-up pays where actions use little of their range, and with absolute
    actions.
    """
    if q == 1:
        return chunk
    actions, horizon = chunk.actions, len(chunk.actions)
    sums = np.add.reduceat(actions, np.arange(0, horizon, q), axis=0)
    last = actions[np.minimum(np.arange(q - 1, horizon + q - 1, q), horizon - 1)]
    absolute = np.array([d.meaning is CommandType.absolute for d in spec.action], bool)
    fast = np.clip(np.where(absolute, last, sums), spec.action_low(), spec.action_high())
    return msgspec.structs.replace(chunk, actions=fast.astype(np.float32))


class ChunkScheduler:
    """Turns chunks that arrive when they arrive into one action per tick. This one asks for none: the robot holds.

    At every tick, in this order: `submit` what came, `request_chunk`, `submit` what was answered within the tick,
    `next_action`, and `on_executed` after the robot was written to. `void` between two of them.
    """

    @property
    def delay_ticks(self) -> int:
        """Measured: ticks from the running chunk's observation until the chunk was here, -1 when there is none."""
        return -1

    @property
    def made(self) -> ActionChunk | None:
        """The running chunk as the policy made it, None when there is none."""
        return None

    def reset(self, tick: int) -> None:
        """A new episode starts at `tick`: chunks made for earlier ticks are void. What is known of delays stays."""

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        """What to ask inference for at `tick`, None for nothing. A request that cannot be sent is answered with
        `submit(ChunkReply(None, tick=tick), tick)`."""
        return None

    def submit(self, reply: ChunkReply, tick: int) -> None:
        """Inference answered; its chunk can be used from `tick` on. Without a chunk it failed."""

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        """The action for `tick` and its chunk; None when there is nothing fresh: then the robot holds."""
        return None

    def on_executed(self, tick: int, action: np.ndarray, waited: bool) -> None:
        """float32[da]: what the robot really did at `tick`, whoever asked for it, after all limits.

        `waited`: it stood still only because there was no action.
        """

    def void(self) -> None:
        """The robot is not where it was planned to be: plans are void, and what is under way as well."""


class AlignedScheduler(ChunkScheduler):
    """Executes the newest chunk from the action that is meant for now; the late ones are skipped.

    `actions[i]` of a chunk belongs to tick `first_tick + i`, whenever the chunk arrives. With a delay of d ticks the
    first d actions of each chunk are made for nothing, and a horizon below `execute_ticks` + d is used up early. A
    chunk that is used up is never repeated; one whose last tick is over when it arrives is dropped.

    Strategies with one running chunk derive from it: they differ in when they ask, what for, and what they do on
    arrival.
    """

    def __init__(self, tracker: RequestTracker, predictor: ActionPredictor | None = None) -> None:
        """`predictor`: learns at every tick what was chosen and what was executed."""
        self.tracker = tracker
        self.predictor = predictor
        self._execute_ticks = tracker.config.execute_ticks
        self.reset(0)

    @property
    def delay_ticks(self) -> int:
        return -1 if self._running is None else self._running.delay_ticks

    @property
    def made(self) -> ActionChunk | None:
        return None if self._running is None else self._running.made

    def reset(self, tick: int) -> None:
        self.tracker.reset()
        if self.predictor is not None:
            self.predictor.reset()
        self.void()

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        if not self.tracker.can_request(tick) or (self._running is not None and not self._is_due(self._running, tick)):
            return None
        return self.tracker.register(self._make_request(tick, observation))

    def submit(self, reply: ChunkReply, tick: int) -> None:
        chunk = self.tracker.pop(reply, tick)
        if chunk is not None:
            self._on_chunk(chunk, tick)

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        planned = None if self._running is None else self._running.at(tick)
        if self.predictor is not None:
            self.predictor.on_action_selected(tick, planned[0] if planned else None, observation.state)
        return planned

    def on_executed(self, tick: int, action: np.ndarray, waited: bool) -> None:
        self.tracker.on_executed(tick, action, waited)
        if self.predictor is not None:
            self.predictor.on_executed(tick, action)

    def void(self) -> None:
        self.tracker.cancel()
        self._running: ScheduledChunk | None = None

    # --- what other strategies change ---------------------------------------------------------------------------------

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        """Whether it is time to ask for what comes after `running`.

        `execute_ticks` after what it was asked for, since the world goes on while a robot waits, or earlier if the
        answer would come when it is used up.
        """
        first = running.made.first_tick
        return tick >= min(first + self._execute_ticks, running.end - self.tracker.delay.ticks)

    def _make_request(self, tick: int, observation: Observation) -> ChunkRequest:
        return ChunkRequest(tick, observation, tick, observation.state)

    def _on_chunk(self, chunk: ScheduledChunk, tick: int) -> None:
        if chunk.end > tick:
            self._running = chunk


MakeScheduler = Callable[[PolicyCapabilities], ChunkScheduler]
"""raises `ConfigError` for weights that were not trained for the strategy one insists on"""


class ChunkSchedulerSelector:
    """Keeps one scheduler until weights with another training come; `refused` says why there is none, '' otherwise."""

    def __init__(self, make: MakeScheduler) -> None:
        self._make = make
        self._trained: PolicyCapabilities | None = None
        self.scheduler = ChunkScheduler()
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
            self.scheduler, self.refused = ChunkScheduler(), str(error)
        return True
