"""Does a fleet learn faster with more robots, and how much does it gain by not waiting for them?

    python -m benchmarks.fleet_scaling [--quick] [--keep DIR] [--json FILE] [--write]

- Time to success: from the end of pretraining until held-out success is high enough, in the time of the robots, which
  all act at once. The learner takes the same number of gradient steps for each step of a robot, however many there are.
- Training period: from one version to the next. Asynchronous, the learner trains and makes the version while robots go
  on. Synchronous, one thing comes after the other: each robot finishes an episode by the version before, everything
  arrives, the learner trains and makes the version, and every robot loads it.

What robots do is in simulated time (`benchmarks.common.in_process_fleet`), compute is measured. Runs go beside each
other, one process for each core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation
from benchmarks.fleet_scaling import runs
from benchmarks.fleet_scaling.learning import LearningPoint, TimeToSuccess, kept_learning_curve, time_to_success
from benchmarks.fleet_scaling.periods import TrainingPeriods, kept_training_periods
from benchmarks.fleet_scaling.runs import ScalingSize
from fleet.config.recipes import get_recipe

SPEEDUP = 3.5
"""times as fast as one robot that four are to be"""
PERIODS = 6.0
"""asynchronous training periods in a synchronous one that are to be"""


def measure(quick: bool, keep: Path) -> Result:
    """Training periods, then each size of fleet with each seed."""
    size = runs.QUICK if quick else runs.FULL
    work = [(robots, seed) for robots in size.robots for seed in size.seeds]
    keep_settings(keep / "size.json", asdict(size))
    with process_pool(len(work), runs.begin_process) as pool:
        # alone, for what is timed is the machine's speed
        periods = pool.submit(kept_training_periods, size, keep).result()
        make = partial(kept_learning_curve, size, keep)
        curves = dict(zip(work, pool.map(make, *zip(*work, strict=True)), strict=True))
    return report(size, curves, periods)


def report(
    size: ScalingSize,
    curves: dict[tuple[int, int], list[LearningPoint]],
    periods: list[TrainingPeriods],
) -> Result:
    """curves: by robots and seed."""
    reached = {one: time_to_success(curve, size.level) for one, curve in curves.items()}
    alone = [reached[1, seed] for seed in size.seeds]
    rows, goals = [], []
    for robots in size.robots:
        found = [reached[robots, seed] for seed in size.seeds]
        ratio, by_seed = speedup(alone, found)
        rows.append(
            {
                "robots": robots,
                f"robot time to {size.level:g} (s)": _mean(found, "robot_s"),
                "by seed": ", ".join(map(str, found)),
                "times as fast as one": f"{_bound(alone, found)}{ratio:.2f}{_interval(alone, found)}",
                "of each seed": interval(by_seed),
                "robot steps": _mean(found, "robot_steps"),
                "gradient steps": _mean(found, "gradient_steps"),
                "compute (s)": _mean(found, "compute_s"),
            }
        )
        if robots == 4:
            holds = ratio >= SPEEDUP and not any(one.censored for one in found)
            goals.append(
                Goal(
                    f"4 robots, times as fast to {size.level:g} (ratio of mean times)",
                    ratio,
                    f"at least {SPEEDUP:g}",
                    holds,
                )
            )
    ratios = [compare_periods(one) for one in periods]
    goals.append(
        Goal(
            f"synchronous over asynchronous training period, episodes of {size.episode_periods:g} asynchronous periods",
            ratios[-1][0],
            f"at least {PERIODS:g}",
            ratios[-1][0] >= PERIODS,
        )
    )
    title = f"Training period, {size.period_robots} robots"
    notes = [*_learning_notes(size, curves, reached), *_period_notes(size, periods)]
    table = [row for _, two in ratios for row in two]
    return Result("Fleets of more robots, and fleets that wait", rows, goals, notes, {title: table})


def speedup(alone: list[TimeToSuccess], fleet: list[TimeToSuccess]) -> tuple[float, list[float]]:
    """How much faster a fleet is than one robot: ratio of mean times, and of each seed's.

    A run that was given up counts with the time at which it was: too little.
    """
    one, many = (np.array([run.point.robot_s for run in found]) for found in (alone, fleet))
    return float(one.mean() / many.mean()), (one / many).tolist()


def _interval(alone: list[TimeToSuccess], fleet: list[TimeToSuccess]) -> str:
    """Of the ratio of means, 95 %: percentiles of it over seeds drawn anew, each with both of its runs; '' of one robot
    alone, and where some were given up."""
    if fleet == alone or any(one.censored for one in (*alone, *fleet)):
        return ""
    one, many = (np.array([run.point.robot_s for run in found]) for found in (alone, fleet))
    drawn = np.random.default_rng(0).integers(len(one), size=(10_000, len(one)))
    low, high = np.percentile(one[drawn].mean(1) / many[drawn].mean(1), (2.5, 97.5))
    return f" ({low:.2f} to {high:.2f})"


def compare_periods(found: TrainingPeriods) -> tuple[float, list[dict[str, Any]]]:
    """Mean synchronous over mean asynchronous period, and a row for each."""
    times, rows = found.mean("synchronous_s") / found.mean("asynchronous_s"), []
    for name in ("asynchronous", "synchronous"):
        seconds, waits = [getattr(period, f"{name}_s") for period in found.periods], name == "synchronous"
        rows.append(
            {
                "a version after": f"{found.gradient_steps} gradient steps",
                "": name,
                "training period (s)": f"{np.mean(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                "times": times if waits else None,
                "episode (s, simulated)": found.mean("episode_s") if waits else None,
                "arrival (s)": found.mean("arrival_s") if waits else None,
                "gradient steps (s)": found.mean("gradient_s" if waits else "beside_s"),
                "version (s)": found.mean("version_s") if waits else None,
                "loading (s)": found.mean("loading_s") if waits else None,
            }
        )
    return times, rows


def _bound(alone: list[TimeToSuccess], fleet: list[TimeToSuccess]) -> str:
    """What is known of a ratio of times of which some are too small."""
    signs = {(False, False): "", (True, False): "> ", (False, True): "< ", (True, True): "not known: "}
    return "" if fleet == alone else signs[any(one.censored for one in alone), any(one.censored for one in fleet)]


def _mean(found: list[TimeToSuccess], name: str) -> str:
    """Of a field of the points that were reached; `>`: a run was given up before."""
    values = [getattr(one.point, name) for one in found]
    sign = "> " * any(one.censored for one in found)
    digits = 1 if name == "robot_s" else 0
    return f"{sign}{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _learning_notes(
    size: ScalingSize,
    curves: dict[tuple[int, int], list[LearningPoint]],
    reached: dict[tuple[int, int], TimeToSuccess],
) -> list[str]:
    recipe, given_up = get_recipe(size.recipe), sum(one.censored for one in reached.values())
    starts = interval([curves[1, seed][0].success for seed in size.seeds])
    return [
        f"Recipe `{size.recipe}`, {len(size.seeds)} seed(s), mean (lowest to highest); a seed has the same "
        "demonstrations and first weights in fleets of all sizes. Robot time: simulated, of one robot, from the end of "
        f"pretraining on, where success is {starts}; robots act at the same time. Robot steps: control periods, of all "
        "robots together. The learner's newest weights are measured; robots act by versions, one in "
        f"{size.publish_every_s:g} s of their time, whatever the fleet's size.",
        f"The learner takes {size.gradient_steps:g} gradient steps for each robot step in all fleets, so with N robots "
        f"N times as many in a second: {size.gradient_steps / recipe.spec.period_ns * 1e9:g} a second for each robot. "
        "It is about as many as `benchmarks.corrections` takes, with which the recipe learns. Robot time supposes a "
        "learner that keeps up. Compute: of one core, robots, gateway and learner together, without measurements.",
        f"Held-out success is measured every {size.measure_every} robot steps, on {size.episodes} scenes for each "
        f"task, in fleets of all sizes. The first measurement of {size.level:g} or more counts; the time is "
        "interpolated linearly between the one before and it. Times as fast: ratio of mean times, with a 95 % "
        "bootstrap interval over seeds.",
        f"A run is given up after {size.give_up} robot steps: {given_up} of {len(reached)} were, which is marked by >; "
        "in means and ratios they count with that time.",
        "Peer: SOP (arXiv 2601.03044) reports 173.6 and 71.7 minutes to 0.8 with one and four real robots, 2.4 times.",
    ]


def _period_notes(size: ScalingSize, periods: list[TrainingPeriods]) -> list[str]:
    every_s = ", ".join(f"{one:g} s" for one in size.period_every_s)
    last = periods[-1].mean("episode_s") / periods[-1].mean("asynchronous_s")
    return [
        f"Training periods: mean (lowest to highest) of {size.periods}, with as many gradient steps each as fit into "
        f"{every_s} at this machine's speed. The episode is the longest of {size.period_robots} robots, in simulated "
        "time, and a simulated scene is reset at once; all else is measured, without a network. Asynchronous, a "
        "version is made in its thread beside the gradient steps, as a fleet's trainer does it.",
        "What waiting costs depends on how long an episode is beside an asynchronous period. Peer: RLinf-USER (arXiv "
        "2602.07837) reports 45.0 and 7.90 s with real robots, 5.7 times; its episodes took "
        f"{size.episode_periods:g} asynchronous periods. The last two rows, by which the goal is judged, have as many "
        f"gradient steps as make that of the mean episode before them; it was {last:.1f}.",
    ]


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation()
    return run_keeping("fleet_scaling", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
