"""A gateway, a trainer that publishes, and a robot that has what it is offered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_edge.uplink.weights import plan
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from robot_edge.uplink.weights.subscriber import WeightSubscriber
from tests.cloud_learner.dispatch.hall import Hall
from tests.cloud_learner.fake_edge import SPEC
from tests.wire.weights.files import delta_of, floats, version_of
from wire.clock import ManualClock, clock_name
from wire.messages.gateway import FetchWeights, Hello, Publish, Rejection, WeightBytes
from wire.transport.faults import FaultPlan, FaultWindow
from wire.transport.memory_channel import MemoryClient, MemoryServer, memory_pair
from wire.types import PolicyVersion
from wire.weights import manifest
from wire.weights.manifest import Signer

SECOND = 1_000_000_000
CHUNK, PART = 4096, 100_000


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a version of some kilobytes has many."""
    monkeypatch.setattr(manifest, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(plan, "CHUNK_BYTES", CHUNK)


class Fleet:
    """Everything is polled a hundred times a second of a clock that the test moves."""

    def __init__(
        self,
        root: Path,
        count: int = 8000,
        faults: FaultWindow | None = None,
        seed: int = 0,
        relay: Callable[[FetchWeights], Iterable[WeightBytes | Rejection]] | None = None,
    ) -> None:
        """`count`: of values in a version; `faults`: of the robot's connection, from now on; `relay`: what it answers
        to a robot, which has none by default."""
        self.root, self.clock, self._count, self._faults, self._seed = root, ManualClock(SECOND), count, faults, seed
        self.server = MemoryServer(clock=self.clock)
        self.hall = Hall(root / "gateway", self.clock, self.server, signer=Signer(b"x" * 32))
        self.files: dict[int, bytes] = {}
        self.deltas: dict[int, bytes] = {}
        self._random = np.random.default_rng(seed)
        self._trained = self._random.standard_normal(count, np.float32)
        self.arrived: list[int] = []
        self.killed: list[object] = []
        """kept: what they have not written yet is never written while the test runs"""
        self.relay = relay
        self.relayed: list[FetchWeights] = []
        """what the relay was asked for"""
        self.start_robot()

    # --- who is there ---------------------------------------------------------------------------------------------

    @property
    def client(self) -> WeightClient:
        return self.robot._client

    @property
    def source(self) -> RelaySource:
        """The relay, as the robot has it."""
        assert self.client._requests.relay is not None
        return self.client._requests.relay

    @property
    def here(self) -> Path:
        return self.root / "robot"

    def connect(self) -> MemoryClient:
        """The robot's line, as bad as it is."""
        if self._faults is not None:
            end_s = self._faults.end_s - (self.clock.now_ns() - SECOND) / SECOND
            windows = (replace(self._faults, end_s=end_s),) if end_s > 0 else ()
            self.server._faults = FaultPlan(windows, self._seed + len(self.killed))
        channel = self.server.connect("robot-0")
        self.server._faults = None
        return channel

    def start_robot(self) -> None:
        """As after a kill, on the same directory."""
        channel = self.connect()
        hello = Hello("robot-0", "edge", clock_name(), 0, 7, SPEC, ("reach",))
        if hasattr(self, "robot"):
            self.killed.append(self.robot)
        self.robot = WeightSubscriber(hello, channel, self.here, self.clock)
        if self.relay is not None:
            self._relay, near = memory_pair()
            self._link = near
            self.robot._client = WeightClient(self.here, channel, self.clock, relay=RelaySource(near, self.clock))

    def restart_gateway(self) -> None:
        self.killed.append(self.hall)
        self.hall = self.hall.killed()

    # --- what happens ---------------------------------------------------------------------------------------------

    def train(self) -> int:
        """The number of a version that is not published yet."""
        self._trained = self._trained + 1e-3 * self._random.standard_normal(self._count, np.float32)
        number, trained = len(self.files) + 1, floats(w=self._trained)
        if number == 1:
            self.files[1] = trained
        else:
            self.deltas[number], self.files[number] = delta_of(self.files[number - 1], trained)
        return number

    def publish(self, whole: bool = False) -> int:
        number = self.train()
        whole = whole or number == 1
        data = self.files[number] if whole else self.deltas[number]
        trainer = self.server.connect("trainer")
        trainer.send(Hello("trainer", "trainer", "c", 1))
        base, size = (0, 0) if whole else (number - 1, len(data))
        trainer.send(Publish(version_of(number, self.files[number]), (), base, size))
        for at in range(0, len(data), PART):
            trainer.send(WeightBytes(number, at, data[at : at + PART], not whole))
        self.hall.gateway.poll()
        assert self.hall.ledger.version(number) is not None
        return number

    def call_back(self, number: int) -> None:
        """To an older version."""
        self.hall.gateway._versions.announce("robot-0", number)

    def step(self) -> None:
        self.clock.advance(SECOND // 100)
        self.hall.gateway.poll()
        if self.relay is not None:
            self._pass_on(self.relay)
        before = self.robot.ready
        self.robot.poll()
        if self.robot.ready is not None and self.robot.ready != before:
            version, path = self.robot.ready
            assert hashlib.sha256(path.read_bytes()).hexdigest() == version.sha256
            assert path.read_bytes() == self.files[version.number]
            self.arrived.append(version.number)

    def run(self, seconds: float) -> None:
        for _ in range(round(100 * seconds)):
            self.step()

    def _pass_on(self, relay: Callable[[FetchWeights], Iterable[WeightBytes | Rejection]]) -> None:
        while (asked := self._relay.recv()) is not None:
            assert isinstance(asked, FetchWeights)
            self.relayed.append(asked)
            for part in relay(asked):
                self._relay.send(part)
        while (part := self._link.recv()) is not None:
            if isinstance(part, Rejection):
                assert part.request is not None
                self.client.on_relay_refused(part.request, part.reason)
            else:
                assert isinstance(part, WeightBytes)
                self.client.add_part(part, by_relay=True)

    def right(self, asked: FetchWeights) -> bytes:
        """What an honest relay answers."""
        data = self.deltas[asked.number] if asked.delta else self.files[asked.number]
        return data[asked.offset : asked.offset + asked.size]

    def until(self, done: Callable[[], object], most_s: float = 30.0) -> float:
        """How long it took."""
        began_ns = self.clock.now_ns()
        while not done():
            self.step()
            assert self.clock.now_ns() - began_ns < most_s * SECOND
        return (self.clock.now_ns() - began_ns) / SECOND

    def fetch(self, number: int, most_s: float = 30.0) -> int:
        """So many bytes it took to have this version."""
        before = self.client.fetched_bytes
        self.until(lambda: self.has(number), most_s)
        return self.client.fetched_bytes - before

    def half(self, number: int, size: int) -> None:
        """Until so many bytes of it are here."""
        client = self.client

        def is_half() -> bool:
            wanted, plan = client._wanted, client._plan
            is_wanted = wanted is not None and wanted.version.number == number
            return is_wanted and plan is not None and client._requests.written >= size

        self.until(is_half)

    def has(self, number: int) -> bool:
        return self.robot.ready is not None and self.robot.ready[0].number == number

    def file(self, number: int) -> Path:
        (found,) = self.here.glob(f"{number:08d}-*.safetensors")
        return found

    def coming(self) -> Path:
        """What is half here."""
        (found,) = self.here.glob("*.part")
        return found

    def version(self, number: int) -> PolicyVersion:
        return version_of(number, self.files[number])

    def size(self, first: int, last: int | None = None) -> int:
        """Of deltas together."""
        return sum(len(self.deltas[number]) for number in range(first, (last or first) + 1))
