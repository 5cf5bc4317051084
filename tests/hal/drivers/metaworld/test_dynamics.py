"""What is foretold against what the simulator then does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hal.drivers.metaworld.dynamics import HAND_HIGH, STEP_M, HandMotion, metaworld_limits
from hal.drivers.metaworld.expert import MetaWorldExpert
from hal.drivers.metaworld.robot import (
    MetaWorldConfig,
    MetaWorldRobot,
    metaworld_spec,
)
from hal.drivers.metaworld.tasks import PIXEL_TASKS, STATE_TASKS
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.safety.limiter import SafetyLimiter
from hal.safety.rest import rest_action
from tests.extras import needs

pytestmark = needs("metaworld")

Roll = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def record(config: MetaWorldConfig, tasks: tuple[str, ...], noise: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """States [T + 1, ds] and executed actions [T, da] of one episode of each task, until it succeeds."""
    robot = MetaWorldRobot(config)
    robot.connect()
    operator = MetaWorldExpert(robot)
    episodes = []
    for seed, task in enumerate(tasks):
        rng, push = np.random.default_rng(seed), np.zeros(4)
        robot.reset(task, 300 + seed)
        states, actions = [robot.read().state], []
        for _ in range(80):
            push = 0.9 * push + noise * rng.standard_normal(4)
            action = operator.propose(robot.read())
            assert action is not None
            feedback = robot.write(np.clip(action + push, -1, 1).astype(np.float32))
            actions.append(feedback.executed)
            states.append(robot.read().state)
            if feedback.success:
                break
        episodes.append((np.array(states), np.array(actions)))
    robot.close()
    return episodes


def error_mm(episodes: list[tuple[np.ndarray, np.ndarray]], roll: Roll, ticks: int) -> float:
    """Mean distance of the foretold place from the real one."""
    return 1e3 * float(
        np.mean(
            [
                np.linalg.norm((roll(states[t], did[:t], did[t : t + ticks]) - states[t + ticks])[:3])
                for states, did in episodes
                for t in range(0, len(did) - ticks, 3)
            ]
        )
    )


@pytest.mark.slow
def test_the_hand_is_foretold_better_than_by_adding_up() -> None:
    config = MetaWorldConfig(tasks=(*PIXEL_TASKS, *STATE_TASKS), observation="state")
    episodes = record(config, config.tasks, noise=0.1)
    motion = HandMotion(metaworld_spec(config))
    adding = SpecMotion(metaworld_spec(config), [ActionStateMapping(f"move_{a}", f"hand_{a}", STEP_M) for a in "xyz"])
    for ticks, most_mm in ((1, 3), (2, 6), (4, 11), (8, 18), (12, 22)):
        error = error_mm(episodes, motion.rollout, ticks)
        assert error < most_mm
        assert error < 0.6 * error_mm(episodes, adding.rollout, ticks)
        assert error < 0.4 * error_mm(episodes, lambda state, past, coming: state, ticks)


def test_what_a_policy_of_pixels_feels_is_foretold_the_same_way() -> None:
    rng = np.random.default_rng(0)
    past, coming = rng.uniform(-1, 1, (2, 6, 4)).astype(np.float32)
    state = np.zeros(39, np.float32)
    state[:3] = 0.1, 0.6, 0.2
    whole, few = (
        HandMotion(metaworld_spec(MetaWorldConfig(tasks=STATE_TASKS, observation="state"))),
        HandMotion(metaworld_spec(MetaWorldConfig())),
    )
    rolled = whole.rollout(state, past, coming)
    assert np.array_equal(few.rollout(state[:4], past, coming), rolled[:4])
    assert np.flatnonzero(few.rolled).tolist() == [0, 1, 2]
    assert np.flatnonzero(whole.rolled).tolist() == [0, 1, 2, 18, 19, 20]
    assert np.array_equal(rolled[18:21], whole.rollout(state, past, coming[:-1])[:3]), "the hand one tick ago"
    kept = ~whole.rolled
    assert np.array_equal(rolled[kept], state[kept]) and rolled.dtype == np.float32


def test_the_lead_of_the_set_point_counts() -> None:
    motion = HandMotion(metaworld_spec(MetaWorldConfig()))
    state = np.array([0.0, 0.6, 0.2, 1.0], np.float32)
    ahead, still = np.tile([1.0, 0, 0, 0], (10, 1)).astype(np.float32), np.zeros((40, 4), np.float32)
    assert np.array_equal(motion.rollout(state, ahead, still[:0]), state)
    assert np.allclose(motion.rollout(state, still, still), state)
    drawn = motion.rollout(state, ahead, still)[0]
    assert 0.03 < drawn < 0.06, "it comes to rest at the set-point, a few centimetres on"
    far = motion.rollout(state, ahead, np.tile([1.0, 0, 0, 0], (200, 1)).astype(np.float32))
    assert far[0] == pytest.approx(HAND_HIGH[0], abs=1e-6), "the simulator keeps the set-point within limits"


def test_the_experts_act_as_they_like_within_the_limits_that_robots_keep() -> None:
    robot = MetaWorldRobot(MetaWorldConfig(tasks=("drawer-open", "button-press-topdown"), observation="state"))
    robot.connect()
    expert, safety = MetaWorldExpert(robot), SafetyLimiter(robot.spec, metaworld_limits())
    for task in robot.tasks:
        robot.reset(task, 3)
        safety.reset()
        executed, changed, done = None, 0, False
        for _ in range(200):
            observation = robot.read()
            executed = rest_action(robot.spec, observation.state) if executed is None else executed
            wanted = expert.propose(observation)
            action = safety.limit(wanted, executed, observation.state)
            changed += np.abs(action - np.clip(wanted, -1, 1)).max() > 1e-3
            feedback = robot.write(action)
            safety.note(feedback.executed, executed)
            executed, done = feedback.executed, done or feedback.success
        assert done, task
        # a full reversal now and then takes two ticks instead of one
        assert changed < 20, f"{task}: {changed} of 200 actions were changed"
    robot.close()
