"""Policies of which only a part learns, in a fleet: each process has its own seed, and versions reach all robots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from policies.conformance.check import example_observation
from policies.conformance.data import randomize_zero_init
from tests.policies.flow.vlm_directory import build
from wire.errors import WeightsError

LORA = {"lora": {"rank": 4}}


def tuned(policy: str, **config: Any) -> Recipe:
    return Overrides(policy=policy, policy_config=json.dumps(config)).applied(fake())


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "vlm", weights=False)


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("flow:small", {"training": {"freeze": ["slow.*"]}}),
        ("flow:small", {"training": LORA}),
        ("flow:small", {"training": LORA, "vlm_random": True}),
        ("tokens:fast", {"training": LORA}),
    ],
    ids=["freeze", "adapters", "vlm", "tokens"],
)
@pytest.mark.slow
def test_a_robot_takes_what_a_trainer_of_another_seed_learnt(policy: str, config: dict[str, Any], vlm: Path) -> None:
    if "vlm_random" in config:
        config = config | {"vlm": str(vlm)}
    recipe = tuned(policy, **config)
    trainer, robot = (recipe.make_policy(recipe.spec, seed) for seed in (0, 4321))
    randomize_zero_init(trainer)
    robot.load(trainer.save(), 1)
    observation = example_observation(recipe.spec, 0, next(iter(recipe.instructions.values())))
    trainer._seeds.manual_seed(5)  # type: ignore[attr-defined]
    robot._seeds.manual_seed(5)  # type: ignore[attr-defined]
    mine, its = (one.act(observation, one.think(observation), 0).actions for one in (trainer, robot))
    assert np.array_equal(mine, its)


@pytest.mark.parametrize("policy", ["flow:pixels", "tokens:fast"])
def test_a_robot_with_another_alpha_says_how_to_go_on(policy: str) -> None:
    recipes = [tuned(policy, training={"lora": {"rank": 4, "alpha": alpha}}) for alpha in (16, 64)]
    trainer, robot = (recipe.make_policy(recipe.spec, 0) for recipe in recipes)
    with pytest.raises(WeightsError, match=r"another alpha / rank.*`training` options"):
        robot.load(trainer.save(), 1)
    assert robot.version == 0


@pytest.mark.slow
def test_robots_apply_versions_of_which_a_part_is_frozen(tmp_path: Path) -> None:
    recipe = replace(tuned("flow:pixels", training={"freeze": ["slow.*"]}), demonstrations=2)
    fleet = InProcessFleet(tmp_path, recipe, seed=3)  # the trainer's; the robots' are 3000 and 3001
    try:
        fleet.turn(300)
        newest = fleet.ledger.newest_version()
        assert newest is not None and newest.version.number >= 2
        applied = {(row.robot, row.version) for row in fleet.ledger.applied()}
        assert {("robot-0", 1), ("robot-1", 1)} <= applied
        assert max(version for _, version in applied) >= 2
    finally:
        fleet.close()
