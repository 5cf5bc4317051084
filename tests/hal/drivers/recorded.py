"""An episode of the fake robot, recorded as the edge records it and stored in a real buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cloud_learner.buffer.location import BufferLocation
from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from robot_edge.uplink.segments import SegmentBuilder
from wire.clock import ManualClock
from wire.messages.gateway import Segment
from wire.types import Actor, Episode, Observation, Step

ID = "robot-0/e7"


@dataclass
class Recorded:
    """What the robot saw and did, tick by tick, and the segments made of it."""

    seen: list[Observation] = field(default_factory=list)
    proposed: list[np.ndarray] = field(default_factory=list)
    done: list[Feedback] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def record(
    ticks: int = 60, outcome: str = "success", finished: bool = True, config: FakeConfig | None = None
) -> Recorded:
    """The fake robot driven by its expert, three times as hard as it may, in segments of 25 steps."""
    clock = ManualClock(5 * 10**9)
    robot = FakeRobot(config or FakeConfig(image_px=32), clock)
    robot.connect()
    robot.reset("go-right", 3)
    expert = FakeExpert(robot)
    episode = Episode(ID, "robot-0", robot.spec.hash, "go-right", 3, "online", clock.now_ns())
    builder = SegmentBuilder(episode, 25)
    found = Recorded()
    frame_ns = -1
    for tick in range(ticks):
        clock.advance(1_000_000)
        seen = robot.read()
        action = expert.propose(seen)
        assert action is not None
        proposed = (3 * action).astype(np.float32)
        done = robot.write(proposed)
        frame = seen.images["front"]
        if frame.time_ns != frame_ns:
            frame_ns = frame.time_ns
            builder.frame("front", frame_ns, frame.image)
        step = Step(
            tick, seen.time_ns, seen.state, proposed, done.executed, Actor.script, {"front": frame_ns}, -1, -1, 0,
            done.reward,
        )  # fmt: skip
        segment = builder.step(step)
        found.segments += [segment] if segment is not None else []
        found.seen.append(seen)
        found.proposed.append(proposed)
        found.done.append(done)
        clock.advance(robot.spec.period_ns - 1_000_000)
    if finished:
        segment = builder.end(outcome, clock.now_ns())
        assert segment is not None
        found.segments.append(segment)
    return found


def stored(data: Path, recorded: Recorded) -> Path:
    """`data`, the directory of a fleet whose buffer has the episode."""
    ledger, store = BufferLocation(data).open_writer()
    ledger.see_robot("robot-0", FakeRobot(FakeConfig(image_px=32)).spec, "clock", 1)
    assert None not in store.append_all([(segment, 5) for segment in recorded.segments], 6)
    store.close()
    ledger.close()
    return data
