"""A gateway with its scheduler, robots that report, and whoever calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.store.objects import open_objects
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_exchange import WeightExchange
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.sessions import OperatorSessions
from cloud_learner.operator.view import FleetView
from cloud_learner.rollout.config import RolloutConfig
from hal.resource.admitted_robots import AdmittedRobots
from tests import samples
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from wire.clock import ManualClock
from wire.messages import Message
from wire.messages.fleet import JobRequest, JobState, ListFleet, Response, RobotState
from wire.messages.gateway import Hello, OperatorCommand, Publish, WeightBytes
from wire.transport.channel import Channel
from wire.transport.memory_channel import MemoryClient, MemoryServer
from wire.types import PolicyVersion
from wire.weights.manifest import Signer

TASKS = ("reach", "push")


class Hall:
    """A gateway on a data directory with a clock that the test moves."""

    def __init__(
        self,
        root: Path,
        clock: ManualClock | None = None,
        server: MemoryServer | None = None,
        stops: Callable[[ManualClock], StopServer] | None = None,
        ledger: str = "",
        signer: Signer | None = None,
        rollout: RolloutConfig | None = None,
        objects: Path | None = None,
        robots: AdmittedRobots | None = None,
    ) -> None:
        """`objects`: where gateways on the same ledger have each other's versions; `robots`: else `SPEC`'s."""
        self.root = root
        self.clock = clock or ManualClock(10**9)
        self.server = server or MemoryServer()
        self.ledger, store = BufferLocation(root, ledger).open_writer()
        self.ingest = Ingest(self.ledger, store, self.clock, self.server.may_teach)
        self.ingest.open()
        self.view = FleetView(self.clock)
        self.stops = stops(self.clock) if stops is not None else None
        give = self.stops.give if self.stops is not None else None
        self.desk = OperatorSessions(self.view, clock=self.clock, stop=give)
        self.signer, self.rollout, self.objects, self.admitted = signer, rollout, objects, robots
        weights = WeightStore.open(root / "weights", self.ledger, signer=signer)
        if objects is not None:
            weights.exchange = WeightExchange(
                root / "weights", self.ledger, open_objects(f"file://{objects}"), look_s=0
            )
        self.gateway = Gateway(
            self.server,
            self.ledger,
            self.ingest,
            weights,
            self.view,
            robots or AdmittedRobots.of_one(SPEC, TASKS),
            self.clock,
            lambda: self.clock.now_ns(),
            self.stops,
            rollout,
        )
        self.edges: list[FakeEdge] = []
        self.calls = 0

    def killed(self) -> Hall:
        """Another gateway on the same data, as after a kill -9."""
        self.ledger.close()
        signer, rollout, objects, robots = self.signer, self.rollout, self.objects, self.admitted
        again = Hall(self.root, self.clock, self.server, signer=signer, rollout=rollout, objects=objects, robots=robots)
        again.edges = self.edges
        return again

    def edge(self, name: str, **options: object) -> FakeEdge:
        edge = FakeEdge(name.partition("@")[0], self.server.connect(name), self.clock, **options)  # type: ignore[arg-type]
        edge.hello()
        self.edges.append(edge)
        self.gateway.poll()
        edge.poll()
        edge.between()
        return edge

    def pass_time(self, seconds: float, work: bool = False) -> None:
        """Robots report five times a second; with `work` each runs an episode every second."""
        for tick in range(round(5 * seconds)):
            self.clock.advance(200_000_000)
            for edge in self.edges:
                edge.poll()
                edge.between()
                if edge.welcomed:
                    edge.status()
                if work and tick % 5 == 0:
                    edge.episode()
            self.gateway.poll()
        for edge in self.edges:
            edge.poll()

    def peer(self, name: str = "console") -> MemoryClient:
        peer = self.server.connect(name)
        key = name.partition("@")[0]
        peer.send(Hello(key, key.partition("-")[0].rstrip("0123456789"), "c", 1, 99))
        self.gateway.poll()
        assert self.received(peer)
        return peer

    def received(self, peer: Channel) -> list[Message]:
        found = []
        while (message := peer.recv()) is not None:
            found.append(message)
        return found

    def ask(self, peer: MemoryClient, message: Message) -> Response:
        peer.send(message)
        self.gateway.poll()
        return next(m for m in self.received(peer) if isinstance(m, Response))

    def robots(self, peer: MemoryClient) -> dict[str, RobotState]:
        return {robot.name: robot for robot in self.ask(peer, ListFleet(1)).robots}

    def jobs(self, peer: MemoryClient) -> dict[str, JobState]:
        return {job.request.id: job for job in self.ask(peer, ListFleet(1)).jobs}

    def publish(self, number: int, data: bytes = b"", parent: int = -1) -> MemoryClient:
        """As a trainer, which is returned; `data`: the weights, else good ones; `parent`: else the one before."""
        parent = number - 1 if parent < 0 else parent
        trainer = self.server.connect("trainer")
        trainer.send(Hello("trainer", "trainer", "c", 1))
        data = data or samples.weights(number, 300)
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), parent, 10, 20, 3)
        trainer.send(Publish(version))
        trainer.send(WeightBytes(number, 0, data))
        self.gateway.poll()
        return trainer

    def lease(self, robot: str) -> tuple[str, str] | None:
        lease = self.gateway._dispatcher.leases.of(robot, self.clock.now_ns())
        return (lease.holder, lease.purpose) if lease else None


def canary(version: int = 0, episodes: int = 3, **more: object) -> JobRequest:
    fields: dict = {"id": "canary", "kind": "evaluation", "tasks": (), "robots": 1, "episodes": episodes}
    return JobRequest(**(fields | {"version": version} | more))


def page(hall: Hall, operator: int, kind: str, robot: str = "robot-0", **more: object) -> None:
    made = {"captured_ms": hall.clock.now_ns() / 1e6}
    hall.desk.handle_message(operator, msgspec.json.encode({"type": kind, "robot": robot, **made, **more}))
    hall.gateway.poll()
    for edge in hall.edges:
        edge.poll()


def commands(edge: FakeEdge) -> list[str]:
    return [message.kind for message in edge.received if isinstance(message, OperatorCommand)]
