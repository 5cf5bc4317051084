"""The moving target, on the real simulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.async_delay.track import (
    EPISODE_TICKS,
    PERIOD_TICKS,
    RADIUS_M,
    SETTLE_TICKS,
    TRACK,
    TURN_TICKS,
    TrackOperator,
    TrackRobot,
    track_motion,
    track_score,
)
from hal.conformance import check_robot
from tests.extras import needs
from wire.clock import ManualClock

pytestmark = needs("metaworld")


@pytest.fixture(scope="module")
def robot() -> Iterator[TrackRobot]:
    robot = TrackRobot()
    robot.connect()
    yield robot
    robot.close()


def test_it_keeps_the_contract() -> None:
    report = check_robot(TrackRobot, TRACK, clock=ManualClock())
    assert report.passed, str(report)


def test_a_policy_feels_its_set_point_and_sees_the_goal_and_nothing_else(robot: TrackRobot) -> None:
    names = [d.name for d in robot.spec.state]
    assert names[:4] == ["set_point_x", "set_point_y", "set_point_z", "gripper_opening"]
    assert names[4:] == [f"goal_{what}{axis}" for what in ("", "v") for axis in "xyz"]
    assert not robot.spec.cameras
    robot.reset(TRACK, 3)
    before = robot.read()
    assert before.task == "follow the goal"
    for _ in range(5):
        robot.write(np.array([0.5, 0.0, -0.25, 0.0], np.float32))
        after = robot.read()
        assert np.allclose(after.state[:3] - before.state[:3], [0.005, 0.0, -0.0025], atol=1e-6)
        moved = after.state[4:7] - before.state[4:7]
        assert np.allclose(moved * robot.spec.control_hz, after.state[7:10], atol=1e-4)
        assert np.linalg.norm(moved) == pytest.approx(2 * RADIUS_M * np.sin(np.pi / PERIOD_TICKS), rel=1e-3)
        before = after


def test_a_seed_fixes_the_circle_and_the_trajectory(robot: TrackRobot) -> None:
    def run(seed: int) -> list[bytes]:
        robot.reset(TRACK, seed)
        rng = np.random.default_rng(seed)
        seen = []
        for _ in range(20):
            seen.append(robot.read().state.tobytes())
            robot.write(rng.uniform(-1, 1, 4).astype(np.float32))
        return seen

    first = run(5)
    assert run(6) != first
    assert run(5) == first
    turns = set()
    for seed in range(8):
        robot.reset(TRACK, seed)
        robot.write(np.zeros(4, np.float32))
        state = robot.read().state
        turns.add(float(np.sign(state[4] * state[8] - (state[5] - 0.7) * state[7])))
    assert turns == {-1.0, 1.0}


def test_the_operator_stays_on_the_goal_and_who_stands_still_does_not(robot: TrackRobot) -> None:
    operator = TrackOperator(robot)
    scores, stood = [], []
    for seed in (11, 12, 13):
        robot.reset(TRACK, seed)
        rewards, progress = [], []
        for _ in range(EPISODE_TICKS):
            progress.append(operator.progress())
            action = operator.propose(robot.read())
            assert action is not None and action.dtype == np.float32 and np.abs(action).max() <= 1
            feedback = robot.write(action)
            assert not feedback.success, "an episode goes on until its time is up"
            rewards.append(feedback.reward)
        assert not any(rewards[:SETTLE_TICKS]) and set(rewards) <= {0.0, 1.0}
        assert max(progress[SETTLE_TICKS:]) < 0.02 < progress[0]
        scores.append(track_score(rewards))
        robot.reset(TRACK, seed)
        stood.append(track_score([robot.write(np.zeros(4, np.float32)).reward for _ in range(EPISODE_TICKS)]))
    assert min(scores) == 1.0
    assert max(stood) < 0.2


def test_a_goal_that_turns_round_is_foreseen_by_nobody() -> None:
    robot = TrackRobot(turning=True)
    robot.connect()
    try:
        operator, still = TrackOperator(robot), np.zeros(4, np.float32)
        ways, aims = [], []
        robot.reset(TRACK, 4)
        for _ in range(400):
            seen = robot.privileged()
            (x, y), (vx, vy) = seen[4:6], seen[7:9]
            ways.append(float(np.sign(x * vy - (y - 0.7) * vx)))
            # where the operator aims lies on the side the goal goes to
            aims.append(float(np.sign((seen[10:12] - seen[4:6]) @ seen[7:9])))
            robot.write(still)
        turns = np.flatnonzero(np.diff(ways)) + 1
        assert set(aims) == {1.0}
        assert len(turns) > 4 and len(set(np.diff(turns))) > 1
        assert all(TURN_TICKS[0] <= ticks <= TURN_TICKS[1] for ticks in np.diff([0, *turns]))
        robot.reset(TRACK, 4)
        rewards = []
        for _ in range(EPISODE_TICKS):
            action = operator.propose(robot.read())
            assert action is not None
            rewards.append(robot.write(action).reward)
        # it comes too late at each turn, and is on the goal again soon
        assert 0.6 < track_score(rewards) < 1.0
    finally:
        robot.close()


def test_what_is_too_short_to_settle_scores_nothing() -> None:
    assert track_score([1.0] * SETTLE_TICKS) == 0.0
    assert track_score([0.0] * SETTLE_TICKS + [1.0, 0.0, 1.0, 1.0]) == 0.75


@pytest.mark.slow
def test_the_set_point_is_foretold_exactly(robot: TrackRobot) -> None:
    motion = track_motion()
    assert motion.rolled.tolist() == [True] * 3 + [False] * 7
    operator, rng = TrackOperator(robot), np.random.default_rng(0)
    robot.reset(TRACK, 300)
    states, actions = [robot.read().state], []
    for _ in range(80):
        wanted = operator.propose(robot.read())
        assert wanted is not None
        actions.append(robot.write(np.clip(wanted + 0.5 * rng.standard_normal(4), -1, 1).astype(np.float32)).executed)
        states.append(robot.read().state)
    did = np.array(actions)
    for ticks in (1, 4, 12):
        for t in range(0, len(did) - ticks, 3):
            foretold = motion.rollout(states[t], did[:t], did[t : t + ticks])
            assert np.linalg.norm((foretold - states[t + ticks])[:3]) < 1e-6
