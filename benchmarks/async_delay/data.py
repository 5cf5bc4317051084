"""Demonstrations for benchmarks of late actions: a scripted operator who is pushed off its way and comes back.

A policy that acts late is somewhere its operator never was. So the operator's arm is pushed now and then, for a few
ticks, at random, as in DART (Laskey et al. 2017, arXiv 1703.09327). The ticks of a push are recorded as held: nobody
chose them, and no window of training reaches over them. What the operator does afterwards is what is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.async_delay.track import TrackRobot
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.maintenance.shard_writer import seal
from hal.drivers.metaworld.robot import MetaWorldRobot
from hal.drivers.metaworld.simulation import CONTROL_HZ
from hal.interfaces.robot import Robot, Teleoperator
from robot_edge.uplink.segments import SegmentBuilder
from wire.clock import Clock, ManualClock
from wire.types import Actor, Episode, Step

_ROBOT = "demonstrator"
_PERIOD_NS = round(1e9 / CONTROL_HZ)


@dataclass(frozen=True, slots=True)
class Pushes:
    """How the operator is disturbed."""

    share: float = 0.75
    """of the episodes that have any"""
    calm_ticks: tuple[int, int] = (20, 60)
    """between two pushes, drawn evenly"""
    push_ticks: tuple[int, int] = (4, 16)
    """how long one lasts"""
    strength: tuple[float, ...] = (0.3, 0.6, 1.0)
    """deviations of what is added to the action, one of them in each push"""


DEFAULT_PUSHES = Pushes()


def pushed(pushes: Pushes, rng: np.random.Generator) -> Iterator[np.ndarray | None]:
    """For each tick of an episode what is added to the operator's action, float64[4], or None."""
    disturbed = rng.random() < pushes.share
    while True:
        for _ in range(rng.integers(*pushes.calm_ticks, endpoint=True)):
            yield None
        if not disturbed:
            continue
        # the gripper is disturbed little: what falls out of it is seldom found again
        size = rng.choice(pushes.strength) * np.array([1.0, 1.0, 1.0, 0.2])
        steady, swing = size * rng.standard_normal(4), np.zeros(4)
        for _ in range(rng.integers(*pushes.push_ticks, endpoint=True)):
            swing = 0.8 * swing + 0.6 * size * rng.standard_normal(4)
            yield steady + swing


def demonstrate(
    place: BufferLocation,
    make_robot: Callable[[Clock], MetaWorldRobot | TrackRobot],
    make_operator: Callable[[Any], Teleoperator],
    episodes: int,
    max_ticks: int,
    seed: int,
    pushes: Pushes = DEFAULT_PUSHES,
    after_success_ticks: int = 12,
) -> None:
    """Record `episodes` of each of the robot's tasks, in the scenes of `seed` and the ones after it.

    An episode ends so many ticks after its first success, or at `max_ticks`.
    """
    clock = ManualClock(10**9)
    robot = make_robot(clock)
    robot.connect()
    operator = make_operator(robot)
    ledger, store = place.open_writer()
    ledger.see_robot(_ROBOT, robot.spec, "simulated", time.monotonic_ns())
    try:
        for number in range(seed, seed + episodes):
            for task in robot.tasks:
                robot.reset(task, number)
                about = Episode(
                    f"{task}-{number}", _ROBOT, robot.spec.hash, task, number, "demonstration", clock.now_ns()
                )
                builder = SegmentBuilder(about, max_ticks)
                disturbance = pushed(pushes, np.random.default_rng((seed, number)))
                done = _play(robot, operator, clock, builder, disturbance, max_ticks, after_success_ticks)
                segment = builder.end("success" if done else "failure", clock.now_ns())
                assert segment is not None
                store.append_all([(segment, clock.now_ns())], clock.now_ns())
        seal(store, time.monotonic_ns(), force=True)
    finally:
        robot.close()
        store.close()
        ledger.close()


def _play(
    robot: Robot,
    operator: Teleoperator,
    clock: ManualClock,
    builder: SegmentBuilder,
    disturbance: Iterator[np.ndarray | None],
    max_ticks: int,
    after_success_ticks: int,
) -> bool:
    """Whether it succeeded."""
    left, taken = max_ticks, dict.fromkeys((c.name for c in robot.spec.cameras), -1)
    tick, done = 0, False
    while left > 0:
        observation = robot.read()
        for camera, frame in observation.images.items():
            if frame.time_ns > taken[camera]:
                taken[camera] = frame.time_ns
                builder.frame(camera, frame.time_ns, frame.image)
        action = operator.propose(observation)
        assert action is not None
        push = next(disturbance)
        wanted = action if push is None else np.clip(action + push, -1.0, 1.0).astype(np.float32)
        feedback = robot.write(wanted)
        left = min(left - 1, after_success_ticks) if feedback.success or done else left - 1
        done = done or feedback.success
        builder.step(
            Step(
                tick=tick,
                time_ns=observation.time_ns,
                state=observation.state,
                proposed=wanted,
                executed=feedback.executed,
                actor=Actor.script if push is None else Actor.hold,
                frames=dict(taken),
                chunk_tick=-1,
                delay_ticks=-1,
                version=0,
                reward=feedback.reward,
                terminated=left <= 0 and done,
                truncated=left <= 0 and not done,
            )
        )
        clock.advance(_PERIOD_NS)
        tick += 1
    return done
