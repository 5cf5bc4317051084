"""The shipped job is fast and slow: it thinks a few times a second, acts more often, and was trained for the ages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.recipes import get_recipe
from robot_edge.chunking.config import Strategy
from robot_edge.chunking.factory import resolve
from robot_edge.chunking.strategies.future_state import FutureStateScheduler


def test_the_pixels_recipe_is_trained_for_what_it_runs() -> None:
    recipe = get_recipe("pixels")
    policy = recipe.make_policy(recipe.spec, 0)
    hz = recipe.spec.control_hz
    assert 1.0 <= 1 / recipe.slow.every_s <= 5.0
    assert hz / recipe.chunking.execute_ticks > 1 / recipe.slow.every_s, "the fast path is the faster one"
    frame_ticks = hz / recipe.spec.cameras[0].rate_hz
    oldest = recipe.slow.every_s * hz + frame_ticks + recipe.evaluator.delay_ticks
    assert policy.trained.trained_max_delay >= oldest
    assert resolve(recipe.chunking.strategy, policy.trained, recipe.motion) is Strategy.future_state
    assert recipe.loop.safety.velocity and recipe.loop.safety.acceleration and recipe.loop.safety.workspace


@pytest.mark.slow
def test_a_robot_thinks_at_its_own_pace_and_acts_between(tmp_path: Path) -> None:
    fake = get_recipe("fake")
    recipe = replace(fake, slow=replace(fake.slow, every_s=0.2), chunking=replace(fake.chunking, execute_ticks=4))
    rehearsal = InProcessFleet(tmp_path / "fleet", recipe, robots=1)
    robot = rehearsal.robots[0]
    policy = robot.inference._swap.active
    think, act, counted = policy.think, policy.act, {"think": 0, "act": 0}

    def thinking(observation):
        counted["think"] += 1
        return think(observation)

    def acting(*arguments):
        counted["act"] += 1
        return act(*arguments)

    policy.think, policy.act = thinking, acting
    rehearsal.turn(100, 1.0)
    counted.update(think=0, act=0)
    episodes = robot.loop.tracker.ended
    rehearsal.turn(800, 0.02)
    seconds = 800 / recipe.spec.control_hz
    # each episode begins with a thought of its own
    assert counted["think"] <= seconds / 0.2 + (robot.loop.tracker.ended - episodes) + 1
    assert counted["act"] >= 2 * counted["think"]
    assert isinstance(robot.loop.chunks.scheduler, FutureStateScheduler)
    assert robot.loop.tracker.starved == 0
    rehearsal.close()


@pytest.mark.parametrize("name", ["state", "fake"])
def test_every_recipe_says_what_its_strategy_becomes(name: str) -> None:
    recipe = get_recipe(name)
    trained = recipe.make_policy(recipe.spec, 0).trained
    assert resolve(recipe.chunking.strategy, trained, recipe.motion) is not Strategy.auto
