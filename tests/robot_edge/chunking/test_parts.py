"""Delay estimate, quantisation, request tracker and action predictor by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.safety.limits import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.scheduler import DelayEstimator, RequestTracker, quantise
from tests.robot_edge.chunking.simulated import SPEC, oracle, plain
from wire.messages.local import ChunkRequest
from wire.types import ActionChunk, Observation

SEEN = Observation(0, np.zeros(1, np.float32), {}, "")


class TestDelayEstimator:
    def test_it_is_of_use_from_the_first_measurement_on(self) -> None:
        delay = DelayEstimator(first=2)
        assert delay.ticks == 2
        delay.add(7)
        assert delay.ticks == 7
        delay.add(3)
        assert delay.ticks == 7

    def test_a_burst_ages_out(self) -> None:
        delay = DelayEstimator()
        for ticks in [2] * 50 + [12] * 5:
            delay.add(ticks)
        assert delay.ticks == 12
        for _ in range(48):
            delay.add(2)
        assert delay.ticks == 2

    def test_what_is_usual_is_not_what_is_long(self) -> None:
        delay = DelayEstimator(first=3)
        assert delay.usual_ticks == 3
        for ticks in [2, 2, 12] * 20:
            delay.add(ticks)
        assert (delay.usual_ticks, delay.ticks) == (2, 12)
        for ticks in [12] * 20:
            delay.add(ticks)
        assert delay.usual_ticks == 12

    def test_one_slow_answer_of_many_does_not_count(self) -> None:
        delay = DelayEstimator()
        for ticks in [2] * 30 + [40]:
            delay.add(ticks)
        assert delay.ticks == 2

    @given(st.lists(st.integers(0, 100), min_size=1, max_size=120))
    def test_it_is_the_smallest_delay_that_enough_answers_kept(self, delays: list[int]) -> None:
        delay = DelayEstimator()
        for ticks in delays:
            delay.add(ticks)
        last = delays[-50:]
        share = sum(ticks <= delay.ticks for ticks in last) / len(last)
        assert share >= 0.95 - 1e-9
        assert delay.ticks in last
        assert sum(ticks < delay.ticks for ticks in last) / len(last) < 0.95
        for kept, most in (("usual_ticks", 0.5), ("ticks", 0.95)):
            assert sum(ticks <= getattr(delay, kept) for ticks in last) / len(last) >= most - 1e-9
        assert sum(ticks < delay.usual_ticks for ticks in last) / len(last) < 0.5


def chunk(actions: list[list[float]]) -> ActionChunk:
    return ActionChunk(np.array(actions, np.float32), 5, 1, 1, 0, 0)


class TestQuantise:
    def test_each_meaning_has_its_rule(self) -> None:
        fast = quantise(chunk([[0.1, 0.1, 0.2], [0.2, 0.3, 0.1], [0.3, -0.5, 0.4]]), 2, plain())
        assert fast.actions == pytest.approx(np.array([[0.2, 0.4, 0.3], [0.3, -0.5, 0.4]], np.float32))
        assert (fast.first_tick, fast.actions.dtype) == (5, np.float32)

    def test_what_is_clipped_is_lost(self) -> None:
        fast = chunk([[0.0, 0.9, -0.8], [0.5, 0.9, -0.8]])
        assert quantise(fast, 2, plain()).actions.tolist() == [[0.5, 1.0, -1.0]]

    @given(st.integers(1, 20), st.integers(1, 6))
    def test_small_motions_end_where_they_should(self, horizon: int, q: int) -> None:
        actions = np.random.default_rng(horizon * q).uniform(-0.15, 0.15, (horizon, 3)).astype(np.float32)
        fast = quantise(ActionChunk(actions, 0, 1, 1, 0, 0), q, plain()).actions
        assert len(fast) == -(-horizon // q)
        assert fast[-1, 0] == actions[-1, 0]
        assert fast[:, 1:].sum(0) == pytest.approx(actions[:, 1:].sum(0), abs=1e-5)


class TestRequestTracker:
    def request(self, tick: int) -> ChunkRequest:
        return ChunkRequest(tick, SEEN, tick, SEEN.state)

    def test_what_was_cancelled_is_not_taken(self) -> None:
        tracker = RequestTracker(SPEC, ChunkingConfig())
        request = tracker.register(self.request(0))
        assert not tracker.can_request(1)
        tracker.cancel()
        assert tracker.can_request(1)
        assert tracker.pop(oracle(request), 1) is None

    def test_a_late_answer_is_better_than_none(self) -> None:
        tracker = RequestTracker(SPEC, ChunkingConfig(timeout_ticks=5))
        first = tracker.register(self.request(0))
        assert tracker.can_request(5)
        second = tracker.register(self.request(5))
        chunk = tracker.pop(oracle(first), 7)
        assert chunk is not None
        assert chunk.delay_ticks == 7
        assert not tracker.can_request(8)
        assert tracker.pop(oracle(second), 9) is not None
        assert tracker.can_request(9)

    def test_a_chunk_for_another_moment_is_a_failure(self) -> None:
        tracker = RequestTracker(SPEC, ChunkingConfig())
        request = tracker.register(self.request(0))
        reply = oracle(ChunkRequest(0, SEEN, 3, SEEN.state))
        assert tracker.pop(reply, 1) is None
        assert tracker.can_request(1)
        assert tracker.pop(oracle(request), 1) is None

    def test_memory_does_not_grow(self) -> None:
        tracker = RequestTracker(SPEC, ChunkingConfig(timeout_ticks=1))
        for tick in range(100):
            assert tracker.can_request(tick)
            tracker.register(self.request(tick))
        assert len(tracker._open) <= 4

    def test_it_speeds_up_at_the_door(self) -> None:
        tracker = RequestTracker(SPEC, ChunkingConfig(speed_up=3))
        chunk = tracker.pop(oracle(tracker.register(self.request(4))), 5)
        assert chunk is not None
        assert chunk.chunk.actions[:, 0].tolist() == [6, 9, 12, 15, 18, 19]
        assert (chunk.chunk.first_tick, chunk.end, len(chunk.made.actions)) == (4, 10, 16)


class TestActionPredictor:
    state = np.zeros(3, np.float32)

    def test_hold_keeps_absolute_and_stops_the_rest(self) -> None:
        predictor = ActionPredictor(plain())
        predictor.on_executed(0, np.array([0.5, 0.6, 0.7], np.float32))
        coming = predictor.predict([np.array([9.0, -9.0, 0.1]), None, None], self.state)
        assert coming == pytest.approx(np.array([[2, -1, 0.1], [2, 0, 0], [2, 0, 0]], np.float32))

    def test_it_brakes_within_the_acceleration_limit(self) -> None:
        """What comes without actions is a ramp to hold, immediately where nothing limits it."""
        predictor = ActionPredictor(plain(), SafetyLimits(acceleration={"a": 10.0, "v": 2.0}))
        for tick, place in enumerate((0.0, 0.3, 0.6)):
            predictor.on_executed(tick, np.array([place, 0.5, 0.5], np.float32))
        # absolute: 3 /s, less 1 /s each tick of 0.1 s; velocity: 0.5, less 0.2 each tick; delta: no limit, 0 at once
        expected = [[0.8, 0, 0.3], [0.9, 0, 0.1], [0.9, 0, 0], [0.9, 0, 0]]
        assert predictor.predict([None] * 4, self.state) == pytest.approx(np.array(expected, np.float32), abs=1e-5)
        # looking ahead changes nothing
        assert predictor.predict([None] * 4, self.state) == pytest.approx(np.array(expected, np.float32), abs=1e-5)

    def test_it_keeps_a_bounded_past(self) -> None:
        predictor = ActionPredictor(plain())
        assert predictor.past.shape == (0, 3)
        for tick in range(100):
            predictor.on_executed(tick, np.full(3, tick / 100, np.float32))
        assert predictor.past.shape == (64, 3)
        assert predictor.past[[0, -1], 0] == pytest.approx([0.36, 0.99])

    def test_it_knows_its_own_will(self) -> None:
        predictor = ActionPredictor(plain())
        action = np.array([0.1, 0.2, 0.3], np.float32)
        predictor.on_action_selected(0, action, self.state)
        predictor.on_executed(0, action)
        assert predictor.last_action_was_ours
        predictor.on_action_selected(1, action, self.state)
        predictor.on_executed(1, action + np.float32(0.5))
        assert not predictor.last_action_was_ours
        predictor.on_executed(2, action)
        assert not predictor.last_action_was_ours
        predictor.on_action_selected(3, None, self.state)
        predictor.on_executed(3, np.array([0.1, 0, 0], np.float32))
        assert predictor.last_action_was_ours
