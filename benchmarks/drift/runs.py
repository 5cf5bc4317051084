"""One fleet that has learned, and what becomes of it when its world changes."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.in_process_fleet import InProcessFleet, rollouts
from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import HELD_OUT, LearningPoint, learning_curve
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from fleet.config.settings import with_settings
from hal.drivers.metaworld.changes import UNCHANGED, WorldChanges

ONLINE, OLD = "learning on", "demonstrations of the old world"


@dataclass(frozen=True, slots=True)
class DriftWorld:
    """A change, and the fleet that meets it."""

    name: str
    recipe: str
    changes: WorldChanges


@dataclass(frozen=True, slots=True)
class RecipeBudget:
    """How much of everything in a recipe's runs. A robot step is a control period of one robot."""

    demonstrations: int
    """of each task, from which the fleet has learned"""
    pretrain_steps: int
    """gradient steps on them"""
    gradient_steps: float
    """for each robot step afterwards: about what two cores manage beside three robots at their own pace"""


@dataclass(frozen=True, slots=True)
class DriftSize:
    """How much of everything."""

    worlds: tuple[DriftWorld, ...]
    budgets: dict[str, RecipeBudget]
    """by recipe"""
    seeds: tuple[int, ...]
    steps: int
    """robot steps after the change, of all robots"""
    measure_every: int
    episodes: int
    """held-out ones of each task at each measurement"""
    robots: int = 3
    recent_share: float = 0.25
    """`algorithm.recent_share`"""


# In each of them the scripted operator succeeds in all scenes that were looked at.
WORLDS = (
    DriftWorld("the arm lags", "state", WorldChanges(lag=1.5)),
    DriftWorld("the arm moves farther", "state", WorldChanges(gain=1.5)),
    DriftWorld("everything is slippery", "state", WorldChanges(friction=0.3)),
    DriftWorld("the camera moved", "pixels", WorldChanges(camera_m=(0.04, 0.0, 0.04), camera_deg=(3.0, 0.0, 0.0))),
    DriftWorld("half of the light", "pixels", WorldChanges(light=0.5)),
    DriftWorld("the door's handle is higher", "pixels", WorldChanges(tasks=("door-open",), handle_m=(0.0, 0.0, 0.06))),
)
FULL = DriftSize(
    WORLDS,
    {"state": RecipeBudget(60, 6_000, 0.25), "pixels": RecipeBudget(40, 4_000, 0.02)},
    (0, 1, 2),
    steps=72_000,
    measure_every=14_400,
    episodes=20,
)
QUICK = DriftSize(
    (WORLDS[0], WORLDS[-1]),
    {"state": RecipeBudget(2, 20, 0.1), "pixels": RecipeBudget(1, 4, 0.02)},
    (0,),
    steps=240,
    measure_every=120,
    episodes=1,
)


