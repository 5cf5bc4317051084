"""A training run whose weights are kept as they would be published, in a process of its own.

python -m benchmarks.weights.training JSON      (writes 0.safetensors, 1.safetensors, ... and prints one line of JSON)
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common.in_process_fleet import InProcessFleet, success
from benchmarks.policies.models import write_checkpoint
from cloud_learner.training.status import TrainerPhase
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe

HELD_OUT = 3_000_000


class TrainingRun(msgspec.Struct, frozen=True):
    """What is trained."""

    name: str
    recipe: str
    place: str
    """directory for the files"""
    versions: int
    steps: int
    """gradient steps between two of them"""
    size: str = ""
    """of `benchmarks.policies.models.KINDS`; "": the recipe's own policy"""
    config: dict[str, Any] = {}
    """of that policy"""
    learning_rate: float = 0.0
    """0: the recipe's"""
    batch: int = 0
    """0: the recipe's"""
    first_steps: int = 0
    """gradient steps before the first of them; 0: the recipe's `pretrain_steps`"""
    demonstrations: int = 0
    """per task; 0: the recipe's"""
    robots: int = 2


def make_recipe(run: TrainingRun) -> Recipe:
    """The run's recipe."""
    recipe = get_recipe(run.recipe)
    if run.size:
        directory = Path(run.place) / "checkpoint"
        if not directory.exists():
            write_checkpoint(run.size, directory, recipe.spec)
        chosen = Overrides(policy=f"lerobot:{directory}", policy_config=json.dumps(run.config) if run.config else "")
        recipe = chosen.applied(recipe)
    wanted: dict[str, Any] = {"learning_rate": run.learning_rate, "batch": run.batch, "pretrain_steps": run.first_steps}
    training = replace(recipe.training, **{name: value for name, value in wanted.items() if value})
    return replace(recipe, training=training, demonstrations=run.demonstrations or recipe.demonstrations)


def main(argument: str) -> int:
    """Train, write, print what it took."""
    run = msgspec.json.decode(argument, type=TrainingRun)
    torch.set_num_threads(1)
    recipe, place = make_recipe(run), Path(run.place)
    with tempfile.TemporaryDirectory(prefix="weights-") as root:
        fleet = InProcessFleet(Path(root), recipe, run.robots)
        trainer = fleet.trainer
        while trainer.phase != TrainerPhase.online:
            trainer.step()
            if trainer.learner.gradient_steps % 100 == 0:
                log(f"{run.name}: {trainer.phase} {trainer.learner.gradient_steps}")
        for number in range(run.versions):
            (place / f"{number}.safetensors").write_bytes(trainer.learner.weights())
            done = trainer.learner.gradient_steps
            while trainer.learner.gradient_steps < done + run.steps:
                if run.robots:
                    fleet.turn(5)
                else:
                    fleet.clock.advance(fleet.recipe.spec.period_ns)
                    trainer.step()
            log(f"{run.name}: version {number + 1} of {run.versions}")
        fleet.close()
    parameters = sum(one.numel() for one in trainer.learner.policy.module.parameters() if one.requires_grad)
    sys.stdout.write(json.dumps({"parameters": parameters, "learning_rate": recipe.training.learning_rate}) + "\n")
    return 0


def log(text: str) -> None:
    sys.stderr.write(f"\r{text:<60}" if sys.stderr.isatty() else "")
    sys.stderr.flush()


def held_out(run: TrainingRun, weights: bytes, episodes: int) -> float:
    """Mean success over the tasks."""
    found = success(make_recipe(run), weights, episodes, HELD_OUT)
    return sum(found.values()) / len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
