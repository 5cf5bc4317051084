"""What passes from one version to the next in a fleet that waits for its robots, and in one that does not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.in_process_fleet import InProcessFleet
from benchmarks.common.keeping import kept
from benchmarks.fleet_scaling.runs import ScalingSize, make_recipe, pretrained_fleet
from fleet.config.recipe import Recipe

_ROUNDS = 20_000
"""of polling, after which what is waited for will not come"""
_SPARE_S = 30.0
"""longer than any episode"""
_TIMED_STEPS = 100


@dataclass(frozen=True, slots=True)
class TrainingPeriod:
    """What the way from one version to the next is made of, in seconds: the episode simulated, all else measured."""

    episode_s: float
    """the longest of the fleet"""
    arrival_s: float
    """until everything that was recorded is stored"""
    gradient_s: float
    """all gradient steps"""
    version_s: float
    """making and encoding the version"""
    loading_s: float
    """until every robot acts by it and the gateway knows"""
    beside_s: float
    """as many gradient steps while a version is made in the trainer's thread for that"""

    @property
    def asynchronous_s(self) -> float:
        """Robots act, send and load meanwhile."""
        return self.beside_s

    @property
    def synchronous_s(self) -> float:
        """One after the other."""
        return self.episode_s + self.arrival_s + self.gradient_s + self.version_s + self.loading_s


@dataclass(frozen=True, slots=True)
class TrainingPeriods:
    """Some, with as many gradient steps each as fit into the training between two versions."""

    gradient_steps: int
    periods: list[TrainingPeriod]

    def mean(self, part: str) -> float:
        """Of a part, or of a whole period: episodes are short or given up, and a median is one or the other."""
        return float(np.mean([getattr(one, part) for one in self.periods]))


def training_periods(size: ScalingSize, recipe: Recipe) -> Iterator[TrainingPeriods]:
    """For each of `period_every_s`, at the speed that this machine has, then for `episode_periods`.

    Raises `AssertionError` when a version after the other is not let out.
    """
    # By the clock a version is due with the last gradient step, and not while robots act.
    late_s = max(size.period_every_s) + _SPARE_S
    recipe = replace(recipe, training=replace(recipe.training, publish_every_s=late_s))
    waits: list[tuple[int, list[TrainingPeriod]]] = []
    with pretrained_fleet(recipe, size.period_robots, seed=0) as fleet:
        _until("the first version", fleet, lambda: fleet.ledger.newest_version() is not None, fleet.trainer.step)
        _load(fleet)
        # the first one shows the speed, with the data that robots bring
        step_s = _training_period(fleet, _TIMED_STEPS).gradient_s / _TIMED_STEPS
        for every_s in size.period_every_s:
            steps = max(1, int(every_s / step_s))
            waits.append((steps, _let_out(fleet, steps, size.periods)))
        episode_s = float(np.mean([one.episode_s for _, found in waits for one in found]))
        steps = max(1, round(episode_s / size.episode_periods / step_s))
        waits.append((steps, _let_out(fleet, steps, size.periods)))
        fleet.trainer.start()
        for steps, found in waits:
            yield TrainingPeriods(steps, [replace(one, beside_s=_beside(fleet, steps)) for one in found])


def _let_out(fleet: InProcessFleet, steps: int, number: int) -> list[TrainingPeriod]:
    periods: list[TrainingPeriod] = []
    for _ in range(2 * number):
        made = fleet.trainer.counts.publishing.made
        period = _training_period(fleet, steps)
        # A version that is not let out ends no period.
        if fleet.trainer.counts.publishing.made > made:
            periods.append(period)
        if len(periods) == number:
            return periods
    raise AssertionError(f"versions are not let out: {fleet.trainer.counts.publishing.refusal}")


def _training_period(fleet: InProcessFleet, steps: int) -> TrainingPeriod:
    """It begins as the last one ends: robots have the newest version, and wait."""
    trainer, began_ns = fleet.trainer, fleet.clock.now_ns()
    _finish_episodes(fleet)
    acted_ns = fleet.clock.now_ns()
    arrival_s = _seconds_of(partial(_send_all, fleet))
    due_ns = began_ns + int(trainer.learner.training.publish_every_s * 1e9)
    made_s, training_s = trainer.counts.publishing.seconds, 0.0
    for left in reversed(range(steps)):
        # Robots say now and then that they are there; the version is due with the last step.
        fleet.clock.sleep_until(due_ns - left * (due_ns - acted_ns) // steps)
        _poll(fleet)
        training_s += _seconds_of(trainer.step)
    version_s = trainer.counts.publishing.seconds - made_s
    loading_s = _seconds_of(partial(_load, fleet))
    return TrainingPeriod((acted_ns - began_ns) / 1e9, arrival_s, training_s - version_s, version_s, loading_s, 0.0)


def _beside(fleet: InProcessFleet, steps: int) -> float:
    """How long so many gradient steps take while the version that is due with the first of them is made."""
    trainer, began_ns, made = fleet.trainer, fleet.clock.now_ns(), fleet.trainer.counts.publishing.made
    for second in range(int(trainer.learner.training.publish_every_s) + 1):
        fleet.clock.sleep_until(began_ns + int((second + 1) * 1e9))
        _poll(fleet)
    seconds = 0.0
    for _ in range(steps):
        seconds += _seconds_of(trainer.step)
        _poll(fleet)
    _until("the version beside it", fleet, lambda: trainer.counts.publishing.made > made, trainer.step)
    return seconds


def _finish_episodes(fleet: InProcessFleet) -> None:
    """Each robot acts until it has finished an episode, and then waits for the others."""
    ended = {robot: robot.loop.tracker.ended for robot in fleet.robots}

    def act() -> None:
        for robot, before in ended.items():
            if robot.loop.tracker.ended == before:
                robot.turn()

    _until("an episode of each robot", fleet, lambda: all(r.loop.tracker.ended > n for r, n in ended.items()), act)


def _send_all(fleet: InProcessFleet) -> None:
    _poll(fleet)
    _until("all that robots recorded", fleet, lambda: not any(len(robot.uplink.spool) for robot in fleet.robots))


def _load(fleet: InProcessFleet) -> None:
    """Every robot acts by the newest version, and the gateway knows."""
    fleet.gateway.poll()
    newest = fleet.ledger.newest_version()
    assert newest is not None
    number = newest.version.number

    def loaded() -> bool:
        return sum(row.version == number for row in fleet.ledger.applied()) == len(fleet.robots)

    _until(f"version {number} on every robot", fleet, loaded)


def _until(what: str, fleet: InProcessFleet, done: Callable[[], bool], act: Callable[[], object] = bool) -> None:
    for _ in range(_ROUNDS):
        if done():
            return
        act()
        _poll(fleet)
    raise AssertionError(f"{what} did not come in {_ROUNDS} rounds")


def _poll(fleet: InProcessFleet) -> None:
    for robot in fleet.robots:
        robot.uplink.poll()
        robot.inference.poll()
    fleet.gateway.poll()


def _seconds_of(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def kept_training_periods(size: ScalingSize, home: Path) -> list[TrainingPeriods]:
    """As they are kept in `home`, or made."""

    def make() -> list[dict[str, Any]]:
        made = []
        for found in training_periods(size, make_recipe(size)):
            sys.stderr.write(f"{len(found.periods)} training period(s) of {found.gradient_steps} gradient steps\n")
            made.append(asdict(found))
        return made

    return [
        TrainingPeriods(one["gradient_steps"], [TrainingPeriod(**each) for each in one["periods"]])
        for one in kept(home / "training-periods.json", make)
    ]
