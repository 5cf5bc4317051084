"""A robot's uplink, a bad connection and a gateway with little credit, by one clock and one seed."""

from __future__ import annotations

import random
from collections import Counter, deque
from pathlib import Path

from robot_edge.uplink.server import Uplink
from tests import samples
from wire.clock import ManualClock
from wire.codec import encode
from wire.messages import Message
from wire.messages.gateway import (
    Ack,
    EdgeStatus,
    Heartbeat,
    Hello,
    HelloAck,
    Nack,
    Segment,
)
from wire.messages.local import EpisodeEnded, EpisodeStarted, FrameRecorded, StepRecorded
from wire.transport.channel import Channel
from wire.transport.faults import FaultPlan
from wire.transport.memory_channel import MemoryPairEnd, memory_pair
from wire.types import Actor, Frame

SECOND = 1_000_000_000
TICK_S = 0.05
CLOCK = "the gateway's"


class SendLog:
    """Keeps the `Channel` protocol: the uplink's end of its connection, and what it sent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sent: list[Message] = []

    def send(self, message: Message) -> bool:
        if not self.channel.send(message):
            return False
        self.sent.append(message)
        return True

    def recv(self) -> Message | None:
        return self.channel.recv()

    def close(self) -> None:
        self.channel.close()


class Gateway:
    """Stores segments after a while, each once; says how much it takes."""

    def __init__(self, line: MemoryPairEnd, clock: ManualClock, draw: random.Random) -> None:
        self._line, self._clock, self._draw = line, clock, draw
        self._waiting: deque[Segment] = deque()
        self.stored: dict[str, Segment] = {}
        self.stored_ns: dict[str, int] = {}
        self.came: Counter[str] = Counter()
        """how often each segment came"""
        self.messages: list[Message] = []
        """all but segments"""
        self.credit_bytes = 8 * 1024 * 1024
        self.bytes_per_s = 1e9
        self.cannot_store = self.stands_still = False
        self._free_ns = 0

    def poll(self) -> None:
        if self.stands_still:
            return
        while (message := self._line.recv()) is not None:
            match message:
                case Segment():
                    self.came[message.id] += 1
                    self._waiting.append(message)
                case Hello(sent_ns=sent_ns) | Heartbeat(sent_ns=sent_ns):
                    self.messages.append(message)
                    self._line.send(HelloAck(CLOCK, self._clock.now_ns() + 1, sent_ns, credit_bytes=self.credit_bytes))
                case _:
                    self.messages.append(message)
        now_ns = self._clock.now_ns()
        while self._waiting and self._free_ns < now_ns + TICK_S * SECOND:
            segment = self._waiting.popleft()
            self._free_ns = max(self._free_ns, now_ns) + round(len(encode(segment)) / self.bytes_per_s * 1e9)
            if self.cannot_store:
                self._line.send(Nack("the disk is full"))
                continue
            if segment.id not in self.stored:
                self.stored[segment.id] = segment
                self.stored_ns[segment.id] = now_ns
            self._line.send(Ack((segment.id,), credit_bytes=self.credit_bytes))

    def of(self, kind: type) -> list:
        return [message for message in self.messages if isinstance(message, kind)]


class World:
    """`pass_time` plays it; control records what `record` says, one step a tick."""

    def __init__(self, root: Path, seed: int = 0, plan: FaultPlan | None = None, spool_bytes: int = 0) -> None:
        self.root, self.draw, self.spool_bytes = root, random.Random(seed), spool_bytes
        self.clock = ManualClock(1000 * SECOND)
        line, far = memory_pair(plan, self.clock)
        self.line = SendLog(line)
        self.gateway = Gateway(far, self.clock, self.draw)
        self.episodes: dict[str, bool] = {}
        """by id, whether somebody acted in it besides the policy, as far as it was recorded"""
        self.script: deque[Message] = deque()
        """what control says, a list for each tick"""
        self.number = 0
        self.held: list[str] = []
        self.start()

    def start(self) -> None:
        """An uplink, perhaps after another one was killed with all that it had in memory."""
        self.control, control = memory_pair()
        self.uplink = Uplink(
            "robot-0",
            self.root / "edge",
            self.line,
            control,
            memory_pair()[0],
            self.clock,
            10,
            spool_bytes=self.spool_bytes,
        )
        # Nobody cuts the power of this machine, and a flush takes long where many tests run.
        self.uplink.spool._db.execute("PRAGMA synchronous=OFF")
        self.control.send(Hello("robot-0", "edge", "c", 1, 77, samples.spec(), ("reach",)))

    def record(self, steps: int, human: range = range(0)) -> str:
        """An episode whose steps `human` a person acts in; its id. It is said tick by tick."""
        self.number += 1
        episode = samples.episode(number=self.number)
        self.script.append(EpisodeStarted(episode))
        for tick in range(steps):
            actor = Actor.human if tick in human else Actor.policy
            if tick % 4 == 0:
                self.script.append(FrameRecorded(episode.id, "front", Frame(10 * tick + 1, samples.image(tick))))
            step = samples.step(tick, actor, frame_ns=10 * (tick - tick % 4) + 1)
            self.script.append(StepRecorded(episode.id, step))
        self.script.append(EpisodeEnded(episode.id, "success", 10**9))
        return episode.id

    def say_all(self) -> None:
        """All that control has to say, at once."""
        while self.script:
            self.control.send(self.script.popleft())

    def say_some(self) -> None:
        """What control has to say in a tick."""
        while self.script:
            message = self.script.popleft()
            self.control.send(message)
            if isinstance(message, StepRecorded | EpisodeEnded):
                return

    def show_status(self) -> None:
        state = samples.step(0).state
        status = EdgeStatus(
            "robot-0", self.clock.now_ns(), "policy", "", "reach", "e", 1, state, 1, 1, 0, 0.0, 0, 0, 0, 0, 0
        )
        self.control.send(status)

    def tick(self, seconds: float = TICK_S) -> None:
        self.clock.advance(round(seconds * SECOND))
        self.say_some()
        self.uplink.poll()
        self.gateway.poll()
        while (message := self.control.recv()) is not None:
            if isinstance(message, Nack):
                self.held.append(message.reason)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def drain(self, most_s: float = 600.0) -> float:
        """Until all is acknowledged; how long that took."""
        began_ns = self.clock.now_ns()
        while self.script or len(self.uplink.spool) or self.uplink._recorder.unspooled:
            self.tick()
            assert self.clock.now_ns() - began_ns < most_s * SECOND, f"{len(self.uplink.spool)} segments stay"
        return (self.clock.now_ns() - began_ns) / SECOND

    def sent(self, kind: type) -> list:
        return [message for message in self.line.sent if isinstance(message, kind)]

    def close(self) -> None:
        self.uplink.close()
