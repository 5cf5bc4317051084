"""One episode in simulated time: the policy, chunk scheduler and limits of a robot, as fast as the machine allows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat

from fleet.evaluation.injected_delay import Delay
from hal.interfaces.robot import Robot
from hal.safety.bounds import rest_action
from hal.safety.limiter import SafetyLimiter, SafetyLimits
from policies.interface.policy import Policy
from robot_edge.chunking.scheduler import ChunkScheduler
from robot_edge.inference.infer_chunk import infer_chunk
from wire.clock import ManualClock, SimulatedClock
from wire.messages.local import ChunkReply


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
    extra_ticks: int = 0
    """on top of `delay`: what a robot of the fleet has anyway"""


def rollout(
    robot: Robot,
    policy: Policy,
    scheduler: ChunkScheduler,
    task: str,
    seed: int,
    max_ticks: int,
    conditions: Conditions,
) -> bool:
    """Whether `policy` succeeds at `task` from `seed` within `max_ticks`."""
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
            reply, ticks = infer_chunk(policy, latent, request), next(conditions.delay) + conditions.extra_ticks
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
        scheduler.on_executed(tick, feedback.executed)
        safety.note(feedback.executed, executed)
        if feedback.success:
            return True
        executed = feedback.executed
        conditions.clock.advance(robot.spec.period_ns)
    return False
