"""The control loop with the fake robot, recorded; the test plays uplink and inference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hal.drivers.fake import FAKE_LIMITS, FAKE_TASKS, FakeConfig, FakeExpert, FakeRobot, Faults
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.interfaces.robot import HoldingRobot, Teleoperator
from hal.safety.limited_robot import LimitedRobot
from robot_edge.chunking.config import ChunkingConfig
from robot_edge.chunking.factory import make_scheduler
from robot_edge.chunking.scheduler import ChunkScheduler
from robot_edge.control.config import GateConfig, LoopConfig
from robot_edge.control.loop import ControlLoop
from robot_edge.flight_recorder.events import FlightHeader
from robot_edge.flight_recorder.recorder import FlightRecorder
from robot_edge.flight_recorder.writer import FlightConfig
from tests.people import Person
from wire.clock import Clock, ManualClock
from wire.messages import Message
from wire.messages.gateway import Job, VersionActivated
from wire.messages.local import ChunkReply, ChunkRequest
from wire.transport.channel import Channel
from wire.transport.frame_ring import FrameRing
from wire.transport.memory_channel import memory_pair
from wire.types import ActionChunk, Frame, PolicyCapabilities, ResidualPolicy

FAKE = FakeConfig(image_px=32)
CORRECTOR = ResidualPolicy(
    (np.full((4, 4 + 900 + 4 + 2), 1e-3, np.float32),), (np.zeros(4, np.float32),), np.zeros(4), np.ones(4), 3
)


def make_loop(
    header: FlightHeader,
    robot: HoldingRobot,
    uplink: Channel,
    inference: Channel,
    clock: Clock,
    operator: Teleoperator | None,
) -> ControlLoop:
    """As the program would: from the header and the borders alone."""
    return ControlLoop(
        header.name,
        header.session_id,
        robot,
        uplink,
        inference,
        lambda trained: _scheduler(header, trained),
        clock,
        header.config,
        operator,
    )


def _scheduler(header: FlightHeader, trained: PolicyCapabilities) -> ChunkScheduler:
    motion = SpecMotion(header.spec, [ActionStateMapping(f"move_{axis}", axis, 0.01) for axis in "xyz"])
    return make_scheduler(header.chunking, header.spec, trained, motion)


class Lossy:
    """A line that takes no message while `full`."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.full = False

    def send(self, message: Message) -> bool:
        return not self.full and self._inner.send(message)

    def recv(self) -> Message | None:
        return self._inner.recv()

    def close(self) -> None:
        self._inner.close()


class Bench:
    """A recorded loop; `fly` ticks it."""

    def __init__(
        self,
        directory: Path,
        fake: FakeConfig = FAKE,
        *,
        operated: bool = False,
        chunking: dict[str, Any] = {},
        **config: float,
    ) -> None:
        self.clock = ManualClock(1_000_000)
        self.person = Person(self.clock, operator="web")
        self.robot = FakeRobot(fake, self.clock)
        self.robot.connect()
        self.uplink, uplink = memory_pair()
        self.inference, inference = memory_pair()
        self.up, self.inf = Lossy(uplink), Lossy(inference)
        self.header = FlightHeader(
            "robot-0",
            "boot",
            self.robot.spec,
            LoopConfig(max_ticks=60, tail_ticks=2, gate=GateConfig(min_ticks=5)),
            ChunkingConfig(**{"strategy": "aligned", "execute_ticks": 6, **chunking}),
            operated=operated,
        )
        self.flight = FlightRecorder(directory, self.header, replace(FlightConfig(flush_s=0.05), **config))
        self.loop = make_loop(
            self.header,
            self.flight.border("robot", LimitedRobot(self.robot, FAKE_LIMITS)),
            self.flight.border("uplink", self.up),
            self.flight.border("inference", self.inf),
            self.flight.border("clock", self.clock),
            self.flight.border("operator", FakeExpert(self.robot)) if operated else None,
        )
        self.flight.start()
        self.rng = np.random.default_rng(0)
        self.sent: list[Message] = []
        self.modes: list[str] = []
        self._late: list[tuple[int, ChunkReply]] = []
        self._ticks: Iterator[int] = itertools.count(1)

    def ready(self, trained: PolicyCapabilities = PolicyCapabilities()) -> Bench:
        self.uplink.send(Job("j", FAKE_TASKS, 500_000))
        self.uplink.send(VersionActivated("robot-0", 3, 0, trained))
        return self

    def fly(self, count: int) -> Bench:
        """Answers come 0 to 7 ticks late, in any order; ticks start up to 3 ms late."""
        for _ in range(count):
            tick = next(self._ticks)
            self.clock.advance(int(self.rng.integers(0, 3_000_000)))
            self.flight.tick(self.loop)
            self.modes.append(self.loop.mode.value)
            while (request := self.inference.recv()) is not None:
                if not isinstance(request, ChunkRequest):
                    continue
                actions = self.rng.uniform(-1, 1, (16, 4)).astype(np.float32)
                chunk = ActionChunk(actions, request.first_tick, self.robot.spec.period_ns, 3, 0, 0)
                latent = np.full(900, tick / 100, np.float32) if request.residual else None
                reply = ChunkReply(chunk, "", request.tick, latent, CORRECTOR if request.residual else None)
                self._late.append((tick + int(self.rng.integers(0, 8)), reply))
            for due in [late for late in self._late if late[0] <= tick]:
                self._late.remove(due)
                self.inference.send(due[1])
            while (message := self.uplink.recv()) is not None:
                self.sent.append(message)
        return self

    def say(self, kind: str, *action: float, stop: str = "") -> Bench:
        self.uplink.send(self.person(kind, *action, stop=stop))
        return self

    def land(self) -> Bench:
        self.flight.close()
        return self


def shared(bench: Bench, path: Path, keep_s: float) -> None:
    """Its frames lie in a ring, as those of a hosted robot do."""
    ring, film = FrameRing(path, bench.robot.spec, write=True, keep_s=keep_s), bench.robot._film

    def put() -> Frame:
        frame = ring.view("front", ring.put("front", film()))
        assert frame is not None
        return frame

    bench.robot._film = put  # type: ignore[method-assign]


def eventful(directory: Path, **config: float) -> Bench:
    """Episodes with late answers, the scripted operator, a person, skipped periods, an e-stop, NaN from a joint, lines
    that are full.
    """
    fake = replace(FAKE, faults=Faults(nan_state=True, from_tick=45))
    bench = Bench(directory, fake, operated=True, **config).fly(3).ready().fly(30)
    bench.say("take_over")
    for _ in range(5):
        bench.say("command", 0.0, 0.0, 0.3, 0.0).fly(1)
    bench.say("hand_back").fly(12)
    bench.clock.advance(4 * bench.robot.spec.period_ns)
    bench.fly(8).say("estop").fly(6).say("release_estop", stop="web").say("start").fly(8)
    bench.inf.full = True
    bench.fly(12)
    bench.inf.full, bench.up.full = False, True
    bench.fly(26)
    bench.up.full = False
    return bench.fly(20).say("estop").fly(3).say("release_estop", stop="web").say("start").fly(20).land()