def begin_process() -> None:
    """One thread computes, for another process has the next core."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)


def changed_tasks(world: DriftWorld) -> tuple[str, ...]:
    """Those that are not what they were."""
    return world.changes.tasks or get_recipe(world.recipe).tasks


def make_recipe(name: str, size: DriftSize, changes: WorldChanges = UNCHANGED) -> Recipe:
    """The recipe `name` in a world with `changes`, without checkpoints in between: nobody is killed."""
    recipe = with_settings(get_recipe(name), [f"algorithm.recent_share={size.recent_share}"])
    budget = size.budgets[name]
    return replace(
        recipe,
        robot_config=replace(recipe.robot_config, changes=changes),
        unpaced_config=replace(recipe.unpaced_config, changes=changes),
        training=replace(recipe.training, pretrain_steps=budget.pretrain_steps),
        demonstrations=budget.demonstrations,
        checkpoint_every_s=1e9,
    )


def success_in(recipe: Recipe, weights: bytes, episodes: int) -> dict[str, float]:
    """By task, in the held-out scenes of all measurements."""
    found = rollouts(recipe, weights, episodes, HELD_OUT)
    return {task: float(np.mean([one.success for one in every])) for task, every in found.items()}


def learn(size: DriftSize, home: Path, name: str, seed: int) -> dict[str, float]:
    """Success by task of a fleet that has learned recipe `name` from demonstrations; what it knows stays in `home`."""

    def make() -> dict[str, float]:
        recipe = make_recipe(name, size)
        place = learned_at(home, name, seed)
        shutil.rmtree(place, ignore_errors=True)
        with closing(InProcessFleet(place, recipe, 0, seed, first_demonstration_seed=seed * 10_000)) as fleet:
            while fleet.trainer.learner.gradient_steps < recipe.training.pretrain_steps:
                fleet.trainer.step()
            fleet.trainer.save()
            found = success_in(recipe, fleet.trainer.learner.weights(), size.episodes)
        _say(f"recipe {name}, seed {seed}, before", float(np.mean(list(found.values()))))
        return found

    return dict(kept(home / f"{name}-{seed}-before.json", make))


def learned_at(home: Path, name: str, seed: int) -> Path:
    """The data directory of `learn`."""
    return home / f"{name}-{seed}"


def adapt(size: DriftSize, home: Path, world: DriftWorld, seed: int) -> list[LearningPoint]:
    """After `learn`: success in the changed world at once, and while robots practise there with the operator."""

    def make() -> list[dict[str, Any]]:
        return [asdict(point) for point in _online(size, home, world, seed)]

    path = home / f"{_file_name(world)}-{seed}-online.json"
    return [LearningPoint(**one) for one in kept(path, make)]


def _online(size: DriftSize, home: Path, world: DriftWorld, seed: int) -> Iterator[LearningPoint]:
    recipe = make_recipe(world.recipe, size, world.changes)
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        fleet = _resumed(Path(directory) / "data", learned_at(home, world.recipe, seed), recipe, size.robots, seed)
        with closing(fleet):
            budget = size.budgets[world.recipe]
            every = learning_curve(fleet, size.steps, size.measure_every, budget.gradient_steps, size.episodes)
            for point in every:
                _say(f"{world.name}, seed {seed}, {ONLINE} for {point.robot_s:.0f} s", point.success)
                yield point


def demonstrate_old(size: DriftSize, home: Path, world: DriftWorld, seed: int) -> dict[str, float]:
    """After `adapt`, the control: success by task in the changed world after as many expert steps as people brought
    there, all of them demonstrations of the world as it was, and as many gradient steps."""

    def make() -> dict[str, float]:
        end = adapt(size, home, world, seed)[-1]
        recipe = make_recipe(world.recipe, size)
        with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
            fleet = _resumed(Path(directory) / "data", learned_at(home, world.recipe, seed), recipe, 0, seed)
            with closing(fleet):
                while fleet.ledger.totals().human_steps < end.human_steps:
                    fleet.demonstrate(1)
                learner = fleet.trainer.learner
                wanted = learner.gradient_steps + end.gradient_steps
                # not the trainer alone: who goes on in a fleet waits for the gateway to take its version
                while learner.gradient_steps < wanted:
                    fleet.turn(1, 1.0)
                weights = learner.weights()
        found = success_in(make_recipe(world.recipe, size, world.changes), weights, size.episodes)
        _say(f"{world.name}, seed {seed}, {OLD}", float(np.mean(list(found.values()))))
        return found

    return dict(kept(home / f"{_file_name(world)}-{seed}-old.json", make))


def _resumed(place: Path, learned: Path, recipe: Recipe, robots: int, seed: int) -> InProcessFleet:
    """A fleet that goes on from a copy of what another one `learned`."""
    shutil.copytree(learned, place)
    first = seed * 10_000 + recipe.demonstrations * len(recipe.tasks)
    none = replace(recipe, demonstrations=0)
    fleet = InProcessFleet(place, none, robots, seed, first_demonstration_seed=first)
    if fleet.trainer.learner.gradient_steps < recipe.training.pretrain_steps:
        fleet.close()
        raise SystemExit(f"{learned} is of a fleet that has not learned to the end; choose another --keep.")
    return fleet


def _file_name(world: DriftWorld) -> str:
    return world.name.replace(" ", "-").replace("'", "")


def _say(what: str, success: float) -> None:
    sys.stderr.write(f"{what}: {success:.2f}\n")
