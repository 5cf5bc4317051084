"""Episodes in simulated time with late answers: what `fleet.evaluation.evaluator.rollout` does, scored by its caller.

A tick is the control loop's: read, hear what came, ask, choose, limit, write, tell what was executed. The clock is
stepped by hand, so that ages are counted in simulated ticks however busy the machine is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hal.interfaces.robot import Robot
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from policies.interface.policy import Policy
from robot_edge.chunking.scheduler import ChunkScheduler
from robot_edge.inference.server import infer_chunk
from wire.clock import Clock, ManualClock
from wire.messages.local import ChunkReply
from wire.types import Latent, Observation


@dataclass(frozen=True, slots=True)
class Run:
    """One episode."""

    success: bool
    """an episode ends with it"""
    rewards: tuple[float, ...]
    """one a tick"""
    waited: int
    """ticks before the first action"""
    starved: int
    """ticks without an action after it, at which the robot held"""
    chunks: int
    """that were made for it"""


class SimulatedThinker(Protocol):
    """The slow path of one robot."""

    def begin(self) -> None:
        """A new episode: what was thought in the one before is void."""
        ...

    def look(self, observation: Observation) -> None:
        """What is seen, at every tick."""
        ...

    def newest(self, observation: Observation) -> Latent | None:
        """The newest latent for a chunk that is to be made now, None before the first."""
        ...


class AtOnce:
    """Thinks about the observation that a chunk is made from: what that takes is part of the chunk's delay."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def begin(self) -> None:
        """Nothing is kept."""

    def look(self, observation: Observation) -> None:
        """Nothing to do before a chunk is asked for."""

    def newest(self, observation: Observation) -> Latent:
        return self._policy.think(observation)


class Stage:
    """One simulated robot, used for many episodes."""

    def __init__(self, make_robot: Callable[[Clock], Robot]) -> None:
        self.clock = ManualClock(10**9)
        """what the robot stamps with"""
        self.robot = make_robot(self.clock)
        self.robot.connect()

    def play(
        self,
        policy: Policy,
        thinker: SimulatedThinker,
        scheduler: ChunkScheduler,
        task: str,
        seed: int,
        max_ticks: int,
        delays: Iterator[int],
        safety: SafetyLimits | None = None,
    ) -> Run:
        """One episode; a chunk can be used so many ticks after the observation it was asked with as `delays` says of
        it, and not before one that was asked for earlier. `safety`: limits of what is executed."""
        robot, spec = self.robot, self.robot.spec
        limiter = SafetyLimiter(spec, safety or SafetyLimits())
        robot.reset(task, seed)
        scheduler.reset(0)
        thinker.begin()
        executed = np.zeros(spec.action_dim, np.float32)
        coming: deque[tuple[int, ChunkReply]] = deque()
        rewards: list[float] = []
        waited = starved = chunks = 0
        begun = False
        for tick in range(max_ticks):
            observation = robot.read()
            thinker.look(observation)
            while coming and coming[0][0] <= tick:
                scheduler.submit(coming.popleft()[1], tick)
            request = scheduler.request_chunk(tick, observation)
            if request is not None:
                delay_ticks = next(delays)
                latent = thinker.newest(observation)
                if latent is None:
                    scheduler.submit(ChunkReply(None, "nothing is thought yet", request.tick), tick)
                else:
                    chunks += 1
                    coming.append((tick + delay_ticks, infer_chunk(policy, latent, request)))
                if latent is not None and not delay_ticks:
                    scheduler.submit(coming.popleft()[1], tick)
            chosen = scheduler.next_action(tick, observation)
            begun |= chosen is not None
            waited += not begun
            starved += begun and chosen is None
            state = observation.state
            wanted = limiter.brake(executed, state) if chosen is None else limiter.limit(chosen[0], executed, state)
            feedback = robot.write(wanted)
            limiter.note(feedback.executed, executed)
            executed = feedback.executed
            scheduler.on_executed(tick, executed, waited=chosen is None)
            self.clock.advance(spec.period_ns)
            rewards.append(feedback.reward)
            if feedback.success:
                return Run(True, tuple(rewards), waited, starved, chunks)
        return Run(False, tuple(rewards), waited, starved, chunks)

    def close(self) -> None:
        self.robot.close()
