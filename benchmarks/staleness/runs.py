"""One run: a fleet that learns by pi_RL from what its robots did by versions that are so many behind."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.algorithms.runs import make_recipe
from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import learning_curve
from benchmarks.staleness.lagging_line import LaggingLine
from cloud_learner.algorithms.pi_rl import PiRl

CORRECTED, PLAIN = "corrected", "plain"
_UNCORRECTED: dict[str, Any] = {"decoupled": False, "scaled": False, "max_lag": 0}


@dataclass(frozen=True, slots=True)
class StalenessSize:
    """How much of everything. A robot step is a control period of one robot; those of all robots are counted."""

    task: str
    lags: tuple[int, ...]
    """versions"""
    seeds: tuple[int, ...]
    steps: int
    """robot steps of a run"""
    episodes: int
    """held-out ones, before and after"""
    publish_every_s: float
    """so often that the largest lag is a small part of the run"""
    warmup: int
    """of the critic, in updates"""
    robots: int = 3
    gradient_steps: float = 0.625
    """for each robot step"""


FULL = StalenessSize("push", (1, 8, 32, 128), (0, 1, 2), 36_000, 60, 0.1, 1000)
QUICK = StalenessSize("push", (1, 8), (0,), 600, 2, 0.25, 20)


def measure(size: StalenessSize, home: Path, lag: int, arm: str, seed: int) -> dict[str, Any]:
    """Success before and after, and how many versions samples were behind at the end, as kept in `home` or made."""
    return kept(home / f"{lag}-{arm}-{seed}.json", lambda: _run(size, lag, arm, seed))


def _run(size: StalenessSize, lag: int, arm: str, seed: int) -> dict[str, Any]:
    recipe = make_recipe(size.task, "pi-rl")
    # twice the lag: what is drawn has been there for a while
    settings = _UNCORRECTED if arm == PLAIN else {"max_lag": 2 * max(size.lags)}
    recipe = replace(
        recipe,
        algorithm=PiRl(warmup=size.warmup, **settings),
        training=replace(recipe.training, publish_every_s=size.publish_every_s),
    )
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        place = Path(directory)
        first_seed = seed * 10_000
        fleet = InProcessFleet(place, recipe, size.robots, seed, operated=False, first_demonstration_seed=first_seed)
        try:
            for number, robot in enumerate(fleet.robots):
                inference = robot.inference
                inference._uplink = LaggingLine(inference._uplink, lag, place / f"held-{number}")
            while fleet.trainer.learner.gradient_steps < recipe.training.pretrain_steps:
                fleet.trainer.step()
            points = list(learning_curve(fleet, size.steps, size.steps, size.gradient_steps, size.episodes))
            behind = fleet.trainer.counts.metrics.get("behind", 0.0)
            newest = fleet.ledger.newest_version()
        finally:
            fleet.close()
    found = {
        "start": points[0].success,
        "end": points[-1].success,
        "behind": behind,
        "versions": newest.version.number if newest else 0,
        "compute_s": points[-1].compute_s,
    }
    sys.stderr.write(f"lag {lag}, {arm}, seed {seed}: {json.dumps(found)}\n")
    return found


def settings_of(size: StalenessSize) -> dict[str, Any]:
    """What results in one folder have in common."""
    return asdict(size)
