"""A gateway, whole and with a robot at work, and strangers and thieves of keys who send it what they like."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.fuzz.samples import SPEC, TASKS, hello, segment, status
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.peers import AuthenticatedServerChannel
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.view import FleetView
from hal.resource.admitted_robots import AdmittedRobots
from wire.clock import Clock, ManualClock
from wire.messages import Message
from wire.messages.fleet import JobRequest, SubmitJob
from wire.messages.gateway import Heartbeat, OperatorCommand, Publish, WeightBytes
from wire.transport.channel import Channel
from wire.transport.memory_channel import MemoryServer
from wire.types import OperatorCommandKind, PolicyVersion, Role

VICTIM, THIEF = "robot-0", "robot-7"
ATTACKERS = {
    THIEF: Role.edge,
    "robot-9": Role.edge,
    "trainer-1": Role.trainer,
    "evaluator-1": Role.evaluator,
    "thinker-1": Role.thinker,
    "demonstrator-1": Role.demonstrator,
    "relay-1": Role.relay,
    "console-1": Role.console,
    "teleoperator-1": Role.teleoperator,
}
"""whose keys were stolen; the second robot's never says hello"""
UNGREETED = "robot-9"
WEIGHTS = safetensors.numpy.save({"w": np.zeros(4, np.float32)})
_STATUS_NS = 200_000_000


class GatewayBench:
    """Everything of a gateway but its sockets, and the robot, trainer and console that use it as they should."""

    def __init__(
        self, root: Path, server: AuthenticatedServerChannel, apart: AuthenticatedServerChannel, clock: Clock
    ) -> None:
        self.server, self.apart, self.clock = server, apart, clock
        self.ledger, store = BufferLocation(root).open_writer()
        ingest = Ingest(self.ledger, store, clock, server.may_teach)
        ingest.open()
        self.view = FleetView(clock)
        self.stops = StopServer(apart, clock, 5762)
        weights = WeightStore.open(root / "weights", self.ledger)
        self.gateway = Gateway(
            server,
            self.ledger,
            ingest,
            weights,
            self.view,
            AdmittedRobots.of_one(SPEC, TASKS),
            clock,
            clock.now_ns,
            self.stops,
        )
        self._next_status_ns = 0

    def poll(self) -> None:
        self.stops.poll()
        self.gateway.poll()

    def fingerprint(self) -> dict[str, Any]:
        """What none of those who attack may change: all that is the victim's, and the fleet's versions and jobs."""
        dispatcher, now_ns = self.gateway._dispatcher, self.clock.now_ns()
        lease, claim = dispatcher.leases.of(VICTIM, now_ns), dispatcher.operators.stop_states().get(VICTIM)
        newest, row = self.ledger.newest_version(), self.ledger.robot(VICTIM)
        return {
            "lease": lease and (lease.holder, lease.purpose, lease.number),
            "stops": claim,
            "driver": dispatcher.operators.driver(VICTIM),
            "spec": self.view.spec(VICTIM),
            "episodes": self.ledger.episodes_of_robot(VICTIM),
            "version": newest and newest.version,
            "jobs": sorted(job.request.id for job in dispatcher.jobs.states()),
            "known as": row and (row.spec_hash, row.clock, row.first_seen_ns),
        }

    def refused(self) -> Counter[str]:
        """What was refused, by reason, on all its ways."""
        ports = (self.server, self.apart)
        return sum((port.refused for port in ports), Counter()) + self.gateway.refused + self.stops.refused

    def close(self) -> None:
        self.stops.close()
        self.ledger.close()


class Colleagues:
    """The victim, and those who belong to the fleet: what they do is all right, and goes on."""

    def __init__(self, bench: GatewayBench, edge: Channel, trainer: Channel, console: Channel) -> None:
        self._bench, self._edge, self._all = bench, edge, (edge, trainer, console)
        self._next_ns = 0
        self.answers = 0
        """messages that the victim got"""
        for channel, name, role in (
            (edge, VICTIM, Role.edge),
            (trainer, "trainer", Role.trainer),
            (console, "console", Role.console),
        ):
            self._do(channel, hello(name, role))
        version = PolicyVersion(1, hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS), 0, 1, 1, 1)
        self._do(trainer, Publish(version), WeightBytes(1, 0, WEIGHTS))
        self._do(console, SubmitJob(1, JobRequest("later", "rollout", TASKS, robots=1)))
        self._do(edge, segment(VICTIM), status(VICTIM))
        estop = OperatorCommand(VICTIM, OperatorCommandKind.estop, operator="web-1", stop="web-1-stop")
        bench.stops.give(estop)
        bench.poll()

    def poll(self) -> None:
        """Say what is due and read what came."""
        now_ns = self._bench.clock.now_ns()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + _STATUS_NS
            self._edge.send(Heartbeat(now_ns))
            self._edge.send(status(VICTIM))
        for channel in self._all:
            while channel.recv() is not None:
                self.answers += channel is self._edge

    def _do(self, channel: Channel, *messages: Message) -> None:
        for message in messages:
            channel.send(message)
        self._bench.poll()
        self.poll()


class MemoryFleet:
    """The bench in one thread, without sockets: for the bulk."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock(10**9)
        self.server, self.apart = MemoryServer(), MemoryServer()
        self.bench = GatewayBench(root, self.server, self.apart, self.clock)
        ends = [self.server.connect(name) for name in (VICTIM, "trainer", "console")]
        self.colleagues = Colleagues(self.bench, *ends)
        self._attackers = {name: (self.server.connect(name), self.apart.connect(name)) for name in ATTACKERS}
        for name, (end, _) in self._attackers.items():
            if name != UNGREETED:
                end.send(hello(name, ATTACKERS[name]))
        self.settle()

    def send(self, attacker: str, data: bytes, stops: bool) -> None:
        """`stops`: by the way of stops."""
        self._attackers[attacker][stops].send_bytes(data)

    def settle(self) -> None:
        """Let everybody handle what is there."""
        self.clock.advance(1_000_000)
        self.bench.poll()
        self.colleagues.poll()
        for ends in self._attackers.values():
            for end in ends:
                end.discard()
