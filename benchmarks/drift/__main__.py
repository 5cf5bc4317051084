"""What becomes of a trained fleet when the world changes under it?

    python -m benchmarks.drift [--quick] [--keep DIR] [--json FILE] [--write]

A fleet learns from demonstrations: recipe `state`, and what needs pictures `pixels`. Then its world changes
(`hal.drivers.metaworld.changes`), and three robots go on in it for five minutes with the scripted operator beside them,
as in `vla-fleet up`. Success in held-out scenes before, right after and over time; the controls are the policy that
learns no more, and as many expert and gradient steps on demonstrations of the world as it was.

Robots live in simulated time (`benchmarks.common.in_process_fleet`); runs go beside each other, one process for each
core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation
from benchmarks.drift import runs
from benchmarks.drift.runs import OLD, ONLINE, DriftSize, DriftWorld, changed_tasks

BACK, KEPT = 0.05, 0.03
"""success that may be missing in the end: in the changed tasks, in the others"""


@dataclass(frozen=True, slots=True)
class DriftRun:
    """One world with one seed."""

    before: Mapping[str, float]
    """success by task in the world as it was"""
    online: Sequence[LearningPoint]
    """in the changed one; the first is right after the change"""
    old: Mapping[str, float]
    """in the changed one, after demonstrations of the world as it was"""


def measure(quick: bool, keep: Path) -> Result:
    """All fleets learn; then each world with each seed, and its control."""
    size = runs.QUICK if quick else runs.FULL
    keep_settings(keep / "size.json", asdict(size))
    work = [(world, seed) for seed in size.seeds for world in size.worlds]
    with process_pool(len(work), runs.begin_process) as pool:
        fleets = [(recipe, seed) for seed in size.seeds for recipe in size.budgets]
        learned = pool.map(partial(runs.learn, size, keep), *zip(*fleets, strict=True))
        before = dict(zip(fleets, learned, strict=True))
        online = list(pool.map(partial(runs.adapt, size, keep), *zip(*work, strict=True)))
        old = list(pool.map(partial(runs.demonstrate_old, size, keep), *zip(*work, strict=True)))
    found = {
        (world.name, seed): DriftRun(before[world.recipe, seed], points, control)
        for (world, seed), points, control in zip(work, online, old, strict=True)
    }
    return report(size, found)


def report(size: DriftSize, found: Mapping[tuple[str, int], DriftRun]) -> Result:
    """The table, the curves and the goals."""
    rows: list[dict[str, Any]] = []
    curves, goals = [], []
    for world in size.worlds:
        every = [found[world.name, seed] for seed in size.seeds]
        changed = changed_tasks(world)
        others = tuple(task for task in every[0].before if task not in changed)
        for tasks, what in ((changed, "changed"), (others, "as it was")):
            if tasks:
                rows.append(_row(world, what, tasks, every))
                curves.append(_curve(world, what, tasks, every))
                goals.append(_goal(world, what, tasks, every))
    more = {f"Mean success by robot time, {ONLINE}": curves}
    return Result("When the world changes", rows, goals, _notes(size), more)


def mean_of(success: Mapping[str, float], tasks: Sequence[str]) -> float:
    """Success, mean over `tasks`."""
    return float(np.mean([success[task] for task in tasks]))


def back_after(run: DriftRun, tasks: Sequence[str]) -> float:
    """Robot time (s) from which on no measurement is more than `BACK` below before; infinite where the last one is."""
    least = mean_of(run.before, tasks) - BACK
    late = [n for n, point in enumerate(run.online) if mean_of(point.tasks, tasks) < least - 1e-9]
    first = late[-1] + 1 if late else 0
    return run.online[first].robot_s if first < len(run.online) else float("inf")


def _row(world: DriftWorld, what: str, tasks: Sequence[str], every: Sequence[DriftRun]) -> dict[str, Any]:
    after, end = ([mean_of(run.online[at].tasks, tasks) for run in every] for at in (0, -1))
    back = [back_after(run, tasks) for run in every]
    there = [one for one in back if np.isfinite(one)]
    return {
        "world": world.name,
        "tasks": f"{', '.join(tasks)} ({what})",
        "before": interval([mean_of(run.before, tasks) for run in every]),
        "right after, and learning off": interval(after),
        ONLINE: interval(end),
        OLD: interval([mean_of(run.old, tasks) for run in every]),
        "back after (s)": f"{np.mean(there):.0f} ({len(there)} of {len(back)})" if there else f"0 of {len(back)}",
        "human steps": float(np.mean([run.online[-1].human_steps - run.online[0].human_steps for run in every])),
        "compute (s)": float(np.mean([run.online[-1].compute_s for run in every])),
    }


def _curve(world: DriftWorld, what: str, tasks: Sequence[str], every: Sequence[DriftRun]) -> dict[str, Any]:
    means = np.mean([[mean_of(point.tasks, tasks) for point in run.online] for run in every], axis=0)
    points = zip(every[0].online, means, strict=True)
    return {"world": world.name, "tasks": what} | {f"{point.robot_s:.0f} s": f"{one:.2f}" for point, one in points}


def _goal(world: DriftWorld, what: str, tasks: Sequence[str], every: Sequence[DriftRun]) -> Goal:
    most = BACK if what == "changed" else KEPT
    lost = [mean_of(run.before, tasks) - mean_of(run.online[-1].tasks, tasks) for run in every]
    value = float(np.mean(lost))
    minutes = every[0].online[-1].robot_s / 60
    name = f"{world.name}, tasks {what}: success before, minus that after {minutes:.2g} min"
    return Goal(name, value, f"at most {most:g}", value <= most + 1e-9)


def _notes(size: DriftSize) -> list[str]:
    budgets = "; ".join(
        f"{name}: {one.demonstrations} demonstrations of each task and {one.pretrain_steps} updates before, "
        f"{one.gradient_steps:g} for each robot step after"
        for name, one in size.budgets.items()
    )
    return [
        f"{size.robots} robots, {size.steps} steps of all together after the change. {budgets}.",
        f"{len(size.seeds)} seed(s): other first weights, demonstrations and scenes; mean (lowest to highest). "
        f"{size.episodes} held-out scenes of each task at each measurement, the same for all: without learning the "
        "policy stays what it is, and is measured once.",
        f"Back after: the robots' time from which on no measurement was more than {BACK:g} below before, mean of the "
        "seeds with which that came (how many).",
        f"{OLD.capitalize()}: as many expert steps as were corrected online, and as many updates.",
    ]


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation()
    return run_keeping("drift", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
