"""The real recipes with as little training and measuring as will do: what robots and processes do stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fleet.config import recipes
from fleet.config.recipe import Recipe, share_policy
from policies.interface.policy import Batch, LearnedPolicy
from wire.types import RobotSpec

REST_S = 0.1


def unhurried(make: Callable[[RobotSpec, int], LearnedPolicy]) -> Callable[[RobotSpec, int], LearnedPolicy]:
    """The same policy, which rests before each gradient step: a trainer leaves the cores to other tests."""

    def made(spec: RobotSpec, seed: int) -> LearnedPolicy:
        policy = make(spec, seed)
        loss = policy.loss

        def rested(batch: Batch) -> object:
            time.sleep(REST_S)
            return loss(batch)

        policy.loss = rested
        return policy

    return made


def small(recipe: Recipe) -> Recipe:
    """The first version after 10 gradient steps, one each second, and a moment of evaluation."""
    return replace(
        recipe,
        make_policy=unhurried(recipe.make_policy),
        demonstrations=2,
        training=replace(recipe.training, pretrain_steps=10, publish_every_s=1.0),
        evaluator=replace(recipe.evaluator, episodes=1, every_s=1000.0, final_episodes=1, max_ticks=20),
        checkpoint_every_s=2.0,
    )


def state(seed: int = 0) -> Recipe:
    return small(recipes.state(seed))


def fake(seed: int = 0) -> Recipe:
    return small(recipes.fake(seed))


def shapes(seed: int = 0) -> Recipe:
    job = recipes.shapes(seed)
    return share_policy("shapes", {name: small(job.members[name]) for name in ("metaworld", "fetch")})


def slider(seed: int = 0) -> Recipe:
    """The documentation's example, which must lie on the path."""
    import own_robot

    return small(own_robot.slider(seed))
