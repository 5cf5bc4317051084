"""What the members of a population differ by: `--tune PATH=LOW..HIGH` and `--tune PATH=VALUE,VALUE,...`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet.config.recipe import Recipe
from fleet.config.settings import value_text, with_settings
from wire.errors import ConfigError

_TUNABLE = ("training.", "algorithm.")


@dataclass(frozen=True, slots=True)
class TunedRange:
    """A number."""

    low: float
    high: float
    whole: bool
    """1, 2, 3 and nothing between"""

    @property
    def logarithmic(self) -> bool:
        """Whether a tenth is as far as ten times."""
        return self.low > 0

    def within(self, value: float) -> float:
        """The nearest in the range."""
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else value


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """One of several values, in their order."""

    values: tuple[str, ...]
    """as --set takes them"""


TunedSetting = TunedRange | TunedChoice


def read_tuned(recipe: Recipe, given: Sequence[str]) -> dict[str, TunedSetting]:
    """What each of `given` says of a field of `recipe`, by its path.

    Raises `ConfigError` that names it: for an unknown path, for values that the field cannot have, and for a field that
    is none of learning.
    """
    found: dict[str, TunedSetting] = {}
    for text in given:
        path, equals, values = (part.strip() for part in text.partition("="))
        what = f"--tune {text}"
        if not (path and equals and values):
            raise ConfigError(f"{what}: say PATH=LOW..HIGH or PATH=VALUE,VALUE,... such as {_EXAMPLE}.")
        if path in found:
            raise ConfigError(f"{what}: {path} is tuned already; say it once.")
        low, dots, high = values.partition("..")
        one = _range(recipe, path, low, high, what) if dots else _choice(recipe, path, values, what)
        if not path.startswith(_TUNABLE):
            raise ConfigError(
                f"{what}: only fields of training and algorithm can be tuned; set the others with --set, for all alike."
            )
        found[path] = one
    return found


_EXAMPLE = "training.learning_rate=1e-4..1e-2"


def _range(recipe: Recipe, path: str, low: str, high: str, what: str) -> TunedRange:
    ends = [_value(recipe, path, end) for end in (low, high)]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in ends):
        raise ConfigError(f"{what}: {path} is no number; name the values, with commas between.")
    if not ends[0] < ends[1]:
        raise ConfigError(f"{what}: {low} must be below {high}.")
    return TunedRange(ends[0], ends[1], whole=isinstance(ends[0], int))


def _choice(recipe: Recipe, path: str, values: str, what: str) -> TunedChoice:
    try:
        texts = [value_text(one) for one in json.loads(f"[{values}]")]
    except ValueError:
        texts = [one.strip() for one in values.split(",")]
    for text in texts:
        _value(recipe, path, text)
    if len(set(texts)) < 2:
        raise ConfigError(f"{what}: give two values or more, or a range such as {_EXAMPLE}.")
    return TunedChoice(tuple(dict.fromkeys(texts)))


def _value(recipe: Recipe, path: str, text: str) -> Any:
    value: Any = with_settings(recipe, [f"{path}={text}"], "--tune")
    for name in path.split("."):
        value = getattr(value, name)
    return value
