"""Ask for the moment the chunk will begin (VLASH, arXiv 2512.01031, section 3.2)."""

from __future__ import annotations

import numpy as np

from hal.interfaces.dynamics import DynamicsModel
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.base import Chosen
from robot_edge.chunking.request_tracker import RequestTracker, ScheduledChunk
from robot_edge.chunking.single_chunk import SingleChunkScheduler
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import Observation


class FutureStateSchedule(SingleChunkScheduler):
    """Asks one forecast delay ahead, with the state the robot will have by then.

    The state is rolled forward by the actions that are decided until then, as they will be executed. A chunk that is
    early waits for its first tick while the old one goes on; of one that is late the late actions are skipped. When
    somebody else acts meanwhile the chunk is made for a state that never comes: it is dropped, and asked for again at
    once. As long as they act nothing is foretold: chunks are asked for from the state as it is, so that there is
    always a proposal to hand back to.
    """

    def __init__(
        self,
        execute_ticks: int,
        motion: DynamicsModel,
        foresight: ActionPredictor,
        max_delay: int,
        line: RequestTracker | None = None,
    ) -> None:
        """`max_delay`: ticks the policy was trained to look ahead; what is later is skipped."""
        self._motion = motion
        self._foresight = foresight
        self._max_delay = max_delay
        super().__init__(execute_ticks, line)

    def reset(self, tick: int) -> None:
        super().reset(tick)
        self._foresight.reset()
        self._next: ScheduledChunk | None = None
        self._assumed_until = tick
        """first tick of the newest request: until then it reckons with what will be executed"""
        self._void = False

    def ask(self, tick: int, observation: Observation) -> ChunkRequest | None:
        self._promote(tick)
        return None if self._next is not None else super().ask(tick, observation)

    def action(self, tick: int, observation: Observation) -> Chosen | None:
        self._promote(tick)
        chosen = super().action(tick, observation)
        self._foresight.chose(tick, chosen[0] if chosen else None, observation.state)
        return chosen

    def executed(self, tick: int, action: np.ndarray) -> None:
        super().executed(tick, action)
        self._foresight.executed(tick, action)
        if tick < self._assumed_until and self._foresight.drifted:
            self._line.cancel()
            self._next = None
            self._assumed_until = tick
            self._void = True

    def _due(self, plan: ScheduledChunk, tick: int) -> bool:
        ends = min(plan.start + self._execute_ticks, plan.end)
        return self._void or tick + self._line.forecast.ticks >= ends

    def _request(self, tick: int, observation: Observation) -> ChunkRequest:
        # what was void once is not foretold again at once: a chunk for now can always be used
        foretold = self._foresight.own and not self._void
        self._void = False
        ahead = min(self._line.forecast.ticks, self._max_delay) if foretold else 0
        self._assumed_until = tick + ahead
        self._foresight.watch()
        past = self._foresight.past
        state = observation.state
        if ahead and len(past):
            plan = self._plan
            wanted = [chosen[0] if plan and (chosen := plan.at(tick + i)) else None for i in range(ahead)]
            state = self._motion.rollout(state, past, self._foresight.coming(wanted, state))
        return ChunkRequest(tick, observation, tick + ahead, np.asarray(state, np.float32))

    def offer(self, reply: ChunkReply, tick: int) -> None:
        super().offer(reply, tick)
        self._promote(tick)

    def _arrived(self, plan: ScheduledChunk, tick: int) -> None:
        if plan.end > tick:
            self._next = plan

    def _promote(self, tick: int) -> None:
        if self._next is not None and tick >= self._next.chunk.first_tick:
            self._plan, self._next = self._next, None
