"""Several offsets behind one image encoding, or one offset at a time? VLASH's shared observation, on this learner.

A policy that answers late is trained with images of one moment and states and actions of a later one, the offset drawn
anew for each sample (VLASH, arXiv 2512.01031). Most of a gradient step goes into encoding images, so k samples behind
each image cost little more than one. VLASH packs them into one sequence with a block mask; here they are the second
axis of a grouped batch (`cloud_learner.buffer.loading.windows`).

- `packed`: b images, k offsets behind each.
- `one at a time`: b k images, one offset each: as many samples, k times the images.
- `as many images`: b images, one offset each: as many images, a kth of the samples.

First the time of a gradient step, batch and all, the arms in turn so that what else the machine does falls on all of
them. Then each arm learns from the same demonstrations for as many steps as that speed allows in the same time, and is
looked at twice: after as many steps as the slowest arm can take, and at its end. The held-out robot gets its actions
late and rolls its state forward.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.cpu import Others
from benchmarks.common.in_process_fleet import InProcessFleet, success
from benchmarks.common.pool import process_pool
from benchmarks.common.table import Goal, Result, interval, require_simulation, run
from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.buffer.loading.config import DatasetConfig
from cloud_learner.buffer.loading.dataset import ReplayDataset, open_dataset
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.sampling.target import imitation
from fleet.config.recipe import Recipe
from fleet.config.recipes import PIXEL_TASKS, get_recipe

if TYPE_CHECKING:
    from cloud_learner.training.learner import Learner
    from policies.interface.policy import LearnedPolicy
    from wire.types import RobotSpec

HELD_OUT = 3_000_000
MAX_OFFSET = 8
"""ticks, 0.1 s at 80 Hz"""
VLASH_SPEED_UP = 3.26
"""time of a training step there, one offset at a time over packed"""
PACKED, APART, FEWER = "packed", "one at a time", "as many images"
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class PackingArm:
    """What one gradient step looks at."""

    name: str
    images: int
    offsets: int
    """k, behind each image"""


@dataclass(frozen=True, slots=True)
class PackingSize:
    """How much of everything."""

    images: int
    """b"""
    offsets: tuple[int, ...]
    """every k whose speed is measured"""
    trained_offsets: int
    """the k that is trained with"""
    timed_steps: int
    train_s: float
    """of gradient steps, for each arm"""
    demonstrations: int
    """per task"""
    episodes: int
    """held-out, per task"""
    seeds: tuple[int, ...]
    delay_ticks: int = 6
    """of every answer to the held-out robot"""
    tasks: tuple[str, ...] = PIXEL_TASKS


FULL = PackingSize(32, (2, 4, 8, 16), 8, 30, 45.0, 10, 6, (0, 1))
QUICK = PackingSize(8, (4,), 4, 10, 4.0, 1, 1, (0,), tasks=PIXEL_TASKS[:1])


def measure(quick: bool) -> Result:
    """Speed, then success."""
    return compare(QUICK if quick else FULL)


def compare(size: PackingSize) -> Result:
    """Both tables for `size`."""
    others = Others()
    times = step_times(size)
    busy = others.cores()
    chosen = size.trained_offsets
    steps = {arm: max(1, round(size.train_s / times[chosen][arm.name])) for arm in arms(size.images, chosen)}
    fewest = min(steps.values())
    work = [(size, seed, arm, (fewest, last)) for seed in size.seeds for arm, last in steps.items()]
    with process_pool(len(work)) as pool:
        found = list(pool.map(train, *zip(*work, strict=True)))
    rows = []
    for arm, last in steps.items():
        mine = [one for (_, _, other, _), one in zip(work, found, strict=True) if other == arm]
        seconds = times[chosen][arm.name]
        rows.append(
            {
                "arm": arm.name,
                "images a step": arm.images,
                "offsets behind each": arm.offsets,
                "ms a step": 1e3 * seconds,
                "samples/s": round(arm.images * arm.offsets / seconds),
                f"success after {fewest} steps": interval([one[0] for one in mine]),
                f"steps in {size.train_s:.0f} s": last,
                "success after these": interval([one[1] for one in mine]),
            }
        )
    speed_up = times[chosen][APART] / times[chosen][PACKED]
    return Result(
        "Several offsets behind one image, against one at a time",
        rows,
        [Goal(f"samples/s with {chosen} offsets behind an image, over one at a time", speed_up, "> 1", speed_up > 1)],
        [
            f"`pixels`, {len(size.tasks)} task(s) with {size.demonstrations} demonstration(s) and {size.episodes} "
            f"held-out episode(s), every answer {size.delay_ticks} ticks late; {len(size.seeds)} seed(s), mean (lowest "
            "to highest).",
            f"Offsets are drawn from 0 to {MAX_OFFSET} ticks. Times are medians of {size.timed_steps} steps in one "
            f"thread, batches gathered in it too; others kept {busy:.1f} cores busy meanwhile.",
            f"VLASH reports {VLASH_SPEED_UP} for its network, in which images are tokens of the sequence that holds "
            "the samples; here they pass convolutions of their own. The figures say where the time goes in each.",
        ],
        {"Time of a gradient step": _speeds(size, times)},
    )


def arms(images: int, offsets: int) -> tuple[PackingArm, PackingArm, PackingArm]:
    """The three ways to learn from `images` images with `offsets` offsets behind each."""
    return PackingArm(PACKED, images, offsets), PackingArm(APART, images * offsets, 1), PackingArm(FEWER, images, 1)


def step_times(size: PackingSize) -> dict[int, dict[str, float]]:
    """Median seconds of a gradient step, by k and name of the arm."""
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        recipe, place = demonstrated(Path(directory), size, 0)
        return {k: _time(recipe, place, arms(size.images, k), size.timed_steps) for k in size.offsets}


def train(size: PackingSize, seed: int, arm: PackingArm, checkpoints: Sequence[int]) -> list[float]:
    """Held-out success after each of these growing numbers of gradient steps."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory, ExitStack() as opened:
        recipe, place = demonstrated(Path(directory), size, seed)
        learner, feed = _begin(recipe, place, arm, seed)
        opened.enter_context(feed)
        for steps in dict.fromkeys(checkpoints):
            while learner.gradient_steps < steps:
                learner.step(feed)
            found[steps] = float(np.mean(list(success(recipe, learner.weights(), size.episodes, HELD_OUT).values())))
            sys.stderr.write(f"{arm.name}, seed {seed}: {found[steps]:.3f} after {steps} steps\n")
    return [found[steps] for steps in checkpoints]


