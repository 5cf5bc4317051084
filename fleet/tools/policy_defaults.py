"""A recipe with another policy: what of its pace and of its algorithm follows from the policy that is put in."""

from __future__ import annotations

from dataclasses import replace

from fleet.config.recipe import Recipe
from policies.interface.policy import LearnedPolicy
from policies.interface.registry import PolicyChoice, PolicyDefaults, defaults, make_policy
from wire.errors import ConfigError
from wire.types import RobotSpec

_OF_THE_ALGORITHM = (
    "batch",
    "ticks_per_frame",
    "learning_rate",
    "weight_decay",
    "gradient_clip",
    "ema_decay",
    "shift_px",
    "pretrain_steps",
    "publish_every_s",
)


def with_policy(recipe: Recipe, choice: PolicyChoice) -> Recipe:
    """`recipe` with the policy of `choice`, its algorithm and pace as `PolicyDefaults` wants them.

    Chunks that are too short for the recipe's `execute_ticks` are replaced when they are half executed. Loads no
    network. Raises `ConfigError` for a policy that cannot be used with the recipe's robot, as far as its files tell.
    """
    wanted = defaults(choice, recipe.spec)
    changed = {name: value for name in _OF_THE_ALGORITHM if (value := getattr(wanted, name)) is not None}
    slow = recipe.slow
    if wanted.think_every_s is not None:
        slow = replace(slow, every_s=wanted.think_every_s, max_age_s=max(slow.max_age_s, 4 * wanted.think_every_s))
    ticks = _execute_ticks(recipe, choice, wanted)

    def make(spec: RobotSpec, seed: int) -> LearnedPolicy:
        policy = make_policy(choice, spec, seed)
        _require_horizon(policy.horizon, ticks, recipe, choice)
        return policy

    return replace(
        recipe,
        make_policy=make,
        algorithm=replace(recipe.algorithm, **changed),
        slow=slow,
        chunking=replace(recipe.chunking, execute_ticks=ticks),
        demonstrations=recipe.demonstrations if wanted.demonstrations is None else wanted.demonstrations,
    )


def _execute_ticks(recipe: Recipe, choice: PolicyChoice, wanted: PolicyDefaults) -> int:
    if wanted.horizon is None:
        return recipe.chunking.execute_ticks
    ticks = wanted.horizon // recipe.chunking.speed_up
    if ticks < 2:
        raise ConfigError(_too_short(wanted.horizon, 1, recipe, choice))
    return recipe.chunking.execute_ticks if recipe.chunking.execute_ticks < ticks else ticks // 2


def _require_horizon(horizon: int, ticks: int, recipe: Recipe, choice: PolicyChoice) -> None:
    if horizon // recipe.chunking.speed_up <= ticks:
        raise ConfigError(_too_short(horizon, ticks, recipe, choice))


def _too_short(horizon: int, ticks: int, recipe: Recipe, choice: PolicyChoice) -> str:
    faster = f" at speed-up {recipe.chunking.speed_up}" if recipe.chunking.speed_up > 1 else ""
    return (
        f"policy '{choice}' gives {horizon} actions at a time{faster}, and recipe '{recipe.name}' asks for the next "
        f"chunk after {ticks} ticks: there would be none left while it is made. Take a policy with longer chunks, or a "
        "recipe with fewer execute_ticks."
    )
