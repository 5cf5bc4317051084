"""The moving target, on the real simulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.metaworld.expert import MetaWorldExpert
from hal.drivers.metaworld.robot import MetaWorldConfig, MetaWorldRobot, metaworld_spec
from hal.drivers.metaworld.tasks import TRACK, instruction
from hal.drivers.metaworld.track import EPISODE_TICKS, PERIOD_TICKS, RADIUS_M, SETTLE_TICKS, track_score
from tests.extras import needs
from wire.clock import ManualClock
from wire.errors import ConfigError

pytestmark = needs("metaworld")

CONFIG = MetaWorldConfig(tasks=(TRACK,), observation="track")


@pytest.fixture(scope="module")
def robot() -> Iterator[MetaWorldRobot]:
    robot = MetaWorldRobot(CONFIG)
    robot.connect()
    yield robot
    robot.close()


def test_it_keeps_the_contract() -> None:
    report = check_robot(lambda: MetaWorldRobot(CONFIG), TRACK, clock=ManualClock())
    assert report.passed, str(report)


def test_a_policy_feels_its_set_point_and_sees_the_goal_and_nothing_else(robot: MetaWorldRobot) -> None:
    names = [d.name for d in robot.spec.state]
    assert names[:4] == ["set_point_x", "set_point_y", "set_point_z", "gripper_opening"]
    assert names[4:] == [f"goal_{what}{axis}" for what in ("", "v") for axis in "xyz"]
    assert not robot.spec.cameras and robot.spec.hash == metaworld_spec(CONFIG).hash
    robot.reset(TRACK, 3)
    before = robot.read()
    assert before.task == instruction(TRACK) == "follow the goal"
    for _ in range(5):
        robot.write(np.array([0.5, 0.0, -0.25, 0.0], np.float32))
        after = robot.read()
        assert np.allclose(after.state[:3] - before.state[:3], [0.005, 0.0, -0.0025], atol=1e-6)
        moved = after.state[4:7] - before.state[4:7]
        assert np.allclose(moved * robot.spec.control_hz, after.state[7:10], atol=1e-4)
        assert np.linalg.norm(moved) == pytest.approx(2 * RADIUS_M * np.sin(np.pi / PERIOD_TICKS), rel=1e-3)
        before = after


def test_a_seed_fixes_the_circle_and_the_trajectory(robot: MetaWorldRobot) -> None:
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


def test_the_operator_stays_on_the_goal_and_who_stands_still_does_not(robot: MetaWorldRobot) -> None:
    operator = MetaWorldExpert(robot)
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


def test_what_is_too_short_to_settle_scores_nothing() -> None:
    assert track_score([1.0] * SETTLE_TICKS) == 0.0
    assert track_score([0.0] * SETTLE_TICKS + [1.0, 0.0, 1.0, 1.0]) == 0.75


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tasks": ("push",), "observation": "track"}, "It knows: track"),
        ({"tasks": (TRACK,), "observation": "state"}, "no task 'track'"),
    ],
)
def test_the_task_needs_its_own_observation(wrong: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MetaWorldConfig(**wrong)
