"""Who connects to the drill's gateway: robots and an evaluator that throw dice by the version they were told of."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from robot_edge.uplink.segments import SegmentBuilder
from robot_edge.uplink.weights.client import WeightClient
from wire.clock import MonotonicClock, clock_name
from wire.messages import Message
from wire.messages.gateway import (
    Deltas,
    EdgeStatus,
    Evaluate,
    Evaluation,
    Hello,
    HelloAck,
    Job,
    VersionActivated,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient
from wire.types import Actor, Dimension, Episode, EpisodeOutcome, EpisodeSource, RobotSpec, Role, Step

SPEED = 100.0
"""so much shorter than a robot's the drill's episodes are"""
_SUCCESS_S, _FAILURE_S = (20.0, 30.0), (35.0, 45.0)
_STATUS_S = 0.2
Chance = Callable[[int], float]
"""of success by version"""


class DrillPeer:
    """A connection that a gateway lets in; `poll` is called all the time."""

    def __init__(self, address: str, keys: Path, hello: Hello) -> None:
        self.name, self.clock = hello.name, MonotonicClock()
        self.channel = ZmqClient(address, hello.name, keys)
        self.session = GatewaySession(self.channel, hello, self.clock)

    def poll(self) -> None:
        while (message := self.channel.recv()) is not None:
            self.session.handle_message(message)
            self.on_message(message)
        self.session.poll()

    def on_message(self, message: Message) -> None:
        """Of the gateway."""

    def close(self) -> None:
        self.channel.close()


class DrillRobot(DrillPeer):
    """Has the versions it is told of by the real client, and runs one short episode after the other by what is here."""

    def __init__(
        self,
        address: str,
        keys: Path,
        name: str,
        spec: RobotSpec,
        tasks: tuple[str, ...],
        weights: Path,
        chance: Chance,
    ) -> None:
        super().__init__(address, keys, Hello(name, Role.edge, clock_name(), 0, os.getpid(), spec, tasks))
        self._spec, self._chance, self._dice = spec, chance, random.Random(name)
        self._client = WeightClient(weights, self.channel, self.clock)
        self._client.check.spec_hash = spec.hash
        self._state = _middle(spec.state)
        self._job: Job | None = None
        self._count = 0
        self._ends_s = self._next_status_s = 0.0
        self._episode: tuple[int, str, bool, int] | None = None
        """by which version, of which task, whether it will succeed, when it began"""
        self.version = 0
        self.episodes: dict[int, int] = {}
        """that it ran by each version"""

    def on_message(self, message: Message) -> None:
        match message:
            case HelloAck():
                self._client.check.key = message.signing_key
            case Job():
                self._job = message
            case VersionAvailable() | Deltas() | WeightBytes():
                self._client.handle_message(message)

    def poll(self) -> None:
        super().poll()
        if self._client.poll() and self._client.ready is not None:
            self.version = self._client.ready[0].number
            self.channel.send(VersionActivated(self.name, self.version, self.clock.now_ns()))
        now_s = time.monotonic()
        if self._episode is not None and now_s >= self._ends_s:
            self._end()
        if self._episode is None and self.version and self._job is not None:
            self._begin(now_s, self._job)
        if now_s >= self._next_status_s and self.session.accepted:
            self._next_status_s = now_s + _STATUS_S
            self.channel.send(self._status())

    def _begin(self, now_s: float, job: Job) -> None:
        dice, task = self._dice, self._dice.choice(job.tasks)
        success = dice.random() < self._chance(self.version)
        self._episode = self.version, task, success, self.clock.now_ns()
        self._ends_s = now_s + dice.uniform(*(_SUCCESS_S if success else _FAILURE_S)) / SPEED

    def _end(self) -> None:
        assert self._episode is not None
        assert self._job is not None
        (version, task, success, began_ns), self._episode = self._episode, None
        self._count += 1
        self.episodes[version] = self.episodes.get(version, 0) + 1
        seed = self._job.first_seed + self._count
        name, source = f"{self.name}-{os.getpid()}-{self._count}", EpisodeSource.online
        about = Episode(name, self.name, self._spec.hash, task, seed, source, began_ns)
        builder, now_ns = SegmentBuilder(about, 10), self.clock.now_ns()
        still = _middle(self._spec.action)
        # one that was told of another version meanwhile ends its episode by that
        for tick, (time_ns, acted) in enumerate(((began_ns, version), (now_ns, self.version))):
            builder.step(Step(tick, time_ns, self._state, still, still, Actor.policy, {}, tick, 1, acted, 0.0))
        segment = builder.end(EpisodeOutcome.success if success else EpisodeOutcome.failure, now_ns)
        assert segment is not None
        self.channel.send(segment)

    def _status(self) -> EdgeStatus:
        return EdgeStatus(
            robot=self.name,
            time_ns=self.clock.now_ns(),
            mode="policy",
            reason="",
            task="",
            episode="",
            tick=0,
            state=self._state,
            version=self.version,
            ticks=1,
            missed_ticks=0,
            late_p99_s=0.0,
            starved_ticks=0,
            episodes=self._count,
            interventions=0,
            steps_recorded=2 * self._count,
            spooled=0,
        )


def _middle(dimensions: tuple[Dimension, ...]) -> np.ndarray:
    """float32[d] of the limits."""
    return np.array([(one.low + one.high) / 2 for one in dimensions], np.float32)


class DrillEvaluator(DrillPeer):
    """Answers what it is asked at once."""

    def __init__(self, address: str, keys: Path, tasks: tuple[str, ...], chance: Chance) -> None:
        super().__init__(address, keys, Hello("evaluator", Role.evaluator, clock_name(), 0, os.getpid()))
        self._tasks, self._chance, self._dice = tasks, chance, random.Random(1)
        self.episodes = 0

    def on_message(self, message: Message) -> None:
        if not isinstance(message, Evaluate):
            return
        chance, count = self._chance(message.number), message.episodes
        outcomes = {task: tuple(self._dice.random() < chance for _ in range(count)) for task in self._tasks}
        self.episodes += count * len(outcomes)
        success = {task: sum(won) / count for task, won in outcomes.items()}
        now_ns = self.clock.now_ns()
        self.channel.send(
            Evaluation(message.number, success, count, message.first_seed, message.label, now_ns, 0.0, outcomes)
        )
