"""Measures policy versions on held-out seeds, as fast as the machine allows and out of everyone's way.

It runs the same policy, chunk schedule and limits as a robot, on a simulator without pacing, and goes through robots of
several shapes in turn. One episode per step, so that it hears of newer versions in between. What the gateway asks for
goes before, but for the curve's points, each in its time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from fleet.evaluation.injected_delay import Delay
from hal.interfaces.robot import Robot
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from hal.safety.rest import rest_action
from hal.scheduler.episodes import HELD_OUT_SEEDS
from policies.interface.policy import Policy
from robot_edge.chunking.scheduler import ChunkScheduler, ChunkSchedulerSelector, MakeScheduler
from robot_edge.inference.server import infer_chunk
from robot_edge.inference.verified_load import load_verified
from robot_edge.uplink.weights.subscriber import WeightSubscriber
from wire.clock import Clock, ManualClock, SimulatedClock, clock_name
from wire.errors import ConfigError, RejectedError, SpecMismatchError
from wire.messages import Message
from wire.messages.gateway import GATE, Evaluate, Evaluation, Hello
from wire.messages.local import ChunkReply
from wire.transport.channel import Channel
from wire.types import PolicyVersion, Role

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
    earlier_tasks: tuple[str, ...] = ()
    """of the robot's, which the fleet does not practise: measured beside those of the recipe, so that what the policy
    could before is seen to stay"""
    delay_ticks: int = 1
    """ticks between an observation and its chunk, about what a robot of the fleet has"""

    def __post_init__(self) -> None:
        for name in ("episodes", "final_episodes", "max_ticks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"evaluator: {name} is {getattr(self, name)}; it must be positive.")
        if self.every_s < 0 or self.delay_ticks < 0:
            raise ConfigError(
                f"evaluator: every_s {self.every_s} and delay_ticks {self.delay_ticks} must not be negative."
            )
        for name in ("first_seed", "final_first_seed"):
            if getattr(self, name) not in HELD_OUT_SEEDS:
                raise ConfigError(
                    f"evaluator: {name} is {getattr(self, name)}; seeds below {HELD_OUT_SEEDS.start} are those of "
                    "training and of demonstrations."
                )


@dataclass(frozen=True, slots=True)
class Conditions:
    """How slow inference is."""

    clock: ManualClock = field(default_factory=SimulatedClock)
    """what the robot stamps with; it is moved by one control period per tick"""
    delay: Delay = field(default_factory=lambda: repeat(0))
    """ticks between an observation and its chunk"""
    think_every_s: float = 0.0
    """pace of the slow path; 0 thinks about every new frame that is asked about"""
    safety: SafetyLimits = field(default_factory=SafetyLimits)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """How an episode ended."""

    success: bool
    steps: int
    """control ticks it took"""


def rollout(
    robot: Robot,
    policy: Policy,
    scheduler: ChunkScheduler,
    task: str,
    seed: int,
    max_ticks: int,
    conditions: Conditions,
) -> RolloutResult:
    """What comes of `policy` at `task` from `seed` within `max_ticks`."""
    robot.reset(task, seed)
    scheduler.reset(0)
    safety = SafetyLimiter(robot.spec, conditions.safety)
    executed, latent, thought_ns = None, None, -1
    coming: deque[tuple[int, ChunkReply]] = deque()
    for tick in range(max_ticks):
        observation = robot.read()
        if executed is None:
            executed = rest_action(robot.spec, observation.state)
        while coming and coming[0][0] <= tick:
            scheduler.submit(coming.popleft()[1], tick)
        if (request := scheduler.request_chunk(tick, observation)) is not None:
            seen_ns = max((frame.time_ns for frame in observation.images.values()), default=observation.time_ns)
            if latent is None or seen_ns - thought_ns > conditions.think_every_s * 1e9:
                latent, thought_ns = policy.think(observation), seen_ns
            reply, ticks = infer_chunk(policy, latent, request), next(conditions.delay)
            if ticks:
                coming.append((tick + ticks, reply))
            else:
                scheduler.submit(reply, tick)
        chosen = scheduler.next_action(tick, observation)
        if chosen:
            action = safety.limit(chosen[0], executed, observation.state)
        else:
            action = safety.brake(executed, observation.state)
        feedback = robot.write(action)
        scheduler.on_executed(tick, feedback.executed, waited=chosen is None)
        safety.note(feedback.executed, executed)
        if feedback.success or feedback.terminated or feedback.truncated:
            return RolloutResult(feedback.success, tick + 1)
        executed = feedback.executed
        conditions.clock.advance(robot.spec.period_ns)
    return RolloutResult(False, max_ticks)


class EvaluatedRobot:
    """Robots of one shape: a simulator that stands for them, and what they run."""

    def __init__(
        self,
        robot: Robot,
        policy: Policy,
        make_scheduler: MakeScheduler,
        tasks: tuple[str, ...],
        max_ticks: int,
        conditions: Conditions,
        name: str = "",
    ) -> None:
        """`conditions`: what episodes of `max_ticks` at most are run under; `robot` stamps with their clock. `name`:
        what people call the shape, '' where there is but one."""
        self.robot, self.tasks, self.name = robot, tasks, name
        self._policy, self._max_ticks, self._conditions = policy, max_ticks, conditions
        self._chunks = ChunkSchedulerSelector(make_scheduler)

    def load(self, version: PolicyVersion, path: Path) -> None:
        """Act by this version from now on. Raises what `load_verified` raises, and `ConfigError` for one that the
        strategy is not for."""
        load_verified(self._policy, version, path)
        self._chunks.select(self._policy.trained)
        if self._chunks.refused:
            raise ConfigError(self._chunks.refused)

    def episode(self, task: str, seed: int) -> bool:
        """Whether it succeeded."""
        scheduler, conditions = self._chunks.scheduler, self._conditions
        return rollout(self.robot, self._policy, scheduler, task, seed, self._max_ticks, conditions).success


class Evaluator:
    """`step` runs at most one episode."""

    def __init__(
        self,
        name: str,
        robots: Sequence[EvaluatedRobot],
        gateway: Channel,
        weights: Path,
        clock: Clock,
        config: EvaluatorConfig,
        only: Evaluate | None = None,
    ) -> None:
        """`robots`: of each shape one.

        `only`: measure just this, then `done` turns true; otherwise the newest version at a steady cadence.
        """
        self.robots = tuple(robots)
        self._gateway = gateway
        self._clock = clock
        self._config = config
        self._only = only
        self._next_point_ns = 0
        self._measured = 0
        self._work: deque[tuple[EvaluatedRobot, str, int]] = deque()
        self._now: Evaluate | None = None
        self._started_ns = 0
        self._outcomes: dict[str, list[bool]] = {}
        self._asked: Evaluate | None = None
        """what the gateway waits for"""
        self._answer: Evaluation | None = None
        """to what it asked for last"""
        self.done = False
        spec = self.robots[0].robot.spec if len(self.robots) == 1 else None
        tasks = tuple(dict.fromkeys(task for one in self.robots for task in one.tasks))
        hello = Hello(name, Role.evaluator, clock_name(), 0, spec=spec, tasks=tasks)
        self.subscriber = WeightSubscriber(
            hello, gateway, weights, clock, take=self._take, wants=self._wants, remind=self._remind
        )

    def step(self) -> None:
        """Hear what is new, then one episode if there is work.

        Raises `RejectedError` when the one version that is to be measured is not to be had.
        """
        self.subscriber.poll()
        session = self.subscriber.session
        if self._only is not None and session.accepted and session.rejection:
            raise RejectedError(session.rejection)
        if self._now is None:
            self._begin()
        if self._now is not None:
            self._episode()

    @property
    def busy(self) -> bool:
        return self._now is not None

    def _wants(self, version: PolicyVersion) -> bool:
        return self._only is None or version.number == self._only.number

    def _remind(self) -> Message | None:
        return self._only if self.subscriber.ready is None else None

    def _take(self, asked: Message) -> bool:
        """The gateway waits for this, and no longer for what it asked for before."""
        if not isinstance(asked, Evaluate):
            return False
        last, now = self._answer, self._now
        if self._only is not None or (now is not None and _same(asked, now)):
            return True
        if last is not None and _same(asked, last):
            # it was lost on its way
            self._gateway.send(last)
            return True
        self._asked = asked
        if now is not None and now.label == GATE:
            self._now = None
        return True

    def _begin(self) -> None:
        ready, now_ns = self.subscriber.ready, self._clock.now_ns()
        if ready is None or self.done:
            return
        version, path = ready
        asked = self._only or self._asked
        # What the gateway asks for may be older than what was measured last.
        is_news = version.number > self._measured if self._asked is not None else version.number != self._measured
        if self._only is None and is_news and now_ns >= self._next_point_ns:
            self._next_point_ns = now_ns + int(self._config.every_s * 1e9)
            # Every point of the curve is measured on the same held-out seeds.
            asked = Evaluate(version.number, self._config.episodes, self._config.first_seed, "cadence")
        if asked is None or version.number != asked.number:
            return
        scenes = [(one, task) for one in self._driven_by(version, path) for task in one.tasks]
        self._now, self._started_ns = asked, now_ns
        self._outcomes = {self._label(*scene): [] for scene in scenes}
        self._work = deque((*scene, asked.first_seed + k) for k in range(asked.episodes) for scene in scenes)

    def _label(self, robot: EvaluatedRobot, task: str) -> str:
        """What people see: the task, and of robots of several shapes that have it in common also which."""
        common = sum(task in one.tasks for one in self.robots) > 1
        return f"{task} ({robot.name})" if common else task

    def _driven_by(self, version: PolicyVersion, path: Path) -> list[EvaluatedRobot]:
        """The robots that this version can drive: of those that share a policy some may not have joined it yet. Raises
        `SpecMismatchError` when it can drive none."""
        driven = []
        refusal: SpecMismatchError | None = None
        for one in self.robots:
            try:
                one.load(version, path)
                driven.append(one)
            except SpecMismatchError as error:
                refusal = error
        if refusal is not None and not driven:
            raise refusal
        return driven

    def _episode(self) -> None:
        assert self._now is not None
        robot, task, seed = self._work.popleft()
        self._outcomes[self._label(robot, task)].append(robot.episode(task, seed))
        if self._work:
            return
        asked, self._now = self._now, None
        measured = Evaluation(
            number=asked.number,
            success={task: sum(won) / asked.episodes for task, won in self._outcomes.items()},
            episodes=asked.episodes,
            first_seed=asked.first_seed,
            label=asked.label,
            started_ns=self._started_ns,
            duration_s=(self._clock.now_ns() - self._started_ns) / 1e9,
            outcomes={task: tuple(won) for task, won in self._outcomes.items()},
        )
        self._gateway.send(measured)
        if asked.label == GATE:
            self._asked, self._answer = None, measured
        else:
            self._measured = asked.number
        self.done = self._only is not None


def _same(asked: Evaluate, other: Evaluate | Evaluation) -> bool:
    facts = "number", "episodes", "first_seed", "label"
    return all(getattr(asked, name) == getattr(other, name) for name in facts)
