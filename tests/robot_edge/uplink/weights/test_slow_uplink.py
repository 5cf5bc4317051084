"""A site's line that is slow, or away for a while, by real sockets, on a clock that runs several times as fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.tcp_proxy import TcpProxy
from robot_edge.relay.server import SiteRelay
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from tests.wire.weights.files import delta_of, floats, version_of
from wire.clock import MonotonicClock
from wire.messages.gateway import (
    Deltas,
    FetchDeltas,
    FetchWeights,
    Heartbeat,
    Hello,
    HelloAck,
    Rejection,
    VersionAvailable,
    WeightBytes,
)
from wire.transport.faults import FaultPlan, FaultWindow, LinkState
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any
from wire.weights.manifest import DeltaForm, Signer, describe, hash_bytes

SIGNER = Signer(b"x" * 40)
FASTER = 5
LINE = FaultWindow(bytes_per_s=FASTER * 100e3)
"""100 kB/s"""


class FasterClock(MonotonicClock):
    def now_ns(self) -> int:
        return FASTER * super().now_ns()


class Site:
    """A robot and a relay behind one line; the test is their gateway."""

    def __init__(self, root: Path, ends: ExitStack, by_relay: bool) -> None:
        self.root, self.clock = root, FasterClock()
        make_keys(keys := root / "keys", [GATEWAY, "relay", "robot-0"])
        self.gateway = ZmqServer("tcp://127.0.0.1:*", keys)
        ends.callback(self.gateway.close)
        port = int(self.gateway.endpoint.rpartition(":")[2])
        self.line = ends.enter_context(TcpProxy("127.0.0.1", port, FaultPlan((LINE,)), shared=True))
        endpoint = f"tcp://127.0.0.1:{self.line.port}"
        self.ports: list[ZmqServer | ZmqClient] = [self.gateway]
        self.relay: SiteRelay | None = None
        source = None
        if by_relay:
            server, uplink = ZmqServer("tcp://127.0.0.1:*", keys, "relay"), ZmqClient(endpoint, "relay", keys)
            self.relay = SiteRelay("relay", server, uplink, self.clock)
            self.by_relay = ZmqClient(server.endpoint, "robot-0", keys, "relay")
            source = RelaySource(self.by_relay, self.clock)
            self.ports += [server, uplink, self.by_relay]
            ends.callback(self.relay.close)
        self.robot = ZmqClient(endpoint, "robot-0", keys)
        self.ports.append(self.robot)
        for port_ in self.ports[1:]:
            ends.callback(port_.close)
        self.session = GatewaySession(self.robot, Hello("robot-0", "edge", "c", 0), self.clock)
        self.client = WeightClient(root / "weights", self.robot, self.clock, relay=source)
        self.client.check.key = SIGNER.public
        self.client.is_gateway_silent = lambda: self.session.silent
        self.files: dict[tuple[int, bool], bytes] = {}
        self.lost_from: int | None = None
        """what is behind this byte of a delta gets lost"""
        self.sent_bytes = {"relay": 0, "robot-0": 0}
        self.until(lambda: self.session.accepted and (self.relay is None or self.relay.heard))

    def offer(self, number: int, data: bytes, delta: DeltaForm | None = None) -> None:
        self.files[number, False] = data
        path, version = self.root / f"{number}.safetensors", version_of(number, data)
        path.write_bytes(data)
        manifest = describe(version, path, "", (), hash_bytes(data))
        self.gateway.send("robot-0", VersionAvailable(version, 5, manifest, SIGNER.sign(manifest), delta))

    def poll(self) -> None:
        wait_any(self.ports, 0.01)
        while (found := self.gateway.recv()) is not None:
            peer, asked = found
            match asked:
                case Hello() | Heartbeat():
                    self.gateway.send(peer, HelloAck("c", 1, asked.sent_ns))
                case FetchDeltas():
                    self.gateway.send(peer, Deltas(asked.number, ()))
                case FetchWeights(delta=True, offset=offset) if self.lost_from is not None and offset >= self.lost_from:
                    pass
                case FetchWeights():
                    data = self.files[asked.number, asked.delta][asked.offset : asked.offset + asked.size]
                    self.sent_bytes[peer] += len(data)
                    self.gateway.send(peer, WeightBytes(asked.number, asked.offset, data, asked.delta))
        if self.relay is not None:
            self.relay.poll()
            while (message := self.by_relay.recv()) is not None:
                if isinstance(message, Rejection) and message.request is not None:
                    self.client.on_relay_refused(message.request, message.reason)
                elif isinstance(message, WeightBytes):
                    self.client.add_part(message, by_relay=True)
        while (message := self.robot.recv()) is not None:
            if isinstance(message, VersionAvailable | Deltas | WeightBytes):
                self.client.handle_message(message)
            else:
                self.session.handle_message(message)
        self.session.poll()
        self.client.poll()

    def until(self, done: Callable[[], object], most_s: float = 100.0) -> None:
        """`most_s`: by its clock."""
        began_s = time.monotonic()
        while not done():
            self.poll()
            assert FASTER * (time.monotonic() - began_s) < most_s

    def has(self, number: int) -> bool:
        return self.client.ready is not None and self.client.ready[0].number == number

    def pass_time(self, seconds: float) -> None:
        end_ns = self.clock.now_ns() + seconds * 1e9
        self.until(lambda: self.clock.now_ns() >= end_ns)


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_relay_on_a_slow_line_delivers_all_of_it(tmp_path: Path, ends: ExitStack) -> None:
    site = Site(tmp_path, ends, by_relay=True)
    data = floats(w=np.random.default_rng(1).standard_normal(350_000, np.float32))
    site.offer(1, data)
    site.until(lambda: site.has(1))
    assert site.client.refused == {}
    assert site.sent_bytes["robot-0"] == 0
    assert site.sent_bytes["relay"] < 1.2 * len(data), "a busy machine may make it ask for a part twice"


def test_after_a_long_cut_the_rest_of_a_delta_comes(tmp_path: Path, ends: ExitStack) -> None:
    site = Site(tmp_path, ends, by_relay=False)
    random = np.random.default_rng(1)
    before = random.standard_normal(1_000_000, np.float32)
    first, trained = floats(w=before), floats(w=before + 1e-3 * random.standard_normal(len(before), np.float32))
    delta, second = delta_of(first, trained)
    site.line.follow(FaultPlan())
    site.offer(1, first)
    site.until(lambda: site.has(1))
    site.line.follow(FaultPlan((LINE,)))
    form = DeltaForm(2, 1, version_of(1, first).sha256, len(delta), hash_bytes(delta))
    site.files[2, True] = delta
    site.client._requests.window.size_bytes = 16 * 1024  # as on a line that was slow before
    site.lost_from = len(delta) // 2
    fetched = site.client.fetched_bytes
    site.offer(2, second, form)
    site.until(lambda: site.client.fetched_bytes - fetched >= len(delta) // 2)
    site.line.follow(FaultPlan((FaultWindow(link=LinkState.cut),)))
    site.pass_time(25)
    site.lost_from = None
    site.line.follow(FaultPlan((LINE,)))
    site.until(lambda: site.has(2))
    assert site.client.fetched_bytes - fetched == len(delta)
