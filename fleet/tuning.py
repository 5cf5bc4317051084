"""What the command line may change in a recipe for one run of its robots: driver, strategy, speed, injected latency."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.config import Recipe
from hal.registry import make_robot, read_config
from robot_edge.delay import parse_delay
from robot_edge.schedule.choose import check_strategy
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

    def __post_init__(self) -> None:
        if self.strategy:
            check_strategy(self.strategy)
        if self.delay:
            parse_delay(self.delay)
        if self.speed_up < 0:
            raise ConfigError(f"speed-up {self.speed_up}: execute every q-th action with q of 1 or more.")

    def flags(self) -> list[str]:
        """The same as options of another `vla-fleet` command."""
        given = (
            ("--strategy", self.strategy),
            ("--delay", self.delay),
            ("--speed-up", str(self.speed_up or "")),
            ("--robot", self.robot),
            ("--robot-config", self.robot_config),
        )
        return [part for option, value in given if value for part in (option, value)]

    def applied(self, recipe: Recipe) -> Recipe:
        """`recipe` with what is given here. Raises `SpecMismatch` for a driver of another robot."""
        if self.robot or self.robot_config:
            recipe = self._driven(recipe)
        return replace(
            recipe,
            strategy=self.strategy or recipe.strategy,
            delay=self.delay or recipe.delay,
            speed_up=self.speed_up or recipe.speed_up,
        )

    def _driven(self, recipe: Recipe) -> Recipe:
        kind = self.robot or recipe.robot
        config = read_config(kind, read_json(self.robot_config)) if self.robot_config else None
        if config is None and kind == recipe.robot:
            config = recipe.robot_config
        recipe.spec.require(make_robot(kind, config).spec, f"robot '{kind}' for recipe '{recipe.name}'")
        return replace(recipe, robot=kind, robot_config=config)


def read_json(text: str) -> dict[str, Any]:
    """What --robot-config says, itself or in the file it names. Raises `ConfigError`."""
    place = ""
    if not text.lstrip().startswith(("{", "[", '"')):
        place = f" {text}:"
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ConfigError(f"--robot-config{place} {error.strerror}. Give JSON or a JSON file.") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--robot-config{place} not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"--robot-config{place} must be an object of the driver's fields, not a {type(found).__name__}."
        )
    return found
