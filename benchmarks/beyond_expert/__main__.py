"""Does a fleet become faster than the expert that it learned from, without any further help?

    python -m benchmarks.beyond_expert [--quick] [--keep DIR] [--json FILE] [--write]

A policy learns from demonstrations of the scripted operator until more updates on them bring no more. Then three robots
practise without anybody beside them, and the learner goes on by each algorithm; what they did is judged by the
simulator. `hg-dagger`, the control, goes on with as many updates on the demonstrations alone.

Robots live in simulated time (`benchmarks.common.in_process_fleet`); runs go beside each other, one process for each
core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.beyond_expert import runs
from benchmarks.beyond_expert.runs import ALONE, BeyondExpertSize, ExpertResult
from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.learning_curve import LearningPoint
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation

FASTER, LOWER = 0.25, 0.0
"""share of the expert's ticks that the best is to save; what success may be lower for that"""
Curves: TypeAlias = Mapping[tuple[str, str, int], Sequence[LearningPoint]]
"""by task, algorithm and seed"""


def measure(quick: bool, keep: Path) -> Result:
    """The expert, then each task by each algorithm with each seed."""
    size = runs.QUICK if quick else runs.FULL
    keep_settings(keep / "size.json", {**asdict(size), "algorithms": [ALONE]})
    work = [(task, one, seed) for seed in size.seeds for task in size.tasks for one in size.algorithms]
    with process_pool(len(work), runs.begin_process) as pool:
        experts = dict(zip(size.tasks, pool.map(partial(runs.measure_expert, size, keep), size.tasks), strict=True))
        done = pool.map(partial(runs.measure, size, keep), *zip(*work, strict=True))
        curves = dict(zip(work, done, strict=True))
    return report(size, experts, curves)


def report(size: BeyondExpertSize, experts: Mapping[str, ExpertResult], found: Curves) -> Result:
    """The table, the curves and the goals."""
    rows: list[dict[str, Any]] = []
    goals, more = [], {}
    for task in size.tasks:
        expert, best = experts[task], (float("inf"), "")
        rows.append({"task": task, "who": "expert", "success": f"{expert.success:.2f}", "ticks": expert.steps})
        for algorithm in size.algorithms:
            curves = [found[task, algorithm, seed] for seed in size.seeds]
            begin, end = [[curve[at] for curve in curves] for at in (0, -1)]
            success, ticks = ([getattr(one, what) for one in end] for what in ("success", "steps"))
            saved = 1 - float(np.mean(ticks)) / expert.steps
            rows.append(
                {
                    "task": task,
                    "who": algorithm,
                    "success before": interval([one.success for one in begin]),
                    "ticks before": float(np.mean([one.steps for one in begin])),
                    "success": interval(success),
                    "ticks": float(np.mean(ticks)),
                    "by seed": ", ".join(f"{one:.0f}" for one in ticks),
                    "fewer than the expert's": saved,
                    "compute (s)": float(np.mean([one.compute_s for one in end])),
                }
            )
            if algorithm != ALONE and np.mean(success) >= expert.success - LOWER:
                best = min(best, (float(np.mean(ticks)), algorithm))
        saved = 1 - best[0] / expert.steps if best[1] else float("-inf")
        name = f"{task}, {best[1] or 'none as successful'}: ticks of a success saved, of the expert's"
        goals.append(Goal(name, saved, f"at least {FASTER:g}", saved >= FASTER))
        more[f"{task}: by robot time"] = _curves(size, found, task)
    return Result("Faster than the expert, without him", rows, goals, _notes(size), more)


def _curves(size: BeyondExpertSize, found: Curves, task: str) -> list[dict[str, Any]]:
    rows = []
    for algorithm in size.algorithms:
        curves = [found[task, algorithm, seed] for seed in size.seeds]
        for what, digits in (("success", 2), ("steps", 0)):
            means = np.mean([[getattr(point, what) for point in curve] for curve in curves], axis=0)
            points = zip(curves[0], means, strict=True)
            rows.append(
                {"algorithm": algorithm, "mean": "ticks of a success" if what == "steps" else what}
                | {f"{point.robot_s:.0f} s": f"{mean:.{digits}f}" for point, mean in points}
            )
    return rows


def _notes(size: BeyondExpertSize) -> list[str]:
    return [
        f"{size.demonstrations} demonstrations and {size.pretrain_steps} updates on them, then {size.robots} robots "
        f"and {size.steps} steps of all together without an operator, {size.gradient_steps:g} updates for each; "
        f"{len(size.seeds)} seed(s): other first weights, demonstrations and scenes; mean (lowest to highest).",
        f"{size.episodes} held-out scenes at each measurement, the expert's among them: the same limits of speed hold "
        "for both. Ticks: control periods of an episode that succeeded.",
    ]


def main(arguments: list[str] | None = None) -> int:
    """See the head of this file."""
    require_simulation()
    return run_keeping("beyond_expert", measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
