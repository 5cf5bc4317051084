"""A relay carries each chunk once over its uplink, and hands out nothing but what was asked for."""

from __future__ import annotations

import hashlib
from collections import deque
from pathlib import Path

from robot_edge.relay.server import SiteRelay
from robot_edge.uplink.weights.client import WeightClient
from tests import samples
from wire.clock import ManualClock
from wire.messages import Message
from wire.messages.gateway import FetchWeights, Heartbeat, Hello, HelloAck, Rejection, VersionAvailable, WeightBytes
from wire.transport.memory_channel import MemoryClient, MemoryServer, memory_pair
from wire.types import PolicyVersion
from wire.weights.manifest import CHUNK_BYTES, Signer, describe, hash_bytes

SECOND = 1_000_000_000


class Site:
    """A relay with robots behind it, and a gateway that sends so many bytes a second over the relay's line."""

    def __init__(self, root: Path, robots: int, bytes_per_s: float = 1e6) -> None:
        self.root, self.bytes_per_s, self.clock = root, bytes_per_s, ManualClock(SECOND)
        self.signer = Signer(b"x" * 40)
        self.versions: dict[int, bytes] = {}
        self.server = MemoryServer()
        self.far, near = memory_pair()
        self.relay = SiteRelay("relay", self.server, near, self.clock)
        self.sent_bytes = 0
        self.lies: dict[int, bytes] = {}
        """by offset: what the relay is sent instead"""
        self.silent = False
        self._free_ns, self._coming = 0, deque[tuple[int, Message]]()
        self.lines = [memory_pair() for _ in range(robots)]
        self.links = [self.server.connect(f"robot-{number}", "edge") for number in range(robots)]
        self.clients = [
            WeightClient(root / str(number), channel, self.clock, relay=link)
            for number, ((_, channel), link) in enumerate(zip(self.lines, self.links, strict=True))
        ]
        for client in self.clients:
            client.check.key = self.signer.public

    def publish(self, number: int, size: int) -> PolicyVersion:
        data = self.versions[number] = samples.weights(number, size)
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), size, number - 1, 1, 1, 1)
        path = self.root / f"{number}.safetensors"
        path.write_bytes(data)
        manifest = describe(version, path, "", (), hash_bytes(data))
        for gateway, _ in self.lines:
            gateway.send(VersionAvailable(version, 5, manifest, self.signer.sign(manifest)))
        return version

    def run(self, seconds: float) -> float:
        """Until every robot has the newest version; how long it took."""
        began_ns = self.clock.now_ns()
        newest = max(self.versions)
        while any(client.ready is None or client.ready[0].number != newest for client in self.clients):
            self.tick()
            assert self.clock.now_ns() - began_ns < seconds * SECOND
        return (self.clock.now_ns() - began_ns) / SECOND

    def tick(self) -> None:
        now_ns = self.clock.now_ns()
        self.relay.poll()
        while (message := self.far.recv()) is not None:
            self._on_relay(message, now_ns)
        while self._coming and self._coming[0][0] <= now_ns:
            self.far.send(self._coming.popleft()[1])
        for client, (gateway, channel), link in zip(self.clients, self.lines, self.links, strict=True):
            while (message := gateway.recv()) is not None:
                assert isinstance(message, FetchWeights)
                data = self.versions[message.number][message.offset : message.offset + message.size]
                gateway.send(WeightBytes(message.number, message.offset, data))
            while (message := channel.recv()) is not None:
                assert isinstance(message, VersionAvailable | WeightBytes)
                client.handle_message(message)
            self.from_relay(client, link)
            client.poll()
        self.clock.advance(SECOND // 100)

    def from_relay(self, client: WeightClient, link: MemoryClient) -> None:
        while (message := link.recv()) is not None:
            assert isinstance(message, WeightBytes)
            client.add_part(message, by_relay=True)

    def _on_relay(self, message: Message, now_ns: int) -> None:
        if isinstance(message, Hello | Heartbeat):
            self.far.send(HelloAck("g", now_ns, message.sent_ns))
        elif isinstance(message, FetchWeights) and not self.silent:
            data = self.versions[message.number][message.offset : message.offset + message.size]
            data = self.lies.get(message.offset, data)
            self.sent_bytes += len(data)
            self._free_ns = max(self._free_ns, now_ns) + round(len(data) / self.bytes_per_s * 1e9)
            self._coming.append((self._free_ns, WeightBytes(message.number, message.offset, data, message.delta)))


def test_sixteen_robots_cost_the_uplink_one_version(tmp_path: Path) -> None:
    site = Site(tmp_path, 16, bytes_per_s=2e6)
    size = 10 * CHUNK_BYTES + 5000
    site.publish(1, size)
    took_s = site.run(30)
    assert site.sent_bytes == site.relay.chunks.fetched_bytes == size
    assert site.relay.chunks.served_bytes == 16 * size
    assert took_s < 1.3 * size / 2e6 + 1, "passed on while it comes"
    for client in site.clients:
        assert client.ready is not None and client.ready[1].read_bytes() == site.versions[1]
        assert client.refused == {}


def test_a_robot_that_comes_later_costs_the_uplink_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, 2, bytes_per_s=1e7)
    late, line, link = site.clients.pop(), site.lines.pop(), site.links.pop()
    site.publish(1, 3 * CHUNK_BYTES)
    site.run(30)
    sent = site.sent_bytes
    site.clients, site.lines, site.links = [late], [line], [link]
    site.publish(1, 3 * CHUNK_BYTES)
    site.run(30)
    assert site.sent_bytes == sent


def test_a_chunk_that_is_another_one_is_not_passed_on(tmp_path: Path) -> None:
    site = Site(tmp_path, 1, bytes_per_s=1e7)
    site.lies[CHUNK_BYTES] = bytes(CHUNK_BYTES)
    site.publish(1, 3 * CHUNK_BYTES)
    # the robot hears nothing, and asks the gateway
    site.run(60)
    assert site.relay.refused["wrong_chunk"] == 1
    assert site.clients[0].refused["relay"] == 1


def test_a_relay_whose_gateway_is_silent_is_left_out(tmp_path: Path) -> None:
    site = Site(tmp_path, 3)
    site.silent = True
    site.publish(1, 2 * CHUNK_BYTES)
    assert site.run(60) < 15
    assert all(client.refused["relay"] == 1 for client in site.clients)


def test_what_is_no_question_for_a_chunk_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    stranger = site.server.connect("trainer-1", "trainer")
    good = FetchWeights(1, 0, 10, False, bytes(32))
    for peer, message in (
        (stranger, good),
        (site.links[0], VersionAvailable(PolicyVersion(1, "", 1, 0, 1, 1, 1), 1)),
        *(
            (site.links[0], FetchWeights(*asked))
            for asked in (
                (1, 0, 10, False, b""),
                (1, -1, 10, False, bytes(32)),
                (1, CHUNK_BYTES - 5, 10, False, bytes(32)),
                (1, 0, 0, False, bytes(32)),
                (0, 0, 10, False, bytes(32)),
            )
        ),
    ):
        peer.send(message)
        site.relay.poll()
        assert isinstance(peer.recv(), Rejection)
    assert site.relay.refused == {"role": 2, "impossible_part": 5}
    site.links[0].send(good)
    for _ in range(200):
        site.links[0].send(good)
    site.relay.poll()
    assert site.relay.refused["too_often"] > 100, "what one robot waits for is bounded"
