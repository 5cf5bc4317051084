"""A gateway that takes versions, robots that fetch them, and a line between them that is as slow as is wanted."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from benchmarks.common.tcp_proxy import TcpProxy
from benchmarks.stop_latency.loads import Peer
from benchmarks.wire.fleet import ChildProcess, GatewayServer
from benchmarks.wire.samples import SPEC, TASKS
from cloud_learner.training.publishing.uploader import WeightUploader
from fleet.config.data_directory import DataDirectory
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from wire.clock import MonotonicClock, clock_name
from wire.messages.gateway import Deltas, Hello, HelloAck, Published, Rejection, VersionAvailable, WeightBytes
from wire.transport.faults import FaultPlan, FaultWindow
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import PolicyVersion, Role
from wire.weights.delta import Precision, encode

RELAY = "relay"
_READY_S = 60.0


class RobotFetcher:
    """What an uplink does with weights, and nothing else."""

    def __init__(self, name: str, place: Path, keys: Path, gateway: str, relay: str = "") -> None:
        self._gateway = ZmqClient(gateway, name, keys)
        self._relay = ZmqClient(relay, name, keys, RELAY) if relay else None
        clock = MonotonicClock()
        source = RelaySource(self._relay, clock) if self._relay is not None else None
        self._session = GatewaySession(self._gateway, Hello(name, Role.edge, clock_name(), 0, 1, SPEC, TASKS), clock)
        self.client = WeightClient(place / name, self._gateway, clock, relay=source)
        self.client.tasks.start()
        self.ready = 0
        """number of the version that is here"""
        self.ready_s = 0.0
        """since when"""
        self._closed = False

    @property
    def channels(self) -> list[ZmqClient]:
        return [self._gateway, *([self._relay] if self._relay is not None else [])]

    def poll(self) -> None:
        while (message := self._gateway.recv()) is not None:
            if isinstance(message, HelloAck):
                self.client.check.key = message.signing_key
            if isinstance(message, VersionAvailable | Deltas | WeightBytes):
                self.client.handle_message(message)
            else:
                self._session.handle_message(message)
        while self._relay is not None and (message := self._relay.recv()) is not None:
            if isinstance(message, WeightBytes):
                self.client.add_part(message, by_relay=True)
            elif isinstance(message, Rejection) and message.request is not None:
                self.client.on_relay_refused(message.request, message.reason)
        if self.client.poll() and self.client.ready is not None:
            self.ready, self.ready_s = self.client.ready[0].number, time.monotonic()
        self._session.poll()

    def close(self) -> None:
        """Once or more often."""
        if not self._closed:
            self._closed = True
            self.client.tasks.close(5.0)
            for channel in self.channels:
                channel.close()


class RelayServer(ChildProcess):
    """`vla-fleet relay`."""

    def __init__(self, place: Path, keys: Path, gateway: str) -> None:
        words = ["--keys", str(keys), "--gateway", gateway, "--port", "0", "--no-uploads"]
        super().__init__(place / "relay.log", "-m", "fleet.cli", "relay", *words)
        deadline_s = time.monotonic() + _READY_S
        while "robots of this site connect to " not in self.log():
            if time.monotonic() > deadline_s:
                self.end()
                raise RuntimeError(f"the relay does not start: {self.log()[-2000:]}")
            time.sleep(0.05)
        self.endpoint = self.log().split("robots of this site connect to ")[1].split()[0]


class WeightsNetwork:
    """One gateway and whatever is connected to it."""

    def __init__(self, place: Path, robots: Sequence[str]) -> None:
        self._place, self._ends = place, ExitStack()
        self.keys = place / "keys"
        make_keys(self.keys, [GATEWAY, "trainer", RELAY, *robots])
        self._names = list(robots)
        self._number = 0
        self._base: np.ndarray | None = None

    def __enter__(self) -> Self:
        self.server = GatewayServer(self._place, self.keys)
        self._ends.callback(self.server.end)
        self._data = DataDirectory(self._place / "data")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.close()

    def publish(self, weights: np.ndarray, *, delta: bool) -> tuple[int, int]:
        """Publish uint8[size] `weights`, as a delta of the version before if that is wanted; its number and the bytes
        that travelled. `weights` becomes what was published."""
        frames: list[bytes] = []
        if delta and self._base is not None:
            encode(self._base, weights, frames.append, Precision.int8)
        payload = b"".join(frames)
        self._number += 1
        sha256 = hashlib.sha256(weights.data).hexdigest()
        version = PolicyVersion(self._number, sha256, len(weights), self._number - 1, 0, 0, 0)
        peer = Peer(self._data, Hello("trainer", Role.trainer, clock_name(), time.monotonic_ns(), 1))
        sent = payload or weights.tobytes()
        base = self._number - 1 if payload else 0
        uploader = WeightUploader(version, sent, frozenset(), peer.channel, MonotonicClock(), base=base)
        published = False
        while not published:
            uploader.poll()
            match peer.next(0.05):
                case HelloAck(echo_ns=echo_ns):
                    uploader.on_heartbeat_answered(echo_ns)
                case Published():
                    published = True
        peer.channel.close()
        self._base = weights.copy()
        return self._number, len(sent)

    def proxy(self, window: FaultWindow) -> TcpProxy:
        """A line to the gateway that all who connect to it share."""
        port = int(self.server.endpoint.rpartition(":")[2])
        return self._ends.enter_context(TcpProxy("127.0.0.1", port, FaultPlan((window,)), shared=True))

    def relay(self, gateway: str) -> RelayServer:
        relay = RelayServer(self._place, self.keys, gateway)
        self._ends.callback(relay.end)
        return relay

    def robots(self, names: Sequence[str], gateway: str, relay: str = "") -> list[RobotFetcher]:
        place = self._place / "robots"
        found = [RobotFetcher(name, place, self.keys, gateway, relay) for name in names]
        for robot in found:
            self._ends.callback(robot.close)
        return found


def wait_for(robots: Sequence[RobotFetcher], number: int, seconds: float) -> float:
    """Until all have version `number`; how long it took the last one."""
    began_s = time.monotonic()
    channels = [channel for robot in robots for channel in robot.channels]
    while any(robot.ready != number for robot in robots):
        wait_any(channels, 0.005)
        for robot in robots:
            robot.poll()
        if time.monotonic() - began_s > seconds:
            here = [robot.ready for robot in robots]
            raise TimeoutError(f"version {number} is not with all robots after {seconds:g} s: {here}")
    return max(robot.ready_s for robot in robots) - began_s


def spawn_training(argument: str) -> str:
    """The last line that a run of `benchmarks.weights.training` printed."""
    words = [sys.executable, "-m", "benchmarks.weights.training", argument]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]
