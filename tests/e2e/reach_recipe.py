"""A job that a small ACT learns in a minute: a point goes to a mark on a table that it sees from above."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from cloud_learner.algorithms.hg_dagger import HGDagger
from fleet.config import Recipe
from hal.fake import FakeConfig, FakeExpert, FakeRobot
from hal.registry import register
from hal.robot import Feedback
from policies.base import LearnedPolicy
from robot_edge.evaluator import EvaluatorConfig
from robot_edge.gate import GateConfig
from robot_edge.loop import LoopConfig
from wire.clock import Clock
from wire.errors import ConfigError
from wire.types import RobotSpec

CONFIG = FakeConfig(tasks=("go-left",), image_px=32, control_hz=20.0, camera_every_ticks=1)
FIELD_M, HEIGHT_M, NEAR_M = 0.15, 0.25, 0.04


class TableRobot(FakeRobot):
    """The fake robot with one mark anywhere in a square, large to see and reached from further away."""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        super().__init__(config or CONFIG, clock)

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        place = np.random.default_rng((seed, 1)).uniform(-FIELD_M, FIELD_M, 2)
        self.goal = np.append(place, HEIGHT_M).astype(np.float32)
        self._frame = self._film()

    def write(self, action: np.ndarray) -> Feedback:
        feedback = super().write(action)
        return msgspec.structs.replace(feedback, success=self.distance_m() < NEAR_M)


register("table", TableRobot, FakeExpert)


def reach(seed: int = 0) -> Recipe:
    """No policy of its own: it is run with --policy."""
    return Recipe(
        name="reach",
        summary="go to a mark on the table",
        tasks=CONFIG.tasks,
        instructions={"go-left": "go to the left"},
        robot="table",
        robot_config=CONFIG,
        unpaced_config=CONFIG,
        spec=TableRobot().spec,
        make_policy=_none,
        algorithm=HGDagger(batch=16, learning_rate=3e-4, publish_every_s=3.0),
        demonstrations=0,
        replan_ticks=4,
        loop=LoopConfig(max_ticks=60),
        gate=GateConfig(min_ticks=8),
        evaluator=EvaluatorConfig(episodes=4, every_s=20.0, final_episodes=40, max_ticks=60),
    )


def _none(spec: RobotSpec, seed: int) -> LearnedPolicy:
    raise ConfigError("this recipe has no policy of its own: give --policy.")


def reach_vla(seed: int = 0) -> Recipe:
    """The same with a tiny SmolVLA, which `up` builds from two demonstrations."""
    return replace(reach(seed), name="reach-vla", demonstrations=2, tiny="smolvla")
