"""A job that a small ACT learns in a minute: a point goes to a mark, to its left or its right, that it sees."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import TrainingConfig
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from fleet.evaluation.evaluator import EvaluatorConfig
from hal.drivers.fake import FAKE_INSTRUCTIONS, FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from hal.registry import register
from policies.interface.policy import LearnedPolicy
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.control.config import GateConfig, LoopConfig
from wire.clock import Clock
from wire.errors import ConfigError
from wire.types import RobotSpec

TASKS = ("go-left", "go-right")
CONFIG = FakeConfig(tasks=TASKS, image_px=32, control_hz=20.0, camera_every_ticks=1)
NEAR_M = 0.05
MIDDLE = {"go-left": np.array([-0.2, 0.0, 0.4]), "go-right": np.array([0.2, 0.0, 0.4])}
"""float64[3], m"""


class TableRobot(FakeRobot):
    """The fake robot with marks that are reached from further off and scatter less: to see the side is enough."""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        super().__init__(config or CONFIG, clock)

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        self.goal = ((MIDDLE[task] + self.goal) / 2).astype(np.float32)
        self._frame = self._film()

    def write(self, action: np.ndarray) -> Feedback:
        feedback = super().write(action)
        return msgspec.structs.replace(feedback, success=self.distance_m() < NEAR_M)


register("table", TableRobot, FakeExpert)


def reach(seed: int = 0) -> Recipe:
    """No policy of its own: it is run with --policy."""
    return Recipe(
        name="reach",
        tasks=TASKS,
        instructions={task: FAKE_INSTRUCTIONS[task] for task in TASKS},
        robot="table",
        robot_config=CONFIG,
        unpaced_config=CONFIG,
        spec=TableRobot().spec,
        make_policy=_none,
        algorithm=HGDagger(),
        training=TrainingConfig(batch=8, learning_rate=3e-4, pretrain_steps=10, publish_every_s=2.0),
        demonstrations=0,
        chunking=ChunkingConfig(execute_ticks=4),
        loop=LoopConfig(max_ticks=60, gate=GateConfig(min_ticks=8)),
        evaluator=EvaluatorConfig(episodes=1, every_s=1000.0, final_episodes=1, max_ticks=20),
    )


def _none(spec: RobotSpec, seed: int) -> LearnedPolicy:
    raise ConfigError("this recipe has no policy of its own: give --policy.")


def reach_vla(seed: int = 0) -> Recipe:
    """The same with a tiny SmolVLA, which `up` builds from two demonstrations."""
    return replace(reach(seed), name="reach-vla", demonstrations=2, tiny="smolvla")


def one_side(seed: int = 0) -> Recipe:
    """Only the left, with a policy of our own: for demonstrations."""
    return replace(
        reach(seed),
        name="one-side",
        tasks=TASKS[:1],
        instructions={TASKS[0]: FAKE_INSTRUCTIONS[TASKS[0]]},
        make_policy=fake().make_policy,
        demonstrations=12,
    )
