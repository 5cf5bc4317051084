"""What the command line may change in a recipe for one run: policy, driver, strategy, speed, injected latency."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.config.recipe import Recipe
from fleet.evaluation.injected_delay import parse_delay
from fleet.tools.policy_defaults import with_policy
from hal.registry import make_robot, read_config
from policies.interface.registry import PolicyChoice, parse_policy, read_object
from robot_edge.chunking.config import check_strategy
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tuning:
    """'' and 0 leave what the recipe says. Raises `ConfigError` for what cannot be understood."""

    strategy: str = ""
    delay: str = ""
    speed_up: int = 0
    robot: str = ""
    """another driver for the same robot: its spec must be the recipe's"""
    robot_config: str = ""
    """that driver's configuration: JSON, or a JSON file"""
    policy: str = ""
    """another policy for it, KIND:PLACE"""
    policy_config: str = ""
    """that policy's configuration: JSON, or a JSON file"""

    def __post_init__(self) -> None:
        if self.strategy:
            check_strategy(self.strategy)
        if self.delay:
            parse_delay(self.delay)
        if self.speed_up < 0:
            raise ConfigError(f"speed-up {self.speed_up}: execute every q-th action with q of 1 or more.")
        if self.policy_config and not self.policy:
            raise ConfigError("--policy-config needs --policy KIND:PLACE, which it configures.")

    def flags(self) -> list[str]:
        """The same as options of another `vla-fleet` command."""
        given = (
            ("--strategy", self.strategy),
            ("--delay", self.delay),
            ("--speed-up", str(self.speed_up or "")),
            ("--robot", self.robot),
            ("--robot-config", self.robot_config),
        )
        return [part for option, value in given if value for part in (option, value)] + self.policy_flags()

    def policy_flags(self) -> list[str]:
        """Those of the policy alone, which mean the same in every working directory."""
        choice = self.choice()
        if choice is None:
            return []
        config = ["--policy-config", json.dumps(choice.config)] if choice.config else []
        return ["--policy", str(choice), *config]

    def choice(self) -> PolicyChoice | None:
        """The policy that was asked for, its place absolute. Raises `ConfigError`."""
        if not self.policy:
            return None
        config = json.dumps(read_json(self.policy_config, "--policy-config")) if self.policy_config else ""
        return parse_policy(self.policy, config)

    def applied(self, recipe: Recipe) -> Recipe:
        """`recipe` with what is given here.

        Raises `SpecMismatchError` for a driver of another robot, `ConfigError` for a policy that cannot be used with
        it.
        """
        if self.robot or self.robot_config:
            recipe = self._driven(recipe)
        chunking = recipe.chunking
        chunking = replace(
            chunking, strategy=self.strategy or chunking.strategy, speed_up=self.speed_up or chunking.speed_up
        )
        recipe = replace(recipe, chunking=chunking, delay=self.delay or recipe.delay)
        choice = self.choice()
        if choice is not None:
            return with_policy(recipe, choice)
        if recipe.tiny:
            recipe.make_policy(recipe.spec, 0)
        return recipe

    def _driven(self, recipe: Recipe) -> Recipe:
        kind = self.robot or recipe.robot
        config = read_config(kind, read_json(self.robot_config)) if self.robot_config else None
        if config is None and kind == recipe.robot:
            config = recipe.robot_config
        recipe.spec.require(make_robot(kind, config).spec, f"robot '{kind}' for recipe '{recipe.name}'")
        return replace(recipe, robot=kind, robot_config=config)


def read_json(text: str, option: str = "--robot-config") -> dict[str, Any]:
    """What `option` says, itself or in the file it names. Raises `ConfigError`."""
    place = ""
    if not text.lstrip().startswith(("{", "[", '"')):
        place = f" {text}:"
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ConfigError(f"{option}{place} {error.strerror}. Give JSON or a JSON file.") from error
    return read_object(text, f"{option}{place}".rstrip(":"))
