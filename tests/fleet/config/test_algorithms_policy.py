"""A recipe's own policy is made as its algorithm wants it, in every process of the fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cloud_learner.algorithms.recap import Recap
from cloud_learner.algorithms.thrifty_dagger import ThriftyDagger
from fleet.cli.__main__ import app
from fleet.config.data_directory import RunIdentity
from fleet.config.overrides import Overrides
from fleet.config.process_options import UpOptions
from fleet.config.recipe import NamedPolicy, Recipe
from fleet.config.recipes import fake, pixels, shapes, state
from fleet.launch.process_specs import ProcessSpecs
from fleet.launch.up import Up
from policies.interface.registry import PolicyChoice
from wire.errors import ConfigError

RECAP = Overrides(algorithm="recap", set_=["algorithm.positive_share=0.4"])


@pytest.mark.parametrize("recipe", [state(), pixels(), fake()], ids=lambda recipe: recipe.name)
def test_it_is_the_same_but_for_what_the_algorithm_asks(recipe: Recipe) -> None:
    found = RECAP.applied(recipe)
    own = recipe.make_policy(recipe.spec, 0).config
    assert found.make_policy(found.spec, 0).config == msgspec.structs.replace(own, advantage=True) != own
    assert found.algorithm == Recap(positive_share=0.4)
    assert replace(found, make_policy=recipe.make_policy, algorithm=recipe.algorithm) == recipe
    assert found.algorithm.make(found.make_policy(found.spec, 0)).networks.keys() == {"policy", "value"}


@pytest.mark.parametrize("recipe", [state(), pixels(), fake()], ids=lambda recipe: recipe.name)
def test_it_becomes_one_of_the_kind_that_the_algorithm_trains(recipe: Recipe) -> None:
    overrides = Overrides(algorithm="rlpd", set_=["algorithm.critics=3"])
    own, found = recipe.make_policy(recipe.spec, 0), overrides.applied(recipe)
    assert overrides.with_needs_of(recipe).policy == f"gaussian:{recipe.make_policy.choice.name_or_path}"
    assert replace(found, make_policy=recipe.make_policy, algorithm=recipe.algorithm) == recipe
    made = found.make_policy(found.spec, 0)
    assert made.kind == "gaussian" and made.max_offset == own.max_offset and made.config.cameras == own.config.cameras
    assert found.algorithm.make(made).networks.keys() == {"policy", "critic", "temperature"}
    chosen = replace(overrides, policy="flow:small")
    assert chosen.with_needs_of(recipe) is chosen


def test_every_process_that_acts_is_told_and_the_directory_knows(tmp_path: Path) -> None:
    up = Up(UpOptions(recipe="state", data=tmp_path / "d", port=0, web_port=0, overrides=RECAP))
    specs = ProcessSpecs("state", "tcp://127.0.0.1:1", 0, True, up.overrides)
    parts = [specs.make_edge("robot-0"), specs.make_evaluator(), specs.make_thinker(), specs.make_trainer()]
    for part in parts:
        told = dict(zip(part.argv, part.argv[1:], strict=False))
        assert (told["--policy"], json.loads(told["--policy-config"])) == ("flow:state", {"advantage": True}), part.name
        assert ("--algorithm" in told) == (part.name == "trainer")
    edge = Overrides(policy="flow:state", policy_config='{"advantage": true}').applied(state())
    trainer = up.overrides.applied(state())
    edge.make_policy(edge.spec, 1).load(trainer.make_policy(trainer.spec, 2).save(), 1)
    choice = RunIdentity.of(up.recipe, 0, up.overrides.choice()).policy
    assert choice == PolicyChoice("flow", "state", {"advantage": True})


def test_what_a_recipe_is_set_to_for_it_reaches_every_process_and_yields_to_what_is_said() -> None:
    asked = Overrides(algorithm="thrifty-dagger")
    gate = asked.applied(state()).loop.gate
    assert (gate.most_share, gate.trust) == (0.1, 0.8) and state().loop.gate.most_share == 1
    told = asked.with_needs_of(state())
    assert told.with_needs_of(state()) == told
    edge = ProcessSpecs("state", "tcp://127.0.0.1:1", 0, True, told).make_edge("robot-0")
    given = {word for option, word in zip(edge.argv, edge.argv[1:], strict=False) if option == "--set"}
    assert given == set(ThriftyDagger.settings)
    other = Overrides(algorithm="thrifty-dagger", set_=["loop.gate.most_share=0.3"], policy="flow:small")
    other = replace(other, policy_config='{"outlook": 8}')
    assert other.applied(state()).loop.gate == replace(gate, most_share=0.3)


def test_what_is_chosen_stays_and_other_algorithms_ask_for_nothing() -> None:
    chosen = Overrides(algorithm="recap", policy="flow:small", policy_config='{"advantage": true, "guidance": 1.5}')
    for overrides in (chosen, Overrides(), Overrides(algorithm="hg-dagger")):
        assert overrides.with_needs_of(state()) is overrides
    assert chosen.applied(state()).make_policy(state().spec, 0).config.guidance == 1.5
    made_so = NamedPolicy(PolicyChoice("flow", "state", {"advantage": True, "guidance": 2.0}))
    own = replace(state(), algorithm=Recap(), make_policy=made_so)
    assert Overrides().with_needs_of(own) == Overrides() and Overrides().applied(own).make_policy is made_so
    assert Overrides().with_needs_of(replace(own, make_policy=state().make_policy)).policy == "flow:state"


def test_batches_that_an_algorithm_cannot_learn_from_are_refused_before_anything_starts() -> None:
    words = ["policy", "try", "--recipe", "pixels", "--algorithm", "lwd"]
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, ConfigError) and "set training.ticks_per_frame=1" in str(found.exception)
    assert CliRunner().invoke(app, [*words, "--set", "training.ticks_per_frame=1"]).exit_code == 0


@pytest.mark.parametrize("overrides", [{"algorithm": "recap"}, {"algorithm": "recap", "policy": "flow:small"}])
def test_a_policy_that_nobody_made_so_is_refused(overrides: dict[str, str]) -> None:
    recipe = state() if "policy" in overrides else shapes().as_member("metaworld")
    found = Overrides(**overrides).applied(recipe)
    with pytest.raises(ConfigError, match=r"'recap' needs a policy that is told .*\"advantage\": true"):
        found.algorithm.make(found.make_policy(found.spec, 0))
