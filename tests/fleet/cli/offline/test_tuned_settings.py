"""`--tune`: which fields, which values, and what is said of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloud_learner.training.config import PopulationConfig
from fleet.cli.offline.tuned_settings import TunedChoice, TunedRange, read_tuned
from fleet.config.recipes import fake, get_recipe
from wire.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("training.learning_rate=1e-5..1e-3", TunedRange(1e-5, 1e-3, whole=False)),
        ("training.weight_decay=0..0.1", TunedRange(0.0, 0.1, whole=False)),
        ("training.batch=8..64", TunedRange(8, 64, whole=True)),
        ("algorithm.recent_share=0,0.1,0.3", TunedChoice(("0", "0.1", "0.3"))),
        ("training.schedule=constant,cosine", TunedChoice(("constant", "cosine"))),
        ("training.betas=[0.9,0.95],[0.9,0.999]", TunedChoice(("[0.9,0.95]", "[0.9,0.999]"))),
        ("algorithm.adaptive_share=true,false", TunedChoice(("true", "false"))),
    ],
)
def test_a_range_or_values(text: str, found: object) -> None:
    assert read_tuned(fake(), [text]) == {text.partition("=")[0]: found}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training.learning_rat=1e-5..1e-3", "Did you mean 'training.learning_rate'?"),
        ("training.learning_rate=low..high", "--tune training.learning_rate=low: Expected `float`"),
        ("training.learning_rate=1e-3..1e-5", "1e-3 must be below 1e-5"),
        ("training.ema_decay=0.9..1", "it must be in [0, 1)"),
        ("training.batch=1.5..4", "Expected `int`"),
        ("training.schedule=constant..cosine", "training.schedule is no number; name the values"),
        ("training.schedule=cosine,cosine", "give two values or more"),
        ("training.learning_rate=1e-4", "give two values or more, or a range such as"),
        ("training.learning_rate", "say PATH=LOW..HIGH or PATH=VALUE,VALUE,..."),
        ("validation=0.1..0.3", "only fields of training and algorithm can be tuned"),
    ],
)
def test_what_cannot_be_tuned_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_tuned(fake(), [text])
    assert f"--tune {text.partition('=')[0]}" in str(error.value) and said in str(error.value)


def test_a_field_is_tuned_once() -> None:
    with pytest.raises(ConfigError, match="tuned already"):
        read_tuned(fake(), ["training.batch=8..64", "training.batch=4,8"])


def test_a_changed_number_stays_in_its_range() -> None:
    assert [TunedRange(0.1, 1.0, whole=False).within(value) for value in (0.05, 0.3, 1.2)] == [0.1, 0.3, 1.0]
    assert TunedRange(8, 64, whole=True).within(9.6) == 10


def test_the_recipe_that_comes_with_a_population_can_be_tuned_as_it_says() -> None:
    recipe = get_recipe("tuned")
    assert recipe.population.members == 4 and recipe.validation > 0
    assert set(read_tuned(recipe, recipe.population.tune)) == {
        "training.learning_rate",
        "training.weight_decay",
        "algorithm.recent_share",
    }


@pytest.mark.parametrize("changes", [{"members": 1}, {"members": -1}, {"every": -1}])
def test_a_population_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="population: "):
        replace(PopulationConfig(), **changes)
