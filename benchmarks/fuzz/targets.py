"""Who is sent what is wrong, in one process and without sockets but a local one: for the bulk."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from zmq import curve_keypair

from benchmarks.fuzz.gateway import ATTACKERS, THIEF, UNGREETED, VICTIM, WEIGHTS, MemoryFleet
from benchmarks.fuzz.mutations import BARE, JSON, MESSAGES, Format
from benchmarks.fuzz.samples import SPEC, hello, question, samples, segment
from cloud_learner.operator.sessions import OperatorSessions, PageMessage, PageMessageKind
from hal.driver_host.protocol import socket_address
from hal.driver_host.stop_line import StopListener, StopOrder, send_order, stop_address
from hal.drivers.fake import FAKE_LIMITS, FakeRobot
from hal.safety.limited_robot import LimitedRobot
from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.operator_override import OperatorOverride
from robot_edge.inference.latent_server import LatentEncoder, LatentServer
from robot_edge.relay.server import SiteRelay
from robot_edge.relay.upload_spool import UploadSpool
from robot_edge.uplink.server import Uplink
from robot_edge.uplink.stop_link import StopLink
from robot_edge.uplink.stop_orders import StopOrders
from wire.clock import ManualClock
from wire.codec import encode
from wire.errors import ProtocolError, RejectedError
from wire.identity.sealing import Sealer
from wire.messages.gateway import Hello, HelloAck, ThinkVersions, VersionAvailable, WeightBytes
from wire.stop_state import StopState
from wire.transport.memory_channel import MemoryServer, memory_pair
from wire.types import Latent, Observation, PolicyVersion

_CALLERS = ("console-1", "teleoperator-1")
_STOP = "pedal-1"


class Target(Protocol):
    """Somebody to attack."""

    form: Format

    def valid(self) -> list[tuple[str, bytes]]:
        """(who sends it, a message to begin with)."""
        ...

    def send(self, who: str, data: bytes, draw: random.Random) -> None: ...

    def settle(self) -> None:
        """Have it handle what came."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What nobody here may change."""
        ...

    def refused(self) -> Counter[str]: ...

    def close(self) -> None: ...


class GatewayTarget:
    """Both ways into the gateway, with the keys of `ATTACKERS`."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        self._fleet = MemoryFleet(root)

    def valid(self) -> list[tuple[str, bytes]]:
        return fleet_messages()

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        self._fleet.send(who, data, draw.random() < 0.2)

    def settle(self) -> None:
        self._fleet.settle()

    def fingerprint(self) -> dict[str, Any]:
        return self._fleet.bench.fingerprint()

    def refused(self) -> Counter[str]:
        return self._fleet.bench.refused()

    def close(self) -> None:
        self._fleet.bench.close()


def fleet_messages() -> list[tuple[str, bytes]]:
    """All types from all keys, about themselves and, where that is not theirs to do, about the victim."""
    found = []
    for name, role in ATTACKERS.items():
        about = ("nobody",) if name in _CALLERS else (name, VICTIM)
        found += [
            (name, encode(message))
            for robot in about
            for message in samples(name, role, robot)
            if not (name == UNGREETED and isinstance(message, Hello))
        ]
    return found


class PageTarget:
    """A page that moves robots of a gateway; whoever opens it may, so the fingerprint is the fleet's alone."""

    form = JSON

    def __init__(self, root: Path) -> None:
        self._fleet = MemoryFleet(root)
        bench = self._fleet.bench
        self._sessions = OperatorSessions(bench.view, clock=bench.clock, stop=bench.stops.give)
        self._page = self._sessions.join()

    def valid(self) -> list[tuple[str, bytes]]:
        now_ms = 1e3
        wishes = [
            PageMessage(kind, robot, (0.1, 0.2, 0.3), 5, now_ms, "x")
            for kind in PageMessageKind
            for robot in (THIEF, "nobody")
        ]
        return [("page", msgspec.json.encode(wish)) for wish in wishes]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        with contextlib.suppress(ProtocolError, RejectedError):
            self._sessions.handle_message(self._page, data)

    def settle(self) -> None:
        self._fleet.settle()
        self._sessions.pop_rejections(self._page)

    def fingerprint(self) -> dict[str, Any]:
        return self._fleet.bench.fingerprint()

    def refused(self) -> Counter[str]:
        return self._sessions.refused + self._fleet.bench.refused()

    def close(self) -> None:
        self._fleet.bench.close()


class Thinker:
    """A policy that thinks nothing."""

    spec = SPEC

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(2, np.float32), observation.time_ns, 1)

    def load(self, weights: bytes, version: int) -> None:
        """There is nothing to load."""


