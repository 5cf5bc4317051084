"""The real recipes with as little training and measuring as will do: what robots and processes do stays the same."""

from __future__ import annotations

from dataclasses import replace

from fleet import recipes
from fleet.config import Recipe


def small(recipe: Recipe) -> Recipe:
    """The first version after 20 gradient steps, one each second, and a moment of evaluation."""
    return replace(
        recipe,
        demonstrations=2,
        algorithm=replace(recipe.algorithm, pretrain_steps=20, publish_every_s=1.0),
        evaluator=replace(recipe.evaluator, episodes=1, every_s=1000.0, final_episodes=1, max_ticks=20),
        checkpoint_every_s=2.0,
    )


def state(seed: int = 0) -> Recipe:
    return small(recipes.state(seed))


def fake(seed: int = 0) -> Recipe:
    return small(recipes.fake(seed))


def slider(seed: int = 0) -> Recipe:
    """The documentation's example, which must lie on the path."""
    import own_robot

    return small(own_robot.slider(seed))
