"""A Gymnasium environment in a fleet: its configuration, somebody who can do the task, one recipe.

    PYTHONPATH=docs/examples vla-fleet up --recipe own_env:reach --robots 2 --minutes 2

For an environment of your own, write its `GymConfig` in the place of the preset.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import state
from hal.drivers.gym.presets import fetch, fetch_robot
from hal.drivers.gym.robot import GymRobot
from hal.registry import register
from robot_edge.control.config import LoopConfig
from wire.types import Observation

CONFIG = fetch("reach")
"""FetchReach-v4: 13 numbers, 25 Hz"""
_STEP_M = 0.05


class StraightGuide:
    """Moves the hand straight to the mark: what a person would do, or a controller that knows more than the policy."""

    def __init__(self, robot: GymRobot) -> None:
        names = [dimension.name for dimension in robot.spec.state]
        self._hand, self._goal = ([names.index(f"{what}_{axis}") for axis in "xyz"] for what in ("hand", "goal"))
        self._way_m = np.full(3, np.inf)

    def propose(self, observation: Observation) -> np.ndarray:
        self._way_m = observation.state[self._goal] - observation.state[self._hand]
        return np.append(np.clip(self._way_m / _STEP_M, -1, 1), 0.0).astype(np.float32)

    def progress(self) -> float:
        return float(np.linalg.norm(self._way_m))


register("fetch-reach", fetch_robot, StraightGuide)


def reach(seed: int = 0) -> Recipe:
    """The `state` recipe with another robot: learn to bring Fetch's hand to a mark."""
    tasks = {task.name: task.instruction for task in CONFIG.known_tasks()}
    return replace(
        state(seed),
        tasks=tuple(tasks),
        instructions=tasks,
        robot="fetch-reach",
        robot_config=CONFIG,
        unpaced_config=CONFIG,
        spec=GymRobot(CONFIG).spec,
        # the environment itself gives up after 50 steps
        loop=LoopConfig(max_ticks=50),
        evaluator=replace(state(seed).evaluator, max_ticks=50),
    )
