"""Ask for the moment the chunk will begin (VLASH, arXiv 2512.01031, section 3.2)."""

from __future__ import annotations

import numpy as np

from hal.interfaces.dynamics import DynamicsModel
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.scheduler import AlignedScheduler, PlannedAction, RequestTracker, ScheduledChunk
from wire.messages.local import ChunkRequest
from wire.types import Observation


class FutureStateScheduler(AlignedScheduler):
    """Asks one usual delay ahead, with the state the robot will have by then.

    The state is rolled forward by the actions that are decided until then, as they will be executed. A chunk that is
    early waits for its first tick while the old one goes on; when that is used up the robot would only stand still, and
    the chunk begins at once. Of one that is late the late actions are skipped. When somebody else acts meanwhile the
    chunk is made for a state that never comes: it is dropped, and asked for again at once. As long as they act nothing
    is foretold: chunks are asked for from the state as it is, so that there is always a proposal to compare with.
    """

    predictor: ActionPredictor

    def __init__(
        self, tracker: RequestTracker, motion: DynamicsModel, predictor: ActionPredictor, max_delay: int
    ) -> None:
        """`max_delay`: ticks the policy was trained to look ahead; what is later is skipped."""
        self._motion = motion
        self._max_delay = max_delay
        super().__init__(tracker, predictor)

    def void(self) -> None:
        super().void()
        self._next: ScheduledChunk | None = None
        self._assumed_until = 0
        """first tick of the newest request: until then it reckons with what will be executed"""
        self._drifted = False
        """what was asked for last is of no use"""

    def request_chunk(self, tick: int, observation: Observation) -> ChunkRequest | None:
        self._promote(tick)
        return None if self._next is not None else super().request_chunk(tick, observation)

    def next_action(self, tick: int, observation: Observation) -> PlannedAction | None:
        self._promote(tick)
        return super().next_action(tick, observation)

    def on_executed(self, tick: int, action: np.ndarray, waited: bool) -> None:
        super().on_executed(tick, action, waited)
        if tick < self._assumed_until and self.predictor.has_drifted:
            self.tracker.cancel()
            self._next = None
            self._assumed_until = tick
            self._drifted = True

    def _is_due(self, running: ScheduledChunk, tick: int) -> bool:
        delay = self.tracker.delay
        due = min(running.start + self._execute_ticks - delay.usual_ticks, running.end - delay.ticks)
        return self._drifted or tick >= due

    def _make_request(self, tick: int, observation: Observation) -> ChunkRequest:
        # what drifted once is not foretold again at once: a chunk for now can always be used
        foretold = self.predictor.last_action_was_ours and not self._drifted
        self._drifted = False
        ahead = min(self.tracker.delay.usual_ticks, self._max_delay) if foretold else 0
        self._assumed_until = tick + ahead
        self.predictor.reset_drift()
        past = self.predictor.past
        state = observation.state
        if ahead and len(past):
            running = self._running
            wanted = [planned[0] if running and (planned := running.at(tick + i)) else None for i in range(ahead)]
            state = self._motion.rollout(state, past, self.predictor.predict(wanted, state))
        return ChunkRequest(tick, observation, tick + ahead, np.asarray(state, np.float32))

    def _on_chunk(self, chunk: ScheduledChunk, tick: int) -> None:
        if chunk.end > tick:
            # What else was asked for reckons with other actions than these.
            self.tracker.cancel()
            self._next = chunk

    def _promote(self, tick: int) -> None:
        coming = self._next
        if coming is None:
            return
        if tick >= coming.chunk.first_tick:
            self._running, self._next = coming, None
        elif self._running is None or tick >= self._running.end:
            self._running, self._next = coming.starting_at(tick), None
