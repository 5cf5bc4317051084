"""How soon a fleet succeeds: held-out success over the time of its robots."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common.in_process_fleet import success
from benchmarks.common.keeping import kept
from benchmarks.fleet_scaling.runs import ScalingSize, make_recipe, pretrained_fleet
from fleet.config.recipe import Recipe

HELD_OUT = 3_000_000


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Where a fleet is, counted from the end of pretraining."""

    robot_s: float
    """simulated time, the same for all robots"""
    success: float
    """held-out, mean over tasks"""
    robot_steps: float
    gradient_steps: float
    compute_s: float
    """processor time of robots, gateway and learner together, without measuring success"""


@dataclass(frozen=True, slots=True)
class TimeToSuccess:
    """When a fleet was there, or, if it never was, when it was given up: it takes longer."""

    point: LearningPoint
    censored: bool

    def __str__(self) -> str:
        return f"{'> ' * self.censored}{self.point.robot_s:.1f}"


def time_to_success(curve: list[LearningPoint], level: float) -> TimeToSuccess:
    """The first measurement of `level` or more; before it the moment at which the line from the last one crosses it."""
    for before, after in pairwise(curve):
        if before.success < level <= after.success:
            share = (level - before.success) / (after.success - before.success)
            one, other = (np.array(list(asdict(point).values())) for point in (before, after))
            return TimeToSuccess(LearningPoint(*(one + share * (other - one)).tolist()), censored=False)
    return TimeToSuccess(curve[-1], censored=curve[-1].success < level)


def learning_curve(size: ScalingSize, recipe: Recipe, robots: int, seed: int) -> Iterator[LearningPoint]:
    """A measurement after pretraining, then one each `measure_every` robot steps until success is there or given up.

    Raises `ValueError` where the robots cannot share `measure_every`.
    """
    rounds, left = divmod(size.measure_every, robots)
    if left:
        raise ValueError(f"{robots} robots cannot share {size.measure_every} steps: make measure_every a multiple.")
    with pretrained_fleet(recipe, robots, seed) as fleet:
        learner, began_ns, compute_s = fleet.trainer.learner, fleet.clock.now_ns(), 0.0
        for steps in range(0, size.give_up + 1, size.measure_every):
            if steps:
                began_s = time.process_time()
                fleet.turn(rounds, size.gradient_steps * robots)
                compute_s += time.process_time() - began_s
            found = success(recipe, learner.weights(), size.episodes, HELD_OUT)
            point = LearningPoint(
                robot_s=(fleet.clock.now_ns() - began_ns) / 1e9,
                success=float(np.mean(list(found.values()))),
                robot_steps=steps,
                gradient_steps=learner.gradient_steps - recipe.training.pretrain_steps,
                compute_s=compute_s,
            )
            yield point
            if point.success >= size.level:
                return


def kept_learning_curve(size: ScalingSize, home: Path, robots: int, seed: int) -> list[LearningPoint]:
    """As it is kept in `home`, or made."""

    def make() -> list[dict[str, float]]:
        curve = []
        for point in learning_curve(size, make_recipe(size), robots, seed):
            sys.stderr.write(
                f"{robots} robot(s), seed {seed}: {point.success:.2f} after {point.robot_s:.1f} s of robot time and "
                f"{point.gradient_steps:.0f} gradient steps ({point.compute_s:.0f} s of compute)\n"
            )
            curve.append(asdict(point))
        return curve

    return [LearningPoint(**one) for one in kept(home / f"{robots}-robots-seed-{seed}.json", make)]
