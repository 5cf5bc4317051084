"""How far behind a rollout may arrive, from a recipe or an option to the trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloud_learner.buffer.sampling.target import StalenessBound
from fleet.config.overrides import Overrides, read_staleness
from fleet.config.process_options import UpOptions
from fleet.config.recipes import get_recipe
from fleet.launch.learning import dataset_config
from fleet.launch.process_specs import ProcessSpecs
from wire.errors import ConfigError

USUAL = StalenessBound(9)


def test_it_is_a_lag_or_a_lag_and_a_weight_or_none() -> None:
    assert get_recipe("fake").staleness is None
    assert read_staleness("", USUAL) is USUAL
    assert read_staleness("none", USUAL) is None
    assert read_staleness("0", USUAL) == StalenessBound(0)
    assert read_staleness("6:0.25", None) == StalenessBound(6, 0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("six", "--max-lag six: say S"),
        ("6:much", "--max-lag 6:much: say S"),
        ("-1", "must not be negative"),
        ("6:2", "from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UpOptions(max_lag=text).check()


def test_up_hands_it_to_the_trainer_and_the_trainer_to_its_dataset() -> None:
    parts = ProcessSpecs("fake", "tcp://127.0.0.1:1", 0, True, Overrides())
    words = parts.make_trainer("6:0.25").argv
    assert words[words.index("--max-lag") + 1] == "6:0.25"
    assert "--max-lag" not in parts.make_trainer().argv
    recipe = replace(get_recipe("fake"), staleness=USUAL)
    policy = recipe.make_policy(recipe.spec, 0)
    assert dataset_config(recipe, policy, 0).target.staleness == USUAL
