"""Do corrections help, or just more data? The same learner three ways, at equal gradient steps.

- `online`: robots act on the policy, the operator corrects, HG-DAgger learns from demonstrations and corrections.
- `offline`: no robot acts; the operator gives the same number of expert steps as whole demonstrations instead.
- `no corrections`: the first demonstrations only.

Everything runs in simulated time in one thread per seed (`benchmarks.common.in_process_fleet`), so the arms differ in
nothing but their data. Seeds run beside each other, one process for each core. `--keep DIR` remembers each arm there
when it is done, so that what was stopped goes on.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.in_process_fleet import InProcessFleet, success
from benchmarks.common.keeping import keep_settings, kept, run_keeping
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation
from fleet.config.recipes import get_recipe

HELD_OUT = 3_000_000
ARMS = ("online", "offline", "no corrections")


@dataclass(frozen=True, slots=True)
class CorrectionsSize:
    """How much of everything, for one recipe."""

    recipe: str
    gradient_steps: int
    rounds: int
    """control periods of each robot in the online arm, at 80 Hz"""
    episodes: int
    """held-out episodes per task"""
    robots: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)


FULL = (CorrectionsSize("pixels", 4_000, 4_000, 20), CorrectionsSize("state", 12_000, 6_000, 40))
QUICK = (CorrectionsSize("state", 2_500, 600, 5, robots=2, seeds=(0,)),)


def measure(quick: bool, keep: Path) -> Result:
    """Three arms, each recipe, each seed."""
    sizes = QUICK if quick else FULL
    work = [(size, seed) for size in sizes for seed in size.seeds]
    with process_pool(len(work)) as pool:
        found = dict(zip(work, pool.map(partial(_seed, keep), *zip(*work, strict=True)), strict=True))
    rows, goals, notes = [], [], []
    for size in sizes:
        means = {}
        for arm in ARMS:
            runs = [found[size, seed][arm] for seed in size.seeds]
            steps = [one["expert_steps"] for one in runs]
            means[arm] = float(np.mean([one["success"] for one in runs]))
            rows.append(
                {
                    "recipe": size.recipe,
                    "learns from": arm,
                    "held-out success": interval([one["success"] for one in runs]),
                    "after pretraining": interval([one["before"] for one in runs]),
                    "expert steps": f"{np.mean(steps):.0f} ({min(steps)} to {max(steps)})",
                    "gradient steps": size.gradient_steps,
                    "by seed": ", ".join(f"{one['success']:.2f}" for one in runs),
                }
            )
        gain = means["online"] - means["no corrections"]
        goals.append(Goal(f"{size.recipe}: online minus no corrections, success", gain, "above 0", gain > 0))
        notes.append(
            f"`{size.recipe}`: online minus offline {means['online'] - means['offline']:+.3f}. Not a goal: whatever "
            "comes out is reported."
        )
    return Result(
        "Corrections against demonstrations at equal expert steps",
        rows,
        goals,
        [
            *(
                f"`{size.recipe}`: {size.robots} simulated robots for {size.rounds / 80:.0f} s of simulated time, "
                f"{len(size.seeds)} seed(s), {size.episodes} held-out episodes per task; mean (lowest to highest)."
                for size in sizes
            ),
            "Offline demonstrations are whole episodes of the same scripted expert from other scenes, added until "
            "their number of steps is that of the online arm.",
            *notes,
        ],
    )


def _seed(keep: Path, size: CorrectionsSize, seed: int) -> dict[str, dict[str, Any]]:
    """All arms of one seed."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    home = keep / f"{size.recipe}-{seed}"
    home.mkdir(exist_ok=True)
    keep_settings(home / "size.json", asdict(size))
    found: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        expert_steps = found["online"]["expert_steps"] if arm == "offline" else 0
        found[arm] = kept(home / f"{arm.replace(' ', '-')}.json", partial(_arm, size, seed, arm, expert_steps))
    return found


def _arm(size: CorrectionsSize, seed: int, arm: str, expert_steps: int) -> dict[str, Any]:
    recipe = replace(get_recipe(size.recipe), checkpoint_every_s=1e9)
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        rehearsal = InProcessFleet(
            Path(directory),
            recipe,
            robots=size.robots if arm == "online" else 0,
            seed=seed,
            first_demonstration_seed=seed * 10_000,
            max_steps=size.gradient_steps,
        )
        try:
            while arm == "offline" and rehearsal.ledger.totals().human_steps < expert_steps:
                rehearsal.demonstrate(len(recipe.tasks))
            found = _train(rehearsal, size, arm)
        finally:
            rehearsal.close()
    sys.stderr.write(f"{size.recipe}, seed {seed}, {arm}: {found}\n")
    return found


def _train(rehearsal: InProcessFleet, size: CorrectionsSize, arm: str) -> dict[str, Any]:
    trainer, pretrain = rehearsal.trainer, rehearsal.recipe.training.pretrain_steps
    while trainer.learner.gradient_steps < pretrain:
        trainer.step()
    before = _success(rehearsal, size)
    if arm == "online":
        rehearsal.turn(size.rounds, (size.gradient_steps - pretrain) / size.rounds)
        rehearsal.drain()
    while trainer.learner.gradient_steps < size.gradient_steps:
        trainer.step()
    return {
        "before": before,
        "success": _success(rehearsal, size),
        "expert_steps": rehearsal.ledger.totals().human_steps,
    }


def _success(rehearsal: InProcessFleet, size: CorrectionsSize) -> float:
    weights = rehearsal.trainer.learner.weights()
    return float(np.mean(list(success(rehearsal.recipe, weights, size.episodes, HELD_OUT).values())))


if __name__ == "__main__":
    require_simulation()
    sys.exit(run_keeping("corrections", measure))
