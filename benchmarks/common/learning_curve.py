"""How a fleet learns: held-out success over the time of its robots, in simulated time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common.in_process_fleet import InProcessFleet, rollouts
from fleet.evaluation.evaluator import RolloutResult

HELD_OUT = 3_000_000


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """Where a fleet is, counted from the end of pretraining."""

    robot_s: float
    """simulated time, the same for all robots"""
    success: float
    """held-out, mean over tasks"""
    robot_steps: float
    gradient_steps: float
    human_steps: float
    """imitated ones in the buffer, demonstrations included"""
    compute_s: float
    """processor time of robots, gateway and learner together, without measuring success"""
    tasks: dict[str, float]
    """success by task"""
    steps: float = math.inf
    """control ticks of a held-out episode that succeeded, mean over tasks; infinite without one in a task"""


def learning_curve(
    fleet: InProcessFleet, steps: int, measure_every: int, gradient_steps: float, episodes: int
) -> Iterator[LearningPoint]:
    """A measurement at once, then one each `measure_every` robot steps, up to `steps` of them in all.

    gradient_steps: for each robot step; episodes: held-out ones of each task. Raises `ValueError` where the robots
    cannot share `measure_every`.
    """
    robots, recipe, learner = len(fleet.robots), fleet.recipe, fleet.trainer.learner
    rounds, left = divmod(measure_every, robots)
    if left:
        raise ValueError(f"{robots} robots cannot share {measure_every} steps: make measure_every a multiple.")
    began_ns, compute_s, pretrained = fleet.clock.now_ns(), 0.0, learner.gradient_steps
    for done in range(0, steps + 1, measure_every):
        if done:
            began_s = time.process_time()
            fleet.turn(rounds, gradient_steps * robots)
            compute_s += time.process_time() - began_s
        found = rollouts(recipe, learner.weights(), episodes, HELD_OUT)
        tasks = {task: float(np.mean([one.success for one in every])) for task, every in found.items()}
        yield LearningPoint(
            robot_s=(fleet.clock.now_ns() - began_ns) / 1e9,
            success=float(np.mean(list(tasks.values()))),
            robot_steps=done,
            gradient_steps=learner.gradient_steps - pretrained,
            human_steps=fleet.ledger.totals().human_steps,
            compute_s=compute_s,
            tasks=tasks,
            steps=float(np.mean([steps_of_success(every) for every in found.values()])),
        )


def steps_of_success(found: Sequence[RolloutResult]) -> float:
    """Mean of those that succeeded; infinite without any."""
    steps = [one.steps for one in found if one.success]
    return float(np.mean(steps)) if steps else math.inf
