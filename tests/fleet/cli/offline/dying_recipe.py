"""The fake recipe, whose second rank is killed whenever it has begun."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch.distributed as dist

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from policies.interface.policy import LearnedPolicy
from wire.types import RobotSpec


def dies_as_a_rank(seed: int = 0) -> Recipe:
    recipe = fake(seed)

    def make_policy(spec: RobotSpec, seed: int) -> LearnedPolicy:
        if dist.is_initialized() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return recipe.make_policy(spec, seed)

    return replace(recipe, make_policy=make_policy)
