"""Which algorithm learns how fast, from how much of people's help?

    python -m benchmarks.algorithms [--quick] [--keep DIR] [--json FILE] [--write]

Three robots practise one task at a time, a scripted operator corrects them as in `vla-fleet up`, and the same learner
trains by each algorithm: the same demonstrations, robots, scenes, gradient steps for each step of a robot. `offline` is
the control: HG-DAgger on demonstrations alone, as many expert and gradient steps as the corrections brought.

Robots live in simulated time (`benchmarks.common.in_process_fleet`); runs go beside each other, one process for each
core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.algorithms import runs
from benchmarks.algorithms.runs import CONTROL, OFFLINE, AlgorithmsSize
from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation

FEWER = 3.0
"""times fewer human steps that the best is to need"""
Curves: TypeAlias = Mapping[tuple[str, str, int], Sequence[LearningPoint]]
"""by task, algorithm and seed"""


def measure(quick: bool, keep: Path) -> Result:
    """Each task by each algorithm with each seed, then the control."""
    size = runs.QUICK if quick else runs.FULL
    keep_settings(keep / "size.json", {**asdict(size), "algorithms": [CONTROL]})
    found: dict[tuple[str, str, int], list[LearningPoint]] = {}
    with process_pool(len(size.tasks) * len(size.seeds), runs.begin_process) as pool:
        for algorithms in (size.algorithms, (OFFLINE,)):
            work = [(task, one, seed) for seed in size.seeds for task in size.tasks for one in algorithms]
            done = pool.map(partial(runs.measure, size, keep), *zip(*work, strict=True))
            found |= dict(zip(work, done, strict=True))
    return report(size, found)


def report(size: AlgorithmsSize, found: Curves) -> Result:
    """The table, the curves and the goals."""
    rows, more, goals = [], {}, []
    for task in size.tasks:
        needed: dict[str, float] = {}
        for algorithm in (*size.algorithms, OFFLINE):
            curves = [found[task, algorithm, seed] for seed in size.seeds]
            begin, end = ([curve[at].success for curve in curves] for at in (0, -1))
            human = [reached(curve, "human_steps", size.level) for curve in curves]
            robot_s = [reached(curve, "robot_s", size.level) for curve in curves]
            online = algorithm != OFFLINE
            rows.append(
                {
                    "task": task,
                    "algorithm": algorithm,
                    "success at start": interval(begin),
                    "at the end": interval(end),
                    "by seed": ", ".join(f"{one:.2f}" for one in end),
                    "human steps": interval([curve[-1].human_steps for curve in curves]),
                    f"until {size.level:g}": _spread(human) if online else None,
                    f"robot time until {size.level:g} (s)": _spread(robot_s) if online else None,
                    "compute (s)": float(np.mean([curve[-1].compute_s for curve in curves])) if online else None,
                }
            )
            if online:
                needed[algorithm] = float(np.mean(human))
                gain = float(np.mean(end) - np.mean(begin))
                goals.append(Goal(f"{task}, {algorithm}: end minus start, success", gain, "above 0", gain > 0))
        others = {name: steps for name, steps in needed.items() if name != CONTROL}
        best = min(others, key=lambda name: others[name])
        goals.append(_fewer(task, best, others[best], needed[CONTROL]))
        more[f"{task}: success by robot time"] = _curves(size, found, task)
    return Result("Algorithms, by what they need", rows, goals, _notes(size), more)


def reached(curve: Sequence[LearningPoint], what: str, level: float) -> float:
    """Where the line between two measurements crosses `level` first; infinite if none is so high."""
    if curve[0].success >= level:
        return float(getattr(curve[0], what))
    for before, after in pairwise(curve):
        if before.success < level <= after.success:
            share = (level - before.success) / (after.success - before.success)
            one, other = getattr(before, what), getattr(after, what)
            return float(one + share * (other - one))
    return float("inf")


def _fewer(task: str, best: str, steps: float, control: float) -> Goal:
    name = f"{task}, {best}: human steps of {CONTROL} for each of its own"
    if not np.isfinite(steps):
        return Goal(name, 0.0, f"at least {FEWER:g}", holds=False)
    return Goal(name, control / steps, f"at least {FEWER:g}", holds=control >= FEWER * steps)


def _spread(values: list[float]) -> str:
    """Of the seeds that got there, and how many did not."""
    there = [one for one in values if np.isfinite(one)]
    missed = f"; {len(values) - len(there)} of {len(values)} never" if len(there) < len(values) else ""
    return (f"{np.mean(there):.0f} ({min(there):.0f} to {max(there):.0f})" if there else "") + missed


def _curves(size: AlgorithmsSize, found: Curves, task: str) -> list[dict[str, Any]]:
    """A row for each algorithm: mean success, and human steps."""
    rows = []
    for algorithm in size.algorithms:
        curves = [found[task, algorithm, seed] for seed in size.seeds]
        for what, digits in (("success", 2), ("human_steps", 0)):
            means = np.mean([[getattr(point, what) for point in curve] for curve in curves], axis=0)
            points = zip(curves[0], means, strict=True)
            rows.append(
                {"algorithm": algorithm, "mean": what.replace("_", " ")}
                | {f"{point.robot_s:.0f} s": f"{mean:.{digits}f}" for point, mean in points}
            )
    return rows


def _notes(size: AlgorithmsSize) -> list[str]:
    return [
        f"{size.robots} robots, {size.steps} steps of all together, {size.gradient_steps:g} gradient steps for each; "
        f"{len(size.seeds)} seed(s): other first weights, demonstrations and scenes; mean (lowest to highest). "
        f"{size.episodes} held-out scenes at each measurement.",
        "Human steps: those of demonstrations included. Until: interpolated between the last measurement below and the "
        "first above. Compute: of one core, robots, gateway and learner together.",
        "Offline: HG-DAgger on whole demonstrations, of as many steps as all that people did for it online.",
    ]


if __name__ == "__main__":
    require_simulation()
    sys.exit(run_keeping("algorithms", measure))
