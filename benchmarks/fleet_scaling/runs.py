"""What all runs share: how much of everything, a fleet that has learned from demonstrations, and what is kept."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.in_process_fleet import InProcessFleet
from fleet.config.recipe import Recipe
from fleet.config.recipes import get_recipe


@dataclass(frozen=True, slots=True)
class ScalingSize:
    """How much of everything. A robot step is a control period of one robot; those of all robots are counted."""

    recipe: str
    robots: tuple[int, ...]
    """of each fleet; one robot is what the others are compared with"""
    seeds: tuple[int, ...]
    measure_every: int
    """robot steps between two measurements"""
    give_up: int
    """robot steps after which a run ends without success"""
    episodes: int
    """held-out, for each task"""
    periods: int
    """training periods"""
    level: float = 0.8
    """held-out success, mean over tasks, that is to be reached"""
    gradient_steps: float = 0.625
    """for each robot step"""
    publish_every_s: float = 0.25
    """of robot time, while success is waited for"""
    period_robots: int = 4
    period_every_s: tuple[float, ...] = (5.0, 1.0, 0.5, 0.25)
    """of training between two versions"""
    episode_periods: float = 4.7
    """asynchronous periods that an episode takes, of the last row of periods: as in the peer's fleet"""


FULL = ScalingSize("state", (1, 2, 4, 8), (0, 1, 2, 3, 4, 5), 1_200, 19_200, 40, 24)
QUICK = ScalingSize("state", (1, 4), (0,), 400, 800, 3, 1)


def begin_process() -> None:
    """One thread computes, for another process has the next core; what happens to robots is not told."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)


def make_recipe(size: ScalingSize) -> Recipe:
    """The size's recipe, without checkpoints: nobody is killed."""
    recipe = get_recipe(size.recipe)
    training = replace(recipe.training, publish_every_s=size.publish_every_s)
    return replace(recipe, training=training, checkpoint_every_s=1e9)


@contextlib.contextmanager
def pretrained_fleet(recipe: Recipe, robots: int, seed: int) -> Iterator[InProcessFleet]:
    """A fleet whose learner has learned from demonstrations, and whose robots have not acted yet."""
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        fleet = InProcessFleet(Path(directory), recipe, robots, seed, first_demonstration_seed=seed * 10_000)
        try:
            while fleet.trainer.learner.gradient_steps < recipe.training.pretrain_steps:
                fleet.trainer.step()
            yield fleet
        finally:
            fleet.close()