class ThinkTarget:
    """A think server, by a robot's key and by a gateway that is not the right one."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        self._clock = ManualClock(10**9)
        self._robots = MemoryServer()
        self._gateway, end = memory_pair()
        self._robot = self._robots.connect(THIEF)
        encoder = LatentEncoder(Thinker)  # type: ignore[arg-type]
        self._server = LatentServer("thinker-0", self._robots, end, encoder, root, self._clock)
        self._end = end
        version = PolicyVersion(1, hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS), 0, 1, 1, 1)
        said = HelloAck("c", 1, 1), ThinkVersions((1,)), VersionAvailable(version, 1), WeightBytes(1, 0, WEIGHTS)
        for message in said:
            self._gateway.send(message)
            self.settle()

    def valid(self) -> list[tuple[str, bytes]]:
        ours = [(THIEF, encode(question()))] * 40
        return ours + [(who, encode(m)) for who in (THIEF, "gateway") for m in samples(THIEF, "edge", THIEF)]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        (self._robot if who == THIEF else self._gateway).send_bytes(data)

    def settle(self) -> None:
        self._clock.advance(1_000_000)
        for _ in range(8):
            self._server.poll()
        self._robot.discard()
        self._gateway.discard()

    def fingerprint(self) -> dict[str, Any]:
        return {"versions": self._server._encoder.versions}

    def refused(self) -> Counter[str]:
        return self._robots.refused + self._end.refused + self._server.refused

    def close(self) -> None:
        self._robots.close()


class UplinkTarget:
    """A robot's uplink and the inbox of its control, by a gateway that was taken over; what it has recorded stays."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        self._clock = ManualClock(10**9)
        self._gateway, self._end = memory_pair()
        self._control, control = memory_pair()
        self._inference, inference = memory_pair()
        self._state = StopState({_STOP: "pedal"}, last=_STOP)
        stops = StopLink(VICTIM, StopOrders(VICTIM, self._ordered, self._clock))
        self._stops = stops
        self._uplink = Uplink(VICTIM, root, self._end, control, inference, self._clock, stops=stops)
        self._inbox = CommandInbox(VICTIM, OperatorOverride(SPEC, self._clock))
        self._uplink.spool.put(segment(VICTIM, 77))
        self._control.send(hello(VICTIM, "edge"))
        self.settle()

    def _ordered(self, order: StopOrder) -> StopState:
        return self._state

    def valid(self) -> list[tuple[str, bytes]]:
        return [("gateway", encode(message)) for message in samples(VICTIM, "edge", VICTIM)]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        self._gateway.send_bytes(data)

    def settle(self) -> None:
        self._clock.advance(1_000_000)
        self._uplink.poll()
        self._stops.poll()
        while (message := self._control.recv()) is not None:
            self._inbox.handle_message(message)
        self._gateway.discard()
        self._inference.discard()

    def fingerprint(self) -> dict[str, Any]:
        return {"spooled": len(self._uplink.spool)}

    def refused(self) -> Counter[str]:
        return self._end.refused + Counter(self._uplink.weights.refused)

    def close(self) -> None:
        self._stops.close()
        self._uplink.close()


class RelayTarget:
    """A site's relay, by a robot's key; what it keeps for another robot stays."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        self._clock = ManualClock(10**9)
        self._robots, (_, gateway) = MemoryServer(), memory_pair()
        self._spool = UploadSpool(root / "uploads.sqlite", hold=["front"])
        self._sealer = Sealer(curve_keypair()[1], curve_keypair()[0])
        self._spool.put_all([self._sealer.seal(segment(VICTIM, 77))])
        self._relay = SiteRelay("relay-0", self._robots, gateway, self._clock, spool=self._spool)
        self._robot = self._robots.connect(THIEF)

    def valid(self) -> list[tuple[str, bytes]]:
        sealed = [self._sealer.seal(segment(name, number)) for name in (THIEF, VICTIM) for number in range(70, 80)]
        ours = [message for about in (THIEF, VICTIM) for message in samples(THIEF, "edge", about)]
        return [(THIEF, encode(message)) for message in (*ours, *sealed)]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        self._robot.send_bytes(data)

    def settle(self) -> None:
        self._clock.advance(1_000_000)
        self._relay.poll()
        self._robot.discard()

    def fingerprint(self) -> dict[str, Any]:
        message = self._sealer.seal(segment(VICTIM, 77))
        stored, invalid = self._spool.put_all([message])
        return {"kept": stored, "changed": invalid}

    def refused(self) -> Counter[str]:
        return self._robots.refused + self._relay.refused

    def close(self) -> None:
        self._relay.close()
        self._robots.close()


class StopLineTarget:
    """The socket that a robot's host hears stops by, with a robot that is stopped."""

    form = BARE

    def __init__(self, root: Path) -> None:
        self._path = root / "host"
        self._robot = LimitedRobot(FakeRobot(), FAKE_LIMITS)
        self._robot.stop(_STOP, "pedal")
        self._listener = StopListener(self._path, self._robot, lambda: None)
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def valid(self) -> list[tuple[str, bytes]]:
        kinds = ("stop", "release", "start", "slow", "ask")
        orders = [StopOrder(kind, stop, "thief", 0.5, 2**62) for kind in kinds for stop in ("x", "")]  # type: ignore[arg-type]
        return [("local", msgspec.msgpack.encode(order)) for order in orders]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        # Longer ones are none that the operating system takes.
        self._line.sendto(data[:60_000], socket_address(stop_address(self._path)))

    def settle(self) -> None:
        """It does so by itself; whoever sends waits while too many are unread."""
        send_order(self._path, StopOrder("ask"), 60.0)

    def fingerprint(self) -> dict[str, Any]:
        state = send_order(self._path, StopOrder("ask"), 60.0)
        return {"stopped by": state.stops[_STOP], "free": state.free}

    def refused(self) -> Counter[str]:
        return self._listener.refused

    def close(self) -> None:
        self._line.close()
        self._listener.close()


TARGETS: dict[str, tuple[Callable[[Path], Target], float]] = {
    "gateway": (GatewayTarget, 0.55),
    "operator page": (PageTarget, 0.1),
    "think server": (ThinkTarget, 0.1),
    "a robot's uplink": (UplinkTarget, 0.15),
    "a site's relay": (RelayTarget, 0.05),
    "a robot's stop line": (StopLineTarget, 0.05),
}
"""by name, with its share of all messages"""
