"""The recipe `so101` with a network and a training that take seconds: all else is what a bench runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.config import so101
from fleet.config.recipe import Recipe
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.flow.policy import FlowPolicy


PATIENT = {"plugins": ["tests.hal.drivers.lerobot.patient_servos"]}
"""simulated servos share their processor with everything else"""


def bench(seed: int = 0, config: Path | None = None) -> Recipe:
    recipe = so101.so101(seed, config)
    training = replace(recipe.training, batch=8, ticks_per_frame=1, pretrain_steps=10, publish_every_s=2.0)
    arm, leader = recipe.robot_config, recipe.teleoperator
    assert leader is not None
    return replace(
        recipe,
        make_policy=_tiny,
        training=training,
        checkpoint_every_s=2.0,
        robot_config=replace(arm, robot_config=arm.robot_config | PATIENT),
        teleoperator=replace(leader, config=leader.config | PATIENT),
    )


def _tiny(spec: RobotSpec, seed: int) -> FlowPolicy:
    from policies.flow.config import Conv
    from policies.flow.factory import pixels_network
    from policies.flow.policy import FlowPolicy

    return FlowPolicy(spec, pixels_network(spec, stem=(Conv(8, 4, 4), Conv(16, 3, 2)), width=32), seed)
