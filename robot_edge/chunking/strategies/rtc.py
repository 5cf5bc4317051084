"""Real-time chunking: the next chunk is made to continue the actions that are executed while it is made.

Guided (arXiv 2506.07339): the whole overlap with the running chunk goes along and steers a policy that was never
trained for it. Trained (arXiv 2512.05964): only the committed actions go along, as an input it was trained with.
"""

from __future__ import annotations

import numpy as np

from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.scheduler import AlignedScheduler, RequestTracker
from wire.messages.local import ChunkRequest
from wire.types import CommandType, Observation, Prefix


class RtcScheduler(AlignedScheduler):
    """Asks for now, with the running chunk's actions from now on as prefix; executes from the tick of arrival.

    What goes along as committed is what will be executed, within the limits of velocity and acceleration.
    As many are committed as the usual delay has ticks, of H actions at most H - `execute_ticks` (section 3.1 of both
    papers), and no more than training knew. The papers commit the longest delay of late; but what is committed is the
    old plan, so a few slow answers would make every chunk as old as they are. A chunk that comes later than committed
    jumps, as one of `AlignedScheduler` does. Without a running chunk, or while somebody else acts, there is no
    prefix.
    """

    predictor: ActionPredictor

    def __init__(
        self, tracker: RequestTracker, predictor: ActionPredictor, *, guided: bool, max_delay: int | None = None
    ) -> None:
        """`max_delay`: longest prefix the policy was trained with, in actions; None for no such limit."""
        self._guided = guided
        self._low, self._high = tracker.spec.action_low(), tracker.spec.action_high()
        self._absolute = np.array([d.meaning is CommandType.absolute for d in tracker.spec.action], bool)
        self._max_delay = max_delay
        super().__init__(tracker, predictor)

    def _make_request(self, tick: int, observation: Observation) -> ChunkRequest:
        return ChunkRequest(tick, observation, tick, observation.state, self._prefix(tick, observation.state))

    def _prefix(self, tick: int, state: np.ndarray) -> Prefix | None:
        running = self._running
        if running is None or running.end <= tick or not self.predictor.last_action_was_ours:
            return None
        # The policy knows actions at the pace it was trained with: one tick is `speed_up` of them.
        pace = self.tracker.config.speed_up
        left = running.made.actions[(tick - running.chunk.first_tick) * pace :]
        ticks = min(
            self.tracker.delay.usual_ticks, running.end - tick, len(running.chunk.actions) - self._execute_ticks
        )
        committed = min(max(ticks, 0) * pace, len(left))
        if self._max_delay is not None:
            committed = min(committed, self._max_delay)
        actions = left if self._guided else left[:committed]
        if not len(actions):
            return None
        if committed and len(self.predictor.past):
            actions = self._as_executed(actions, committed, tick, state)
        return Prefix(np.clip(actions, self._low, self._high).astype(np.float32), committed, self._guided)

    def _as_executed(self, actions: np.ndarray, committed: int, tick: int, state: np.ndarray) -> np.ndarray:
        """float32[n, da]: `actions`, at the policy's pace, the first `committed` of them as the robot will do them.

        Of the actions of one tick (`quantise`) the sum, or for absolute dimensions the last, is what is executed then.
        """
        running, pace = self._running, self.tracker.config.speed_up
        assert running is not None
        first = tick - running.chunk.first_tick
        fast = running.chunk.actions[first : first + -(-committed // pace)]
        executed = self.predictor.predict(list(fast), state)
        if pace == 1:
            return np.concatenate([executed, actions[committed:]])
        done = np.array(actions, np.float32)
        # How far the robot is behind its targets already.
        off = self.predictor.past[-1] - running.made.actions[max(0, first * pace - 1)]
        for group, at in enumerate(range(0, committed, pace)):
            whole = running.made.actions[(first + group) * pace : (first + group + 1) * pace]
            last_off, off = off, executed[group] - np.where(self._absolute, whole[-1], whole.sum(axis=0))
            for i in range(min(len(whole), committed - at)):
                share = (i + 1) / len(whole)
                done[at + i] += np.where(self._absolute, last_off + (off - last_off) * share, off / len(whole))
        return done
