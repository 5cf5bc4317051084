"""The state a chunk is asked for is the state the robot has when it begins, whoever and whatever acts meanwhile."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hal.interfaces.dynamics import SpecMotion
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from robot_edge.chunking.action_predictor import ActionPredictor
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from tests.robot_edge.chunking.simulated import LINE, Simulated, asked, reply_to, starved
from wire.messages.local import ChunkReply, ChunkRequest
from wire.types import PolicyCapabilities

TRAINED = PolicyCapabilities(trained_max_delay=8, state_aligned=True)


def drive(state: np.ndarray, action: np.ndarray) -> np.ndarray:
    return np.array([state[0] + action[0], state[1] + 0.01], np.float32)


def restless(request: ChunkRequest) -> ChunkReply:
    """Another speed in each chunk and each action, some beyond the limits of the robot."""
    rng = np.random.default_rng(request.tick)
    return reply_to(request, rng.uniform(-1.5, 1.5, (16, 1)).astype(np.float32))


def simulate(delays: list[int | None], policy=restless, timeout_ticks: int = 40, **options) -> Simulated:
    config = ChunkingConfig("future_state", timeout_ticks=timeout_ticks)
    scheduler = make_scheduler(config, LINE, TRAINED, SpecMotion(LINE), **options)
    return Simulated(
        scheduler, delays, LINE, policy, np.zeros(2, np.float32), drive, limit=lambda action: np.clip(action, -1, 1)
    )


def at(simulated: Simulated, ticks: int) -> dict[int, float]:
    """x by tick."""
    places = {}
    for _ in range(ticks):
        places[simulated.now] = float(simulated.state[0])
        simulated.run(1)
    return places


@pytest.mark.parametrize("delays", [[0], [1], [3], [8], [2, 7, 4, 1, 8, 3] * 20])
def test_the_state_asked_for_is_the_state_that_comes(delays: list[int | None]) -> None:
    simulated = simulate(delays)
    places = at(simulated, 150)
    # the first chunk of all begins as soon as it is here, for the robot waits
    requests = [row.request for row in simulated.rows[1:] if row.request]
    assert len(requests) > 10
    assert max(abs(places[r.tick] - places[r.first_tick]) for r in requests[:-2]) > 0.5 or delays == [0]
    for request in requests:
        if request.first_tick in places:
            assert request.state[0] == pytest.approx(places[request.first_tick], abs=1e-4)
            # what the motion does not foretell stays as it was seen
            assert request.state[1] == request.observation.state[1]
            assert request.observation.state[0] == pytest.approx(places[request.tick], abs=1e-6)


def test_the_first_chunk_of_an_episode_is_for_a_robot_that_stands_still() -> None:
    simulated = simulate([4])
    simulated.state = np.array([3.0, 0.0], np.float32)
    rows = simulated.run(5)
    assert rows[0].request.state.tolist() == [3.0, 0.0]
    assert rows[4].action is not None


def test_a_robot_without_actions_is_reckoned_to_hold() -> None:
    """The running chunk ends before the next one can begin."""
    simulated = simulate([8], policy=lambda request: reply_to(request, np.full((3, 1), 0.5, np.float32)))
    places = at(simulated, 60)
    assert starved(simulated.rows)
    for request in (row.request for row in simulated.rows if row.request):
        if request.first_tick in places:
            assert request.state[0] == pytest.approx(places[request.first_tick], abs=1e-5)


def test_limits_of_motion_are_reckoned_with() -> None:
    """Velocity and acceleration limits change what is executed at every splice, and while it brakes."""
    limits = SafetyLimits(velocity={"x": 40.0}, acceleration={"x": 500.0})
    simulated = simulate([6], safety=limits, policy=lambda r: reply_to(r, restless(r).chunk.actions[:9]))
    safety = SafetyLimiter(LINE, limits)

    def limited(action: np.ndarray) -> np.ndarray:
        executed = safety.limit(action, simulated.last, simulated.state)
        safety.note(executed, simulated.last)
        return executed

    simulated.limit = limited
    places = at(simulated, 120)
    wanted = np.array([row.action[0] if row.action is not None else 0 for row in simulated.rows])
    done = np.array([row.executed[0] for row in simulated.rows])
    assert np.abs(wanted - done).max() > 0.3
    assert np.abs(np.diff(done)).max() <= 500 / 50 / 50 + 1e-6
    compared = 0
    for request in (row.request for row in simulated.rows if row.request):
        if request.first_tick in places:
            compared += 1
            assert request.state[0] == pytest.approx(places[request.first_tick], abs=1e-4)
    assert compared > 10


def test_a_late_answer_that_is_used_makes_what_reckoned_without_it_void() -> None:
    simulated = simulate([3, 3, 3, 12, 8, 3], timeout_ticks=10)
    rows = simulated.run(80)
    late, foretold, after = [row.request for row in rows if row.request][3:6]
    assert foretold.tick == late.tick + 10 and foretold.first_tick > late.tick + 12
    # the answer that was given up begins before the chunk that reckoned with a robot without actions
    used = {row.chunk.observed_ns for row in rows if row.chunk}
    assert late.observation.time_ns in used
    assert foretold.observation.time_ns not in used
    assert after.tick >= late.tick + 12 and after.observation.time_ns in used


class TestSomebodyElseActs:
    def test_what_was_asked_for_is_void_and_asked_again_at_once(self) -> None:
        simulated = simulate([6])
        simulated.run(40)
        while simulated.rows[-1].request is None:
            simulated.run(1)
        void = simulated.rows[-1].request
        simulated.takeover = dict.fromkeys(range(simulated.now, simulated.now + 12), np.ones(1))
        rows = simulated.run(12)
        assert rows[0].request is None
        again = rows[1].request
        assert again is not None
        assert again.first_tick == again.tick
        assert again.state[0] == again.observation.state[0]
        used = {row.chunk.observed_ns for row in rows if row.chunk}
        assert void.observation.time_ns not in used
        assert again.observation.time_ns in used

    def test_after_them_the_robot_waits_for_a_chunk_from_where_it_is(self) -> None:
        simulated = simulate([6])
        simulated.run(40)
        simulated.takeover = dict.fromkeys(range(40, 52), np.ones(1))
        rows = simulated.run(12)
        assert rows[-1].action is not None
        after = simulated.run(20)
        # the first tick nobody acts at shows that they have handed back
        assert [row.tick for row in after if row.waited] == [*range(52, 59)]
        request = after[1].request
        assert request is not None and request.state[0] == request.observation.state[0]
        begins = next(row for row in after if row.action is not None)
        assert begins.chunk is not None and begins.chunk.observed_ns == request.observation.time_ns
        assert begins.chunk.first_tick == begins.tick

    def test_there_is_always_a_proposal_to_hand_back_to(self) -> None:
        simulated = simulate([6])
        simulated.run(30)
        simulated.takeover = dict.fromkeys(range(30, 200), np.full(1, 0.9))
        rows = simulated.run(170)
        assert starved(rows) == []
        # and no request at every tick for it
        assert len(asked(rows)) < 170 / 5
        after = simulated.run(60)
        assert starved(after) == []
        assert [row.request.first_tick - row.tick for row in after if row.request][-3:] == [6] * 3

    def test_a_small_difference_is_no_other_will(self) -> None:
        simulated = simulate([6])
        simulated.run(30)
        simulated.limit = lambda action: np.clip(action, -0.99, 0.99)
        rows = simulated.run(60)
        assert all(row.request.first_tick - row.tick == 6 for row in rows if row.request)

    def test_small_differences_that_add_up_are(self) -> None:
        simulated = simulate([8], policy=lambda request: reply_to(request, np.full((16, 1), 0.9, np.float32)))
        simulated.run(30)
        simulated.limit = lambda action: action - 0.1
        rows = simulated.run(40)
        ahead = [row.request.first_tick - row.tick for row in rows if row.request]
        assert set(ahead) == {0, 8}
        # a void request is followed by one that cannot be, so the robot goes on
        assert all(0 in pair for pair in itertools.pairwise(ahead))
        assert len(starved(rows)) < len(rows) / 3


@pytest.mark.parametrize("delay", [0, 2, 4, 8])
def test_it_does_not_repeat_a_motion_that_is_under_way(delay: int) -> None:
    """A policy that goes straight to a goal and stops there; late, it only works knowing what is on its way."""

    def straight(request: ChunkRequest) -> ChunkReply:
        way = float(request.observation.state[1] - request.state[0])
        steps = (
            np.clip(way - 0.25 * np.arange(16), 0, 0.25) if way > 0 else -np.clip(-way - 0.25 * np.arange(16), 0, 0.25)
        )
        return reply_to(request, steps[:, None].astype(np.float32))

    overshoot = {}
    for strategy in ("naive", "aligned", "future_state"):
        scheduler = make_scheduler(ChunkingConfig(strategy), LINE, TRAINED, SpecMotion(LINE))
        simulated = Simulated(
            scheduler,
            [delay],
            LINE,
            straight,
            np.array([0, 5], np.float32),
            lambda state, action: np.array([state[0] + action[0], state[1]], np.float32),
        )
        overshoot[strategy] = max(at(simulated, 80).values()) - 5
    assert overshoot["future_state"] == pytest.approx(0, abs=1e-5)
    assert (overshoot["naive"] > 0.4) == (delay > 0)
    assert overshoot["aligned"] <= overshoot["naive"] + 1e-5


def test_walls_are_reckoned_with_where_the_robot_will_be() -> None:
    limits = SafetyLimits(workspace={"x": (-1.0, 2.0)})
    predictor = ActionPredictor(LINE, limits, SpecMotion(LINE))
    predictor.on_executed(0, np.array([0.5], np.float32))
    coming = predictor.predict([np.array([0.8], np.float32)] * 4, np.array([0.5, 0], np.float32))
    # from 0.5 there are 1.5 left: two whole steps no longer fit
    assert coming.sum() == pytest.approx(1.5, abs=1e-4)
    assert coming[0, 0] == pytest.approx(0.8, abs=1e-6)
