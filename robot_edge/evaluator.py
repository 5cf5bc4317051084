"""Measures policy versions on held-out seeds, as fast as the machine allows and out of everyone's way.

It runs the same policy, chunk schedule and limits as a robot, on a simulator without pacing. One episode per turn, so
that it hears of newer versions in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hal.robot import Robot
from policies.base import Policy
from robot_edge.planner import MakeSchedule, Planner
from robot_edge.rollout import Conditions, rollout
from robot_edge.weight_client import WeightClient
from wire.channel import Channel
from wire.clock import Clock, clock_name
from wire.errors import ConfigError
from wire.messages import (
    Announce,
    Evaluate,
    Evaluation,
    Heartbeat,
    Hello,
    Introduce,
    Refusal,
    Stop,
    WeightBytes,
    Welcome,
)
from wire.types import PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluatorConfig:
    """How versions are measured."""

    episodes: int = 5
    """per task at each point of the curve"""
    every_s: float = 60.0
    """time between the starts of two points"""
    first_seed: int = 1_000_000
    """of the curve's seeds; training never uses seeds from here on"""
    final_episodes: int = 25
    """per task, for the figures before and after"""
    final_first_seed: int = 2_000_000
    max_ticks: int = 200
    delay_ticks: int = 1
    """ticks between an observation and its chunk, about what a robot of the fleet has"""


class Evaluator:
    """`turn` runs at most one episode."""

    def __init__(
        self,
        name: str,
        robot: Robot,
        policy: Policy,
        schedule: MakeSchedule,
        tasks: tuple[str, ...],
        gateway: Channel,
        weights: Path,
        clock: Clock,
        config: EvaluatorConfig,
        only: Evaluate | None = None,
        conditions: Conditions | None = None,
        read: Callable[[Path], bytes] = Path.read_bytes,
    ) -> None:
        """`conditions`: what the episodes are run under; `robot` stamps with their clock.

        `only`: measure just this, then `done` turns true; otherwise the newest version at a steady cadence."""
        self._name = name
        self.robot = robot
        self._policy = policy
        self._planner = Planner(schedule)
        self._conditions = conditions or Conditions(extra_ticks=config.delay_ticks)
        self._tasks = tasks
        self._gateway = gateway
        self._clock = clock
        self._config = config
        self._only = only
        self._read = read
        self._client = WeightClient(weights, gateway, clock)
        self._welcomed = False
        self._next_hello_ns = 0
        self._next_point_ns = 0
        self._measured = 0
        self._work: deque[tuple[str, int]] = deque()
        self._now: Evaluate | None = None
        self._started_ns = 0
        self._wins: dict[str, int] = {}
        self.done = False
        self.refused = ""
        self.stopping = False

    def turn(self) -> None:
        """Hear what is new, then one episode if there is work."""
        while (message := self._gateway.recv()) is not None:
            match message:
                case Welcome():
                    self._welcomed, self.refused = True, ""
                case Introduce():
                    self._welcomed, self._next_hello_ns = False, 0
                case Announce(version=version):
                    self._announced(version)
                case WeightBytes():
                    self._client.received(message)
                case Refusal(reason=reason):
                    self.refused = reason
                    log.error("evaluator '%s' is refused by the gateway: %s", self._name, reason)
                case Stop():
                    self.stopping = True
                case _:
                    log.warning("evaluator does not understand %s.", type(message).__name__)
        self._client.turn()
        self._greet()
        if self._now is None:
            self._begin()
        if self._now is not None:
            self._episode()

    @property
    def busy(self) -> bool:
        return self._now is not None

    def _announced(self, version: PolicyVersion) -> None:
        if self._only is None or version.number == self._only.number:
            self._client.announced(version)

    def _begin(self) -> None:
        ready, now_ns = self._client.ready, self._clock.now_ns()
        if ready is None or self.done:
            return
        version, path = ready
        if self._only is None:
            if version.number == self._measured or now_ns < self._next_point_ns:
                return
            self._next_point_ns = now_ns + int(self._config.every_s * 1e9)
            # Every point of the curve is measured on the same held-out seeds.
            asked = Evaluate(version.number, self._config.episodes, self._config.first_seed, "cadence")
        else:
            asked = self._only
        if version.number != asked.number:
            return
        self._policy.load(self._read(path), version.number)
        self._planner.follow(self._policy.trained)
        if self._planner.refused:
            raise ConfigError(self._planner.refused)
        self._now, self._started_ns = asked, now_ns
        self._wins = dict.fromkeys(self._tasks, 0)
        self._work = deque((task, asked.first_seed + k) for k in range(asked.episodes) for task in self._tasks)

    def _episode(self) -> None:
        assert self._now is not None
        task, seed = self._work.popleft()
        self._wins[task] += rollout(
            self.robot,
            self._policy,
            self._planner.schedule,
            task,
            seed,
            self._config.max_ticks,
            self._conditions,
        )
        if self._work:
            return
        asked, self._now = self._now, None
        self._measured = asked.number
        self._gateway.send(
            Evaluation(
                number=asked.number,
                success={task: wins / asked.episodes for task, wins in self._wins.items()},
                episodes=asked.episodes,
                first_seed=asked.first_seed,
                label=asked.label,
                started_ns=self._started_ns,
                duration_s=(self._clock.now_ns() - self._started_ns) / 1e9,
            )
        )
        self.done = self._only is not None

    def _greet(self) -> None:
        now_ns = self._clock.now_ns()
        if now_ns < self._next_hello_ns:
            return
        self._next_hello_ns = now_ns + 1_000_000_000
        if self._welcomed:
            self._welcomed = self._gateway.send(Heartbeat(now_ns))
            if self._only is not None and self._client.ready is None:
                self._gateway.send(self._only)
        else:
            spec = self.robot.spec
            self._gateway.send(Hello(self._name, "evaluator", clock_name(), now_ns, 0, spec, self._tasks))
