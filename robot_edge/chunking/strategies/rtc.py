"""Real-time chunking: the next chunk is made to continue the actions that are executed while it is made.

Guided (arXiv 2506.07339): the whole overlap with the running chunk goes along and steers a policy that was never
trained for it. Trained (arXiv 2512.05964): only the committed actions go along, as an input it was trained with.
"""

from __future__ import annotations

import numpy as np

from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.scheduler import AlignedScheduler, RequestTracker
from wire.messages.local import ChunkRequest
from wire.types import Observation, Prefix


class RtcScheduler(AlignedScheduler):
    """Asks for now, with the running chunk's actions from now on as prefix; executes from the tick of arrival.

    Of H actions at most H - `execute_ticks` are committed (section 3.1 of both papers), and no more than training
    knew. A chunk that comes later than that jumps. Without a running chunk, or while somebody else acts, there is no
    prefix.
    """

    predictor: ActionPredictor

    def __init__(
        self, tracker: RequestTracker, predictor: ActionPredictor, *, guided: bool, max_delay: int | None = None
    ) -> None:
        """`max_delay`: longest prefix the policy was trained with, in actions; None for no such limit."""
        self._guided = guided
        self._low, self._high = tracker.spec.action_low(), tracker.spec.action_high()
        self._max_delay = max_delay
        super().__init__(tracker, predictor)

    def _make_request(self, tick: int, observation: Observation) -> ChunkRequest:
        return ChunkRequest(tick, observation, tick, observation.state, self._prefix(tick))

    def _prefix(self, tick: int) -> Prefix | None:
        running = self._running
        if running is None or running.end <= tick or not self.predictor.last_action_was_ours:
            return None
        # The policy knows actions at the pace it was trained with: one tick is `speed_up` of them.
        pace = self.tracker.config.speed_up
        left = running.made.actions[(tick - running.chunk.first_tick) * pace :]
        ticks = min(self.tracker.delay.ticks, running.end - tick, len(running.chunk.actions) - self._execute_ticks)
        committed = min(max(ticks, 0) * pace, len(left))
        if self._max_delay is not None:
            committed = min(committed, self._max_delay)
        actions = left if self._guided else left[:committed]
        if not len(actions):
            return None
        return Prefix(np.clip(actions, self._low, self._high).astype(np.float32), committed, self._guided)
