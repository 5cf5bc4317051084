"""What becomes of a policy that learns from what versions long gone did, with and without the corrections for it?

    python -m benchmarks.staleness [--quick] [--keep DIR] [--json FILE] [--write]

Three robots practise one task by themselves, nobody helps, and `pi-rl` learns from it. Weights reach them 1, 8, 32 or
128 versions late. `corrected` has pi_RL's defaults: the proximal policy apart from the one that acted, steps as long as
the effective share of the samples allows, and a bound of twice the largest lag; `plain` is PPO against what acted.

Robots live in simulated time (`benchmarks.common.in_process_fleet`); runs go beside each other, one process for each
core. `--keep` remembers each in DIR when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.algorithms.runs import begin_process
from benchmarks.common.keeping import keep_settings, run_keeping
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation
from benchmarks.staleness import runs
from benchmarks.staleness.runs import CORRECTED, PLAIN, StalenessSize

_LOST = 0.05
"""success that the largest lag may cost"""
Runs = Mapping[tuple[int, str, int], Mapping[str, Any]]
"""by lag, arm and seed"""


def measure(quick: bool, keep: Path) -> Result:
    """Each lag, corrected and plain, with each seed."""
    size = runs.QUICK if quick else runs.FULL
    keep_settings(keep / "size.json", runs.settings_of(size))
    work = [(lag, arm, seed) for seed in size.seeds for lag in size.lags for arm in (CORRECTED, PLAIN)]
    with process_pool(len(work), begin_process) as pool:
        done = list(pool.map(partial(runs.measure, size, keep), *zip(*work, strict=True)))
    return report(size, dict(zip(work, done, strict=True)))


def report(size: StalenessSize, found: Runs) -> Result:
    """The table and the goals."""
    rows, ends = [], {}
    for lag in size.lags:
        for arm in (CORRECTED, PLAIN):
            every = [found[lag, arm, seed] for seed in size.seeds]
            ends[lag, arm] = float(np.mean([one["end"] for one in every]))
            rows.append(
                {
                    "lag": lag,
                    "arm": arm,
                    "success at start": interval([one["start"] for one in every]),
                    "at the end": interval([one["end"] for one in every]),
                    "by seed": ", ".join(f"{one['end']:.2f}" for one in every),
                    "samples behind at the end": interval([one["behind"] for one in every]),
                    "versions": float(np.mean([one["versions"] for one in every])),
                }
            )
    least, most = min(size.lags), max(size.lags)
    lost = ends[least, CORRECTED] - ends[most, CORRECTED]
    gained = ends[most, CORRECTED] - ends[most, PLAIN]
    goals = [
        Goal(f"corrected: success lost from a lag of {least} to {most}", lost, f"at most {_LOST:g}", lost <= _LOST),
        Goal(f"lag {most}: corrected minus plain, success", gained, "above 0", gained > 0),
    ]
    notes = [
        f"{size.robots} robots, {size.steps} steps of all together, nobody helps, {size.gradient_steps:g} gradient "
        f"steps for each; {len(size.seeds)} seed(s); a version each {size.publish_every_s:g} s; {size.episodes} "
        "held-out scenes before and after; mean (lowest to highest).",
        "Lag: a version reaches robots when one so much newer is there; the first at once. Samples behind: of the "
        "policy's own in the last batch, which lie in the buffer for a while as well.",
    ]
    return Result("Stable when late", rows, goals, notes)


if __name__ == "__main__":
    require_simulation()
    sys.exit(run_keeping("staleness", measure))
