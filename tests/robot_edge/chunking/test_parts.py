"""Forecast, quantisation, line and foresight by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.safety.limiter import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.delay_estimate import DelayEstimator
from robot_edge.chunking.request_tracker import RequestTracker
from robot_edge.chunking.strategies.quantise import lost, quantise
from tests.robot_edge.chunking.simulated import SPEC, oracle, plain
from wire.errors import ConfigError
from wire.messages.local import ChunkRequest
from wire.types import ActionChunk, Observation, RobotSpec

SEEN = Observation(0, np.zeros(1, np.float32), {}, "")


class TestForecast:
    def test_it_is_of_use_from_the_first_measurement_on(self) -> None:
        forecast = DelayEstimator(first=2)
        assert forecast.ticks == 2
        forecast.add(7)
        assert forecast.ticks == 7
        forecast.add(3)
        assert forecast.ticks == 7

    def test_a_burst_ages_out(self) -> None:
        forecast = DelayEstimator(window=50, quantile=0.95)
        for delay in [2] * 50 + [12] * 5:
            forecast.add(delay)
        assert forecast.ticks == 12
        for _ in range(48):
            forecast.add(2)
        assert forecast.ticks == 2

    def test_one_slow_answer_of_many_does_not_count(self) -> None:
        forecast = DelayEstimator()
        for delay in [2] * 30 + [40]:
            forecast.add(delay)
        assert forecast.ticks == 2

    @given(st.lists(st.integers(0, 100), min_size=1, max_size=120), st.floats(0.05, 1.0))
    def test_it_is_the_smallest_delay_that_enough_answers_kept(self, delays: list[int], quantile: float) -> None:
        forecast = DelayEstimator(50, quantile)
        for delay in delays:
            forecast.add(delay)
        last = delays[-50:]
        share = sum(delay <= forecast.ticks for delay in last) / len(last)
        assert share >= quantile - 1e-9
        assert forecast.ticks in last
        assert sum(delay < forecast.ticks for delay in last) / len(last) < quantile

    @pytest.mark.parametrize("wrong", [{"window": 0}, {"quantile": 0.0}, {"quantile": 1.1}, {"first": -1}])
    def test_nonsense_is_refused(self, wrong: dict) -> None:
        with pytest.raises(ConfigError, match="delay forecast"):
            DelayEstimator(**wrong)


def chunk(actions: list[list[float]]) -> ActionChunk:
    return ActionChunk(np.array(actions, np.float32), 5, 1, 1, 0, 0)


class TestQuantise:
    def test_each_meaning_has_its_rule(self) -> None:
        fast = quantise(chunk([[0.1, 0.1, 0.2], [0.2, 0.3, 0.1], [0.3, -0.5, 0.4]]), 2, plain())
        assert fast.actions == pytest.approx(np.array([[0.2, 0.4, 0.3], [0.3, -0.5, 0.4]], np.float32))
        assert (fast.first_tick, fast.actions.dtype) == (5, np.float32)

    def test_what_is_clipped_is_lost_and_said(self) -> None:
        fast = chunk([[0.0, 0.9, -0.8], [0.5, 0.9, -0.8]])
        assert quantise(fast, 2, plain()).actions.tolist() == [[0.5, 1.0, -1.0]]
        assert lost(fast, 2, plain()) == pytest.approx(np.array([[0.0, 0.8, -0.6]]), abs=1e-6)

    @given(st.integers(1, 20), st.integers(1, 6))
    def test_small_motions_end_where_they_should(self, horizon: int, q: int) -> None:
        actions = np.random.default_rng(horizon * q).uniform(-0.15, 0.15, (horizon, 3)).astype(np.float32)
        fast = quantise(ActionChunk(actions, 0, 1, 1, 0, 0), q, plain()).actions
        assert len(fast) == -(-horizon // q)
        assert fast[-1, 0] == actions[-1, 0]
        assert fast[:, 1:].sum(0) == pytest.approx(actions[:, 1:].sum(0), abs=1e-5)

    def test_no_speed_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="speed-up 0"):
            quantise(chunk([[0, 0, 0]]), 0, plain())


class TestLine:
    def request(self, tick: int) -> ChunkRequest:
        return ChunkRequest(tick, SEEN, tick, SEEN.state)

    def test_what_was_cancelled_is_not_taken(self) -> None:
        line = RequestTracker()
        request = line.ask(self.request(0))
        assert not line.free(1)
        line.cancel()
        assert line.free(1)
        assert line.take(oracle(request), 1) is None

    def test_a_late_answer_is_better_than_none(self) -> None:
        line = RequestTracker(patience_ticks=5)
        first = line.ask(self.request(0))
        assert line.free(5)
        second = line.ask(self.request(5))
        plan = line.take(oracle(first), 7)
        assert plan is not None
        assert plan.delay_ticks == 7
        assert not line.free(8)
        assert line.take(oracle(second), 9) is not None
        assert line.free(9)

    def test_a_chunk_for_another_moment_is_a_failure(self) -> None:
        line = RequestTracker()
        request = line.ask(self.request(0))
        reply = oracle(ChunkRequest(0, SEEN, 3, SEEN.state))
        assert line.take(reply, 1) is None
        assert line.free(1)
        assert line.take(oracle(request), 1) is None

    def test_memory_does_not_grow(self) -> None:
        line = RequestTracker(patience_ticks=1)
        for tick in range(100):
            assert line.free(tick)
            line.ask(self.request(tick))
        assert len(line._open) <= 4

    def test_it_speeds_up_at_the_door(self) -> None:
        line = RequestTracker(spec=SPEC, speed_up=3)
        plan = line.take(oracle(line.ask(self.request(4))), 5)
        assert plan is not None
        assert plan.chunk.actions[:, 0].tolist() == [6, 9, 12, 15, 18, 19]
        assert (plan.chunk.first_tick, plan.end, len(plan.made.actions)) == (4, 10, 16)

    @pytest.mark.parametrize(("spec", "speed_up"), [(None, 2), (SPEC, 0)])
    def test_a_speed_up_needs_to_know_the_robot(self, spec: RobotSpec | None, speed_up: int) -> None:
        with pytest.raises(ConfigError, match="speed-up"):
            RequestTracker(spec=spec, speed_up=speed_up)


class TestForesight:
    state = np.zeros(3, np.float32)

    def test_hold_keeps_absolute_and_stops_the_rest(self) -> None:
        foresight = ActionPredictor(plain())
        assert np.isnan(foresight.coming([None], self.state)[0]).tolist() == [True, False, False]
        foresight.executed(0, np.array([0.5, 0.6, 0.7], np.float32))
        coming = foresight.coming([np.array([9.0, -9.0, 0.1]), None, None], self.state)
        assert coming == pytest.approx(np.array([[2, -1, 0.1], [2, 0, 0], [2, 0, 0]], np.float32))

    def test_it_brakes_within_the_acceleration_limit(self) -> None:
        """What comes without actions is a ramp to hold, immediately where nothing limits it."""
        foresight = ActionPredictor(plain(), SafetyLimits(acceleration={"a": 10.0, "v": 2.0}))
        for tick, place in enumerate((0.0, 0.3, 0.6)):
            foresight.executed(tick, np.array([place, 0.5, 0.5], np.float32))
        # absolute: 3 /s, less 1 /s each tick of 0.1 s; velocity: 0.5, less 0.2 each tick; delta: no limit, 0 at once
        expected = [[0.8, 0, 0.3], [0.9, 0, 0.1], [0.9, 0, 0], [0.9, 0, 0]]
        assert foresight.coming([None] * 4, self.state) == pytest.approx(np.array(expected, np.float32), abs=1e-5)
        # looking ahead changes nothing
        assert foresight.coming([None] * 4, self.state) == pytest.approx(np.array(expected, np.float32), abs=1e-5)

    def test_it_keeps_a_bounded_past(self) -> None:
        foresight = ActionPredictor(plain())
        assert foresight.past.shape == (0, 3)
        for tick in range(100):
            foresight.executed(tick, np.full(3, tick / 100, np.float32))
        assert foresight.past.shape == (64, 3)
        assert foresight.past[[0, -1], 0] == pytest.approx([0.36, 0.99])

    def test_it_knows_its_own_will(self) -> None:
        foresight = ActionPredictor(plain())
        action = np.array([0.1, 0.2, 0.3], np.float32)
        foresight.chose(0, action, self.state)
        foresight.executed(0, action)
        assert foresight.own
        foresight.chose(1, action, self.state)
        foresight.executed(1, action + np.float32(0.5))
        assert not foresight.own
        foresight.executed(2, action)
        assert not foresight.own
        foresight.chose(3, None, self.state)
        foresight.executed(3, np.array([0.1, 0, 0], np.float32))
        assert foresight.own
