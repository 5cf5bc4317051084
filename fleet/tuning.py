"""What the command line may change in a recipe for one run of its robots: strategy, speed and injected latency."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.config import Recipe
from robot_edge.delay import parse_delay
from robot_edge.schedule.choose import check_strategy
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tuning:
    """'' and 0 leave what the recipe says. Raises `ConfigError` for what cannot be understood."""

    strategy: str = ""
    delay: str = ""
    speed_up: int = 0

    def __post_init__(self) -> None:
        if self.strategy:
            check_strategy(self.strategy)
        if self.delay:
            parse_delay(self.delay)
        if self.speed_up < 0:
            raise ConfigError(f"speed-up {self.speed_up}: execute every q-th action with q of 1 or more.")

    def flags(self) -> list[str]:
        """The same as options of another `vla-fleet` command."""
        given = (("--strategy", self.strategy), ("--delay", self.delay), ("--speed-up", str(self.speed_up or "")))
        return [part for option, value in given if value for part in (option, value)]

    def applied(self, recipe: Recipe) -> Recipe:
        """`recipe` with what is given here."""
        return replace(
            recipe,
            strategy=self.strategy or recipe.strategy,
            delay=self.delay or recipe.delay,
            speed_up=self.speed_up or recipe.speed_up,
        )
