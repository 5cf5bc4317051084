"""How soon a fleet succeeds: held-out success over the time of its robots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.learning_curve import learning_curve as measured
from benchmarks.fleet_scaling.runs import ScalingSize, make_recipe, pretrained_fleet
from fleet.config.recipe import Recipe

_BETWEEN = ("robot_s", "success", "robot_steps", "gradient_steps", "human_steps", "compute_s")


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
            one, other = (asdict(point) for point in (before, after))
            between = {name: one[name] + share * (other[name] - one[name]) for name in _BETWEEN}
            return TimeToSuccess(replace(before, **between), censored=False)
    return TimeToSuccess(curve[-1], censored=curve[-1].success < level)


def learning_curve(size: ScalingSize, recipe: Recipe, robots: int, seed: int) -> Iterator[LearningPoint]:
    """Measurements until success is there or given up."""
    with pretrained_fleet(recipe, robots, seed) as fleet:
        for point in measured(fleet, size.give_up, size.measure_every, size.gradient_steps, size.episodes):
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
