"""Do corrections help, or just more data? The same learner three ways, at equal gradient steps.

- `online`: robots act on the policy, the operator corrects, HG-DAgger learns from demonstrations and corrections.
- `offline`: no robot acts; the operator gives the same number of expert steps as whole demonstrations instead.
- `no corrections`: the first demonstrations only.

Everything runs in simulated time in one thread (`fleet.rehearsal`), so the arms differ in nothing but their data.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.table import Goal, Result, interval, run
from fleet.config import Recipe
from fleet.recipes import get_recipe
from fleet.rehearsal import Rehearsal, success

log = logging.getLogger(__name__)

HELD_OUT = 3_000_000


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    seeds: tuple[int, ...] = (0, 1, 2)
    gradient_steps: int = 15_000
    rounds: int = 8_000
    """control periods of each robot in the online arm: 100 s at 80 Hz"""
    robots: int = 3
    episodes: int = 50
    """held-out episodes per task"""


FULL = Size()
QUICK = Size(seeds=(0,), gradient_steps=2_500, rounds=600, robots=2, episodes=5)


def measure(quick: bool) -> Result:
    """Three arms, each seed."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    found: dict[str, list[dict[str, Any]]] = {"online": [], "offline": [], "no corrections": []}
    for seed in size.seeds:
        online = _arm("online", size, seed)
        found["online"].append(online)
        found["offline"].append(_arm("offline", size, seed, human_steps=online["human_steps"]))
        found["no corrections"].append(_arm("no corrections", size, seed))
    rows = [
        {
            "expert steps": arm,
            "success": interval([one["success"] for one in runs]),
            "at the start": interval([one["before"] for one in runs]),
            "number of expert steps": interval_of_counts([one["human_steps"] for one in runs]),
            "gradient steps": size.gradient_steps,
            **{f"seed {seed}": round(one["success"], 3) for seed, one in zip(size.seeds, runs, strict=True)},
        }
        for arm, runs in found.items()
    ]
    mean = {arm: float(np.mean([one["success"] for one in runs])) for arm, runs in found.items()}
    gain = mean["online"] - mean["no corrections"]
    return Result(
        "Corrections against demonstrations at equal expert steps",
        rows,
        [Goal("online minus no corrections, success", gain, "above 0", gain > 0)],
        [
            f"Recipe `state` (push, pick-place), {size.robots} simulated robots, "
            f"{size.rounds / 80:.0f} s of simulated time each, {len(size.seeds)} seed(s), {size.episodes} held-out "
            "episodes per task; mean (lowest to highest seed).",
            "Offline demonstrations are whole episodes of the same scripted expert from other seeds, added until their "
            "number of steps is that of the online arm.",
            f"Online minus offline: {mean['online'] - mean['offline']:+.3f}. There is no goal on it: whatever comes "
            "out is reported.",
        ],
    )


def interval_of_counts(values: list[int]) -> str:
    return f"{np.mean(values):.0f} ({min(values)} to {max(values)})"


def _arm(arm: str, size: Size, seed: int, human_steps: int = 0) -> dict[str, Any]:
    recipe = _recipe()
    sys.stderr.write(f"seed {seed}, {arm} ...\n")
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        rehearsal = Rehearsal(
            Path(directory),
            recipe,
            robots=size.robots if arm == "online" else 0,
            seed=seed,
            first_demonstration_seed=seed * 10_000,
            max_steps=size.gradient_steps,
        )
        try:
            while arm == "offline" and rehearsal.ledger.totals().human_steps < human_steps:
                rehearsal.demonstrate(len(recipe.tasks))
            return _train(rehearsal, size, arm)
        finally:
            rehearsal.close()


def _train(rehearsal: Rehearsal, size: Size, arm: str) -> dict[str, Any]:
    trainer, recipe = rehearsal.trainer, rehearsal.recipe
    pretrain = recipe.algorithm.pretrain_steps
    while trainer.learner.gradient_steps < pretrain:
        trainer.turn()
    before = _success(rehearsal, size)
    share = (size.gradient_steps - pretrain) / size.rounds
    rehearsal.turn(size.rounds if arm == "online" else 0, share)
    rehearsal.drain()
    while trainer.learner.gradient_steps < size.gradient_steps:
        trainer.turn()
    return {
        "before": before,
        "success": _success(rehearsal, size),
        "human_steps": rehearsal.ledger.totals().human_steps,
    }


def _success(rehearsal: Rehearsal, size: Size) -> float:
    weights = rehearsal.trainer.learner.weights()
    return float(np.mean(list(success(rehearsal.recipe, weights, size.episodes, HELD_OUT).values())))


def _recipe() -> Recipe:
    recipe = get_recipe("state")
    return replace(recipe, checkpoint_every_s=1e9)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(run("corrections", measure))