def demonstrated(root: Path, size: PackingSize, seed: int) -> tuple[Recipe, BufferLocation]:
    """`pixels` with offsets and late answers, and a buffer in `root` that holds its demonstrations."""
    recipe = get_recipe("pixels")
    recipe = replace(
        recipe,
        tasks=size.tasks,
        instructions={task: recipe.instructions[task] for task in size.tasks},
        make_policy=_policy,
        chunking=replace(recipe.chunking, strategy="future_state"),
        delay=str(size.delay_ticks),
        evaluator=replace(recipe.evaluator, delay_ticks=0),
        demonstrations=size.demonstrations,
        # its own trainer never runs
        cache_bytes=2**26,
        cache_workers=0,
    )
    rehearsal = InProcessFleet(root, recipe, robots=0, seed=seed, first_demonstration_seed=seed * 10_000)
    rehearsal.close()
    return replace(recipe, cache_bytes=2**31), rehearsal.data.buffer


def _policy(spec: RobotSpec, seed: int) -> LearnedPolicy:
    from policies.flow.factory import pixels_network
    from policies.flow.policy import FlowPolicy

    return FlowPolicy(spec, pixels_network(spec, max_offset=MAX_OFFSET), seed)


def _begin(recipe: Recipe, place: BufferLocation, arm: PackingArm, seed: int) -> tuple[Learner, ReplayDataset]:
    """A learner that has seen nothing yet, normalised, and its batches."""
    import torch

    from cloud_learner.training.learner import Learner

    torch.set_num_threads(1)
    settings = replace(recipe.training, batch=arm.images, ticks_per_frame=arm.offsets)
    policy = recipe.make_policy(recipe.spec, seed)
    config = DatasetConfig(
        tasks=recipe.instructions,
        target=imitation(),
        batch=arm.images,
        horizon=policy.horizon,
        ticks_ahead=policy.ticks_ahead,
        ticks_per_frame=arm.offsets,
        max_offset=policy.max_offset,
        rolled=tuple(recipe.motion.rolled.tolist()) if recipe.motion is not None else (),
        seed=seed,
        cache_bytes=recipe.cache_bytes,
        prefetch=0,
    )
    feed = open_dataset(place, recipe.spec, config)
    feed.refresh()
    policy.set_normalization(feed.examples())
    return Learner(policy, HGDagger(), settings, seed), feed


def _time(recipe: Recipe, place: BufferLocation, chosen: Sequence[PackingArm], steps: int) -> dict[str, float]:
    """Median seconds of a gradient step of each arm, one step of each in turn."""
    found: dict[str, list[float]] = {arm.name: [] for arm in chosen}
    with ExitStack() as opened:
        ready = [(arm.name, *_begin(recipe, place, arm, 0)) for arm in chosen]
        for _, _, feed in ready:
            opened.enter_context(feed)
        for number in range(steps + _WARM_STEPS):
            for name, learner, feed in ready:
                begun = time.perf_counter()
                learner.step(feed)
                if number >= _WARM_STEPS:
                    found[name].append(time.perf_counter() - begun)
    return {name: float(np.median(times)) for name, times in found.items()}


def _speeds(size: PackingSize, times: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "k": k,
            f"ms, {size.images} images, k offsets each": 1e3 * of[PACKED],
            f"ms, {size.images} k images, one offset each": 1e3 * of[APART],
            "samples/s, packed over one at a time": of[APART] / of[PACKED],
            f"ms, {size.images} images, one offset each": 1e3 * of[FEWER],
            "packed over that": of[PACKED] / of[FEWER],
        }
        for k, of in times.items()
    ]


if __name__ == "__main__":
    require_simulation()
    sys.exit(run("packing", measure))
