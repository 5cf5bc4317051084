"""One run: a fleet that has learned what its demonstrations can teach it goes on by itself, measured as it goes."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.algorithms.runs import CONTROL, make_recipe
from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.common.keeping import kept
from benchmarks.common.learning_curve import HELD_OUT, LearningPoint, learning_curve, steps_of_success
from fleet.config.recipe import Recipe
from fleet.evaluation.evaluator import RolloutResult
from fleet.launch import factories
from hal.registry import make_operator
from hal.safety.limiter import SafetyLimiter
from hal.safety.rest import rest_action
from wire.clock import SimulatedClock

ALONE = CONTROL
"""the control: as many more gradient steps on the demonstrations"""


@dataclass(frozen=True, slots=True)
class BeyondExpertSize:
    """How much of everything. A robot step is a control period of one robot; those of all robots are counted."""

    tasks: tuple[str, ...]
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    demonstrations: int
    pretrain_steps: int
    """gradient steps on them, after which imitation has converged"""
    steps: int
    """robot steps after that, without anybody"""
    measure_every: int
    episodes: int
    """held-out ones at each measurement"""
    robots: int = 3
    gradient_steps: float = 0.625
    """for each robot step"""


FULL = BeyondExpertSize(
    ("drawer-open", "pick-place"), (ALONE, "recap", "chunk-edit"), (0, 1, 2), 60, 6_000, 30_000, 6_000, 40
)
QUICK = BeyondExpertSize(("push",), (ALONE, "chunk-edit"), (0,), 3, 100, 600, 300, 3)


@dataclass(frozen=True, slots=True)
class ExpertResult:
    """What the scripted operator does in the held-out scenes."""

    success: float
    steps: float
    """control ticks of an episode that succeeded"""


def begin_process() -> None:
    """One thread computes, for another process has the next core."""
    import torch

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)


def measure(size: BeyondExpertSize, home: Path, task: str, algorithm: str, seed: int) -> list[LearningPoint]:
    """As it is kept in `home`, or made."""

    def make() -> list[dict[str, object]]:
        points = []
        for point in _curve(size, task, algorithm, seed):
            sys.stderr.write(
                f"{task}, {algorithm}, seed {seed}: {point.success:.2f} in {point.steps:.0f} ticks after "
                f"{point.robot_s:.0f} s of robot time ({point.compute_s:.0f} s of compute)\n"
            )
            points.append(asdict(point))
        return points

    return [LearningPoint(**one) for one in kept(home / f"{task}-{algorithm}-{seed}.json", make)]


def _curve(size: BeyondExpertSize, task: str, algorithm: str, seed: int) -> Iterator[LearningPoint]:
    recipe = make_recipe(task, algorithm)
    training = replace(recipe.training, pretrain_steps=size.pretrain_steps)
    recipe = replace(recipe, training=training, demonstrations=size.demonstrations)
    with tempfile.TemporaryDirectory(prefix="vla-fleet-bench-") as directory:
        demonstrated = seed * 10_000
        fleet = InProcessFleet(
            Path(directory), recipe, size.robots, seed, operated=False, first_demonstration_seed=demonstrated
        )
        try:
            while fleet.trainer.learner.gradient_steps < size.pretrain_steps:
                fleet.trainer.step()
            yield from learning_curve(fleet, size.steps, size.measure_every, size.gradient_steps, size.episodes)
        finally:
            fleet.close()


def measure_expert(size: BeyondExpertSize, home: Path, task: str) -> ExpertResult:
    """As it is kept in `home`, or made: in the same scenes, within the same limits."""

    def make() -> dict[str, float]:
        found = list(_expert(make_recipe(task, ALONE), task, size.episodes))
        return {"success": sum(one.success for one in found) / len(found), "steps": steps_of_success(found)}

    return ExpertResult(**kept(home / f"{task}-expert.json", make))


def _expert(recipe: Recipe, task: str, episodes: int) -> Iterator[RolloutResult]:
    clock = SimulatedClock()
    robot = factories.make_robot(recipe.robot, recipe.unpaced_config, clock)
    operator = make_operator(recipe.robot, robot)
    robot.connect()
    try:
        for seed in range(HELD_OUT, HELD_OUT + episodes):
            robot.reset(task, seed)
            safety, executed = SafetyLimiter(robot.spec, recipe.loop.safety), None
            result = RolloutResult(False, recipe.evaluator.max_ticks)
            for tick in range(recipe.evaluator.max_ticks):
                observation = robot.read()
                if executed is None:
                    executed = rest_action(robot.spec, observation.state)
                wanted = operator.propose(observation)
                action = executed if wanted is None else safety.limit(wanted, executed, observation.state)
                feedback = robot.write(action)
                safety.note(feedback.executed, executed)
                executed = feedback.executed
                clock.advance(robot.spec.period_ns)
                if feedback.success:
                    result = RolloutResult(True, tick + 1)
                    break
            yield result
    finally:
        robot.close()
