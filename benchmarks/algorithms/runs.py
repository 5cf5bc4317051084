"""One run: a fleet that learns one task by one algorithm, measured as it goes."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import LearningPoint, learning_curve
from fleet.config.overrides import Overrides
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe
from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec
from hal.drivers.metaworld.tasks import instruction

CONTROL, OFFLINE = "hg-dagger", "offline"
"""what the others are compared with; demonstrations in place of what people did for it"""


@dataclass(frozen=True, slots=True)
class AlgorithmsSize:
    """How much of everything. A robot step is a control period of one robot; those of all robots are counted."""

    tasks: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    """robot steps of a run"""
    measure_every: int
    episodes: int
    """held-out ones at each measurement"""
    robots: int = 3
    gradient_steps: float = 0.625
    """for each robot step"""
    level: float = 0.9
    """success that is to be reached"""


FULL = AlgorithmsSize(
    ("push", "pick-place", "peg-insert-side"), (CONTROL, "recap", "lwd", "rlpd"), (0, 1, 2), 18_000, 1_800, 40
)
QUICK = AlgorithmsSize(("push",), (CONTROL, "recap", "lwd", "rlpd"), (0,), 600, 300, 2)


def begin_process() -> None:
    """One thread computes, for another process has the next core."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)


def make_recipe(task: str, algorithm: str) -> Recipe:
    """Recipe `state` of one task, its policy as the algorithm wants it, without checkpoints: nobody is killed."""
    config = MetaWorldConfig(tasks=(task,), observation="state", render_in_thread=False)
    recipe = replace(
        get_recipe("state"),
        tasks=(task,),
        instructions={task: instruction(task)},
        robot_config=config,
        unpaced_config=config,
        spec=metaworld_spec(config),
        checkpoint_every_s=1e9,
    )
    return Overrides(algorithm=algorithm).applied(recipe)


def measure(size: AlgorithmsSize, home: Path, task: str, algorithm: str, seed: int) -> list[LearningPoint]:
    """As it is kept in `home`, or made. `OFFLINE`: after `CONTROL` of the same task and seed."""
    make = partial(_offline if algorithm == OFFLINE else _online, size, home, task, algorithm, seed)
    return [LearningPoint(**one) for one in kept(home / f"{task}-{algorithm}-{seed}.json", make)]


def _online(size: AlgorithmsSize, home: Path, task: str, algorithm: str, seed: int) -> list[dict[str, Any]]:
    recipe, points = make_recipe(task, algorithm), []
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        fleet = _pretrained(Path(directory), recipe, size.robots, seed)
        try:
            for point in learning_curve(fleet, size.steps, size.measure_every, size.gradient_steps, size.episodes):
                _say(f"{task}, {algorithm}, seed {seed}", point)
                points.append(asdict(point))
        finally:
            fleet.close()
    return points


def _offline(size: AlgorithmsSize, home: Path, task: str, algorithm: str, seed: int) -> list[dict[str, Any]]:
    """Two points: after pretraining, and after as many expert and gradient steps as with corrections."""
    wanted = measure(size, home, task, CONTROL, seed)[-1]
    recipe = make_recipe(task, CONTROL)
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        fleet = _pretrained(Path(directory), recipe, 1, seed)
        try:
            (begin,) = learning_curve(fleet, 0, 1, 0.0, size.episodes)
            while fleet.ledger.totals().human_steps < wanted.human_steps:
                fleet.demonstrate(1)
            learner = fleet.trainer.learner
            end = learner.gradient_steps + wanted.gradient_steps
            while learner.gradient_steps < end:
                fleet.trainer.step()
            (found,) = learning_curve(fleet, 0, 1, 0.0, size.episodes)
        finally:
            fleet.close()
    found = replace(found, gradient_steps=wanted.gradient_steps)
    _say(f"{task}, {algorithm}, seed {seed}", found)
    return [asdict(begin), asdict(found)]


def _pretrained(place: Path, recipe: Recipe, robots: int, seed: int) -> InProcessFleet:
    fleet = InProcessFleet(place, recipe, robots, seed, first_demonstration_seed=seed * 10_000)
    while fleet.trainer.learner.gradient_steps < recipe.training.pretrain_steps:
        fleet.trainer.step()
    return fleet


def _say(what: str, point: LearningPoint) -> None:
    sys.stderr.write(
        f"{what}: {point.success:.2f} after {point.robot_s:.1f} s of robot time, {point.human_steps:.0f} human steps "
        f"and {point.gradient_steps:.0f} gradient steps ({point.compute_s:.0f} s of compute)\n"
    )
