"""`--set`: what can be set, how values are read, what is refused, and which processes hear of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloud_learner.buffer.sampling.target import StalenessBound
from cloud_learner.training.config import RateSchedule
from fleet.config.overrides import Overrides
from fleet.config.process_options import EdgeOptions, GatewayOptions, TrainerOptions
from fleet.config.recipes import fake, pixels, state
from fleet.config.settings import settings_of, with_settings
from fleet.launch.process_specs import ProcessSpecs
from tests.command_line import vla_fleet
from wire.errors import ConfigError, SpecMismatchError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("training.learning_rate=1e-4", 1e-4),
        ("training.batch=1e2", 100),
        ("training.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("training.schedule=cosine", RateSchedule.cosine),
        ("algorithm.adaptive_share=true", True),
        ("evaluator.episodes=7", 7),
        ("loop.max_ticks=33", 33),
        ("loop.gate.stall_ticks=5", 5),
        ("loop.episodes.reset_by_person=none", None),
        ("loop.episodes.reset_by_person=false", False),
        ("publisher.anchor_every=0", 0),
        ("cache_bytes=4e9", 4_000_000_000),
        ("retention.max_bytes=2e11", 2e11),
        ('staleness={"max_lag": 6}', StalenessBound(6)),
        ("delay=4", "4"),
        ('tasks=["go-up"]', ("go-up",)),
        ("robot_config.camera_every_ticks=4", 4),
    ],
)
def test_a_value_is_read_by_the_type_of_its_field(text: str, value: object) -> None:
    recipe = with_settings(fake(), [text])
    found: object = recipe
    for name in text.partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "training.learning_rate=fast",
            "training.learning_rate=fast: Expected `float`, got `str`. It is float, now 0.001",
        ),
        ("training.learning_rate=nan", "no number"),
        ("training.batch=1.5", "Expected `int`"),
        (
            "training.learning_rate=0",
            "--set training.learning_rate=0: training: learning_rate is 0.0; it must be positive",
        ),
        ("training.learning_rate=inf", "training: learning_rate is inf; it must be finite"),
        ("training.weight_decay=inf", "training: weight_decay is inf; it must be finite"),
        ("training.betas=[1.5, 0.9]", "training: betas are (1.5, 0.9); both must be in [0, 1)"),
        ("training.betas=[0.9, 1.0]", "both must be in [0, 1)"),
        ("training.betas=[-0.1, 0.9]", "both must be in [0, 1)"),
        ("training.publish_every_s=1e300", "training: publish_every_s is 1e+300; it must be at most"),
        ("checkpoint_every_s=inf", "checkpoint_every_s is inf; it must be from 0 to"),
        ("checkpoint_every_s=1e300", "checkpoint_every_s is 1e+300; it must be from 0 to"),
        ("checkpoint_every_s=-1", "checkpoint_every_s is -1.0; it must be from 0 to"),
        ("echo=inf", "recipe 'fake': echo is inf; it must be finite"),
        ("keep_checkpoints=0", "recipe 'fake': keep_checkpoints is 0; it must be 1 or more"),
        ("keep_checkpoints=-1", "keep_checkpoints is -1; it must be 1 or more"),
        ("algorithm.task_floor=5", "task mix: the floor 5.0"),
        ("algorithm.difficulty=-1", "task mix: difficulty -1.0"),
        ("validation=2", "recipe 'fake': validation is 2; it must be at least 0 and at most 1"),
        ("validation=1", "validation 1.0 below 1: something has to be trained on"),
        ("share=0", "share 0.0 must be above 0"),
        ("samples_per_insert=-2", "samples_per_insert is -2; it must be at least 0"),
        ("demonstrations=-1", "demonstrations is -1"),
        ("min_corrected_steps=-5", "min_corrected_steps is -5"),
        ("max_samples_per_insert=-1", "max_samples_per_insert is -1"),
        ("echo=-1", "echo is -1"),
        ("cache_bytes=-1", "cache_bytes is -1; it must be at least 1"),
        ("cache_workers=-3", "cache_workers is -3"),
        ("prefetch=-1", "prefetch is -1"),
        ("speed_limit=-2", "speed_limit is -2.0; it must be above 0 and at most 1"),
        ("delay=abc", "delay 'abc': give control ticks as `4`"),
        ('tasks=["a"]', "task 'a' has no instruction; there are "),
        ("loop.max_ticks=0", "LoopConfig: max_ticks is 0; give 1 or more"),
        ("loop.tail_ticks=-1", "LoopConfig: tail_ticks is -1; give 0 or more"),
        ("evaluator.every_s=-1", "every_s -1.0 and delay_ticks"),
        ("action_check.min_spread=-4", "action check: min_spread is -4.0"),
        ("training.precision=float16", "float32|bfloat16"),
        ("training.betas=[0.9]", "length 2"),
        ("training.learnin_rate=1", "Did you mean 'training.learning_rate'"),
        ("trainig.batch=1", "Did you mean 'training.batch'"),
        ("training=1", "it has fields of its own: batch, "),
        ("cache_bytes.x=1", "'cache_bytes' is 4294967296 and has no fields"),
        ("cache_bytes=none", "Expected `int`"),
        ("make_policy=os:system", "no setting 'make_policy'"),
        ("spec.control_hz=5", "no setting 'spec.control_hz'"),
        ("robot=metaworld", "no setting 'robot'"),
        ("evaluator.final_first_seed=3", "those of training and of demonstrations"),
        ("chunking.strategy=latest", "strategy 'latest' is not one"),
        ("training.batch", "say PATH=VALUE"),
        ("=3", "say PATH=VALUE"),
    ],
)
def test_what_cannot_be_set_is_refused_with_its_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_settings(fake(), [text])
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"--set {text}: ")


def test_a_drivers_configuration_may_not_make_it_another_robot() -> None:
    with pytest.raises(SpecMismatchError, match="as --set configures it"):
        with_settings(fake(), ["robot_config.control_hz=10"])


@pytest.mark.parametrize("recipe", [fake(), state(), pixels()], ids=lambda recipe: recipe.name)
def test_every_setting_takes_the_value_that_it_shows(recipe) -> None:
    found = settings_of(recipe)
    assert len({one.path for one in found}) == len(found) > 100
    assert with_settings(recipe, [f"{one.path}={one.text}" for one in found]) == recipe


def test_later_ones_win_and_a_whole_may_be_refined() -> None:
    recipe = with_settings(
        fake(), ["training.batch=3", 'staleness={"max_lag": 6}', "staleness.max_lag=2", "training.batch=4"]
    )
    assert (recipe.training.batch, recipe.staleness) == (4, StalenessBound(2))
    assert with_settings(recipe, ["staleness=none"]).staleness is None


def test_settings_win_over_what_a_policy_wants() -> None:
    plain = Overrides(policy="flow:small").applied(fake())
    tuned = Overrides(policy="flow:small", set_=["training.batch=5", "chunking.execute_ticks=2"]).applied(fake())
    assert plain.training.batch != 5
    assert tuned.training == replace(plain.training, batch=5)
    assert tuned.chunking.execute_ticks == 2
    with pytest.raises(ConfigError, match="there would be none left"):
        Overrides(policy="flow:small", set_=["chunking.execute_ticks=500"]).applied(fake()).make_policy(fake().spec, 0)


def test_all_processes_of_a_fleet_are_told() -> None:
    given = ["training.batch=3", "algorithm.draws=2"]
    specs = ProcessSpecs("fake", "tcp://127.0.0.1:1", 0, True, Overrides(set_=given))
    parts = {
        "gateway": specs.make_gateway("127.0.0.1", 1, "127.0.0.1", 2),
        "trainer": specs.make_trainer(),
        "evaluator": specs.make_evaluator(),
        "demonstrator": specs.make_demonstrator(3),
        "thinker": specs.make_thinker(),
        "robot-0": specs.make_edge("robot-0"),
    }
    for name, part in parts.items():
        told = [part.argv[n + 1] for n, word in enumerate(part.argv) if word == "--set"]
        # who is not told of the algorithm may have another one
        assert told == (given if name == "trainer" else given[:1]), name


def test_the_words_are_read_again_as_they_were() -> None:
    options = TrainerOptions(recipe="fake", overrides=Overrides(set_=["training.betas=[0.9, 0.95]"]))
    words = options.arguments()
    assert words[words.index("--set") + 1] == "training.betas=[0.9, 0.95]"
    assert "--set" not in GatewayOptions(recipe="fake").arguments()
    assert "--set" not in EdgeOptions(recipe="fake").arguments()


def test_the_command_lists_what_can_be_set() -> None:
    done = vla_fleet("recipes", "fake")
    assert done.returncode == 0
    assert "training.learning_rate=0.001  (float)" in done.stdout.splitlines()
    assert "training.schedule=constant  (constant|cosine)" in done.stdout.splitlines()
    assert vla_fleet("recipes", "fkae").returncode == 1


def test_a_command_refuses_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = vla_fleet("up", "--recipe", "fake", "--data", str(data), "--set", "training.bacth=3")
    assert done.returncode == 1
    assert "Did you mean 'training.batch'" in done.stderr
    assert not data.exists()


def test_what_is_not_told_of_a_policy_is_still_checked_by_up(tmp_path: Path) -> None:
    done = vla_fleet("up", "--recipe", "vla", "--data", str(tmp_path / "data"), "--set", "training.bacth=3")
    assert done.returncode == 1 and "Did you mean 'training.batch'" in done.stderr
