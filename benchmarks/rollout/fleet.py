"""A fleet that only throws dice: robots that run episodes one after the other by the version they are given."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cloud_learner.rollout.config import RolloutConfig
from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import RolloutDecision

SUCCESS_S, FAILURE_S = (20.0, 30.0), (35.0, 45.0)
"""an episode ends when it succeeds, or about at its time limit"""
TASKS = (-0.1, -0.05, 0.0, 0.05, 0.1)
"""by task: how much more often it succeeds than the mean, at 0.8; half of that at 0.95"""
HUMAN, STOPS = 0.1, 0.02
"""share of episodes in which a person steps in, for up to half of it; that are stopped"""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a version does, on average over tasks."""

    success: float
    human: float = HUMAN
    stops: float = STOPS


class DiceFleet:
    """Robots, their episodes in the order in which they end, and the controller that is told of them."""

    def __init__(self, config: RolloutConfig, robots: int, seed: int, robot_spread: float = 0.0) -> None:
        """robot_spread: a robot succeeds by up to so much more or less often than others."""
        self.controller = RolloutController(config)
        self.qualities: dict[int, Quality] = {}
        self.acted: dict[int, set[str]] = {}
        """by version: robots that ever acted by it"""
        self.canary_episodes = 0
        """that ended, since the newest version came"""
        self.now_s = 0.0
        self._random = random.Random(seed)
        names = [f"arm{seed}-{number}" for number in range(robots)]
        self._skill = {name: self._random.uniform(-robot_spread, robot_spread) for name in names}
        self.controller.set_robots(names, 0)
        self._ends: list[tuple[float, str]] = []
        self._running: dict[str, tuple[int, int, bool, float]] = {}
        """by robot: version, task, whether it will succeed, when it began"""

    def publish(self, number: int, quality: Quality) -> None:
        """The gate lets a version in."""
        self.qualities[number] = quality
        self.canary_episodes = 0
        self.controller.on_version(number, number - 1, self._now_ns())

    def run(self, until: Callable[[], bool], most_s: float) -> list[RolloutDecision]:
        """Episodes until `until` or for `most_s`; what was decided."""
        end_s, decisions = self.now_s + most_s, self.controller.pop_decisions()
        for robot in self._skill:
            if robot not in self._running:
                # they do not begin at once
                self._begin(robot, self.now_s + self._random.uniform(0, SUCCESS_S[1]))
        while self.now_s < end_s and not until():
            self.now_s, robot = heapq.heappop(self._ends)
            self._end(robot)
            self._begin(robot, self.now_s)
            decisions += self.controller.pop_decisions()
        return decisions

    def _begin(self, robot: str, at_s: float) -> None:
        version = self.controller.version_for(robot)
        self.acted.setdefault(version, set()).add(robot)
        task = self._random.randrange(len(TASKS))
        success = self._random.random() < self._chance(version, task, robot)
        lasts_s = self._random.uniform(*(SUCCESS_S if success else FAILURE_S))
        self._running[robot] = version, task, success, at_s
        heapq.heappush(self._ends, (at_s + lasts_s, robot))

    def _chance(self, version: int, task: int, robot: str) -> float:
        mean = self.qualities[version].success
        if mean <= 0:
            return 0.0
        return min(max(mean + TASKS[task] * min(1.0, (1 - mean) / 0.1, mean / 0.1) + self._skill[robot], 0.0), 1.0)

    def _end(self, robot: str) -> None:
        version, task, success, _ = self._running[robot]
        quality, dice = self.qualities[version], self._random
        # A robot switches at once: what it began by another version is by both.
        versions = {version, self.controller.version_for(robot)}
        for number in versions:
            self.acted.setdefault(number, set()).add(robot)
        human = dice.uniform(0, 0.5) if dice.random() < quality.human else 0.0
        stopped = dice.random() < quality.stops
        self.canary_episodes += versions == {self.controller.canary}
        self.controller.on_episode(robot, versions, f"task{task}", success, human, stopped, self._now_ns())

    def _now_ns(self) -> int:
        return int(self.now_s * 1e9)


def by_version(qualities: Mapping[int, Quality], current: int) -> float:
    """Success of `current`, 0 without one."""
    return qualities[current].success if current else 0.0
