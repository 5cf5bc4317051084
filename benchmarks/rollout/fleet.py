"""A fleet that only throws dice: robots that run episodes one after the other by the version they are given."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from cloud_learner.rollout.controller import RolloutController
from cloud_learner.rollout.records import RolloutDecision

SUCCESS_S, FAILURE_S = (20.0, 30.0), (35.0, 45.0)
"""how long an episode lasts that succeeds, and one that does not"""
TASKS = (-0.1, -0.05, 0.0, 0.05, 0.1)
"""by task: how much more often it succeeds than the mean; less where the mean is within 0.1 of 0 or 1"""
HUMAN, STOPS = 0.1, 0.02
"""share of the episodes in which a person steps in, for up to half of it; that are stopped"""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a version does, on average over tasks."""

    success: float
    human: float = HUMAN
    stops: float = STOPS


class DiceFleet:
    """Robots, their episodes in the order in which they end, and the controller that is told of them."""

    def __init__(self, controller: RolloutController, robots: int, seed: int, robot_spread: float = 0.0) -> None:
        """robot_spread: a robot succeeds by up to so much more or less often than others."""
        self.controller = controller
        self.qualities: dict[int, Quality] = {}
        self.acted: dict[int, set[str]] = {}
        """by version: robots that ever acted by it"""
        self.canary_episodes = 0
        """that ended, since the newest version came"""
        self.harder = 0.0
        """so much less often everything succeeds from now on"""
        self.now_s = 0.0
        self._dice = random.Random(seed)
        names = [f"arm{seed}-{number}" for number in range(robots)]
        self._skill = {name: self._dice.uniform(-robot_spread, robot_spread) for name in names}
        controller.set_robots(dict.fromkeys(names, ""), 0)
        self._ends: list[tuple[float, str]] = []
        self._running: dict[str, tuple[int, int, bool, int]] = {}
        """by robot: version, task, whether it will succeed, when it began"""

    def publish(self, number: int, quality: Quality) -> None:
        """The gate lets a version in. The robots begin with the first one, not all at once."""
        self.qualities[number] = quality
        self.canary_episodes = 0
        self.controller.on_version(number, number - 1, self._now_ns())
        if not self._running:
            for robot in self._skill:
                self._begin(robot, self._dice.uniform(0, SUCCESS_S[1]))

    def step(self) -> list[RolloutDecision]:
        """The next episode ends, and another begins; what was decided."""
        self.now_s, robot = heapq.heappop(self._ends)
        version, task, success, began_ns = self._running[robot]
        dice, quality = self._dice, self.qualities[version]
        # A robot switches at once: what it began by another version is by both.
        versions = {version, self.controller.version_for(robot)}
        for number in versions:
            self.acted.setdefault(number, set()).add(robot)
        human = dice.uniform(0, 0.5) if dice.random() < quality.human else 0.0
        stopped = dice.random() < quality.stops
        self.canary_episodes += versions == {self.controller.canary}
        now_ns = self._now_ns()
        self.controller.on_episode(robot, versions, f"task{task}", success, human, stopped, began_ns, now_ns)
        self._begin(robot, self.now_s)
        return self.controller.pop_decisions()

    def run(self, for_s: float) -> list[RolloutDecision]:
        """Episodes for so long; what was decided."""
        end_s, decisions = self.now_s + for_s, []
        while self._ends[0][0] < end_s:
            decisions += self.step()
        self.now_s = end_s
        return decisions

    def _begin(self, robot: str, at_s: float) -> None:
        version = self.controller.version_for(robot)
        task = self._dice.randrange(len(TASKS))
        success = self._dice.random() < self._chance(version, task, robot)
        lasts_s = self._dice.uniform(*(SUCCESS_S if success else FAILURE_S))
        self._running[robot] = version, task, success, int(at_s * 1e9)
        heapq.heappush(self._ends, (at_s + lasts_s, robot))

    def _chance(self, version: int, task: int, robot: str) -> float:
        mean = self.qualities[version].success
        if mean <= 0:
            return 0.0
        spread = TASKS[task] * min(1.0, (1 - mean) / 0.1, mean / 0.1)
        return min(max(mean + spread + self._skill[robot] - self.harder, 0.0), 1.0)

    def _now_ns(self) -> int:
        return int(self.now_s * 1e9)
