"""A training run whose weights are kept as they would be published, in a process of its own.

python -m benchmarks.weights.training JSON      (writes 0.safetensors, 1.safetensors, ... and prints one line of JSON)
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.policies.models import write_checkpoint
from cloud_learner.buffer.loading.dataset import ReplayDataset
from cloud_learner.training.publishing.action_check import ActionCheck
from cloud_learner.training.status import TrainerPhase, VersionRefusal
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.launch.learning import dataset_config, make_action_check
from policies.interface.policy import Policy
from wire.weights.delta import Precision, encode

_LOADS = 3


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
    seed: int = 0


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
        fleet = InProcessFleet(Path(root), recipe, run.robots, seed=run.seed)
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
        parameters = sum(one.numel() for one in trainer.learner.policy.module.parameters() if one.requires_grad)
        # gradients, moments and the average are three quarters of what a large one takes
        trainer.learner.policy.module.zero_grad()
        trainer.learner.networks.clear()
        changes = measured(fleet, (path.read_bytes() for path in paths_of(place)))
        load_s = timed_loads(cast("Policy", trainer.learner.policy), paths_of(place)[-_LOADS:])
        fleet.close()
    said = {
        "parameters": parameters,
        "learning_rate": recipe.training.learning_rate,
        "quantization_changes": changes,
        "load_s": load_s,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def paths_of(place: Path) -> list[Path]:
    """The files of a run's versions, oldest first."""
    return sorted(place.glob("*.safetensors"), key=lambda path: int(path.stem))


def timed_loads(policy: Policy, paths: Sequence[Path]) -> list[float]:
    """Seconds that it takes the policy to take each of these files, and to look at what lies there then."""
    found = []
    for path in paths:
        weights, began_s = path.read_bytes(), time.perf_counter()
        policy.load(weights, 1)
        found.append(time.perf_counter() - began_s)
    return found


def measured(fleet: InProcessFleet, versions: Iterable[bytes]) -> list[float]:
    """What quantisation alone changes of the actions of each version but the first, as the trainer measures it on
    recorded observations."""
    recipe = fleet.recipe
    ledger, store = fleet.data.buffer.open_reader()
    with contextlib.closing(ledger), contextlib.closing(store):
        config = dataset_config(recipe, recipe.make_policy(recipe.spec, 0), 0)
        with ReplayDataset(ledger, store, recipe.spec, config) as dataset:
            dataset.refresh()
            check = make_action_check(recipe, fleet.trainer.learner, dataset, store, 0)
            if check is None:
                return []
            check.choose()
            return quantization_changes(check, versions) if check.ready else []


def quantization_changes(check: ActionCheck, versions: Iterable[bytes]) -> list[float]:
    """Root mean square of the change, in ranges of the action's dimensions; the deltas follow each other."""
    rest = iter(versions)
    changes, published = [], np.frombuffer(next(rest), np.uint8)
    for trained in rest:
        target = np.frombuffer(bytearray(trained), np.uint8)
        encode(published, target, lambda frame: None, Precision.int8)
        exact, rebuilt = check.act(trained), check.act(target.tobytes())
        if isinstance(exact, VersionRefusal) or isinstance(rebuilt, VersionRefusal):
            raise AssertionError("a version of the run cannot act")
        changes.append(check.change(exact, rebuilt))
        published = target
    return changes


def log(text: str) -> None:
    sys.stderr.write(f"\r{text:<60}" if sys.stderr.isatty() else "")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
