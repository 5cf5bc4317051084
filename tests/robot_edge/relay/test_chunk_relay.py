"""A relay carries each chunk once over its uplink, and hands out nothing but what was asked for."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from robot_edge.relay.server import SiteRelay
from robot_edge.uplink.weights.client import WeightClient
from robot_edge.uplink.weights.relay_source import RelaySource
from tests import samples
from wire.clock import ManualClock
from wire.messages import Message
from wire.messages.gateway import FetchWeights, Heartbeat, Hello, HelloAck, Rejection, VersionAvailable, WeightBytes
from wire.transport.memory_channel import MemoryClient, MemoryPairEnd, MemoryServer, memory_pair
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
        self.silent = self.cut = False
        """whether the gateway answers nothing for weights, or nothing at all"""
        self.refuses: Callable[[FetchWeights], bool] = lambda asked: asked.number not in self.versions
        """what the gateway refuses the relay"""
        self._free_ns, self._coming = 0, deque[tuple[int, Message]]()
        self.lines = [memory_pair() for _ in range(robots)]
        self.links = [self.server.connect(f"robot-{number}", "edge") for number in range(robots)]
        self.clients = [
            WeightClient(root / str(number), channel, self.clock, relay=RelaySource(link, self.clock))
            for number, ((_, channel), link) in enumerate(zip(self.lines, self.links, strict=True))
        ]
        for client in self.clients:
            client.check.key = self.signer.public

    def publish(
        self, number: int, size: int, lines: Sequence[tuple[MemoryPairEnd, MemoryPairEnd]] | None = None
    ) -> PolicyVersion:
        """`lines`: of the robots that hear of it, all by default."""
        data = self.versions[number] = samples.weights(number, size)
        version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), size, number - 1, 1, 1, 1)
        path = self.root / f"{number}.safetensors"
        path.write_bytes(data)
        manifest = describe(version, path, "", (), hash_bytes(data))
        for gateway, _ in lines or self.lines:
            gateway.send(VersionAvailable(version, 5, manifest, self.signer.sign(manifest)))
        return version

    def run(self, seconds: float, wanted: Sequence[int] = ()) -> float:
        """Until every robot has the newest version, or its own of those `wanted`; how long it took."""
        began_ns = self.clock.now_ns()
        wanted = wanted or [max(self.versions)] * len(self.clients)
        while [client.ready[0].number if client.ready else 0 for client in self.clients] != list(wanted):
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
            if isinstance(message, Rejection) and message.request is not None:
                client.on_relay_refused(message.request, message.reason)
            else:
                assert isinstance(message, WeightBytes)
                client.add_part(message, by_relay=True)

    def _on_relay(self, message: Message, now_ns: int) -> None:
        if self.cut:
            return
        if isinstance(message, Hello | Heartbeat):
            self.far.send(HelloAck("g", now_ns, message.sent_ns))
        elif isinstance(message, FetchWeights) and self.refuses(message):
            self.far.send(Rejection("this is not here.", message))
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


def test_a_relay_with_a_thin_line_is_blamed_for_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, 4, bytes_per_s=150e3)
    site.publish(1, 6 * CHUNK_BYTES)
    site.run(60)
    assert all(client.refused == {} for client in site.clients)
    assert site.sent_bytes == 6 * CHUNK_BYTES


@pytest.mark.parametrize("bytes_per_s", [100e3, 30e3])
def test_a_relay_on_a_slow_uplink_that_goes_on_is_asked_for_all_of_it(tmp_path: Path, bytes_per_s: float) -> None:
    """A whole chunk takes ten seconds there, or half a minute."""
    site = Site(tmp_path, 4, bytes_per_s)
    size = CHUNK_BYTES + 700_000
    site.publish(1, size)
    assert site.run(90) < 1.1 * size / bytes_per_s + 1, "the line is never empty"
    assert all(client.refused == {} for client in site.clients)
    assert 4 * site.sent_bytes == 4 * size == site.relay.chunks.served_bytes, "all of it by the relay, once"


def test_robots_that_want_several_versions_over_a_slow_uplink_all_go_on(tmp_path: Path) -> None:
    site = Site(tmp_path, 3, bytes_per_s=100e3)
    size = CHUNK_BYTES + 5000
    for number in (1, 2, 3):
        site.publish(number, size, site.lines[number - 1 : number])
    site.run(60, wanted=[1, 2, 3])
    assert all(client.refused == {} for client in site.clients)
    assert site.sent_bytes == 3 * size == site.relay.chunks.served_bytes


def test_a_relay_whose_uplink_was_cut_for_a_moment_goes_on_where_it_was(tmp_path: Path) -> None:
    site = Site(tmp_path, 2, bytes_per_s=100e3)
    size = 2 * CHUNK_BYTES
    site.publish(1, size)
    while site.relay.chunks.fetched_bytes < 700_000:
        site.tick()
    site.cut = True
    site._coming.clear()
    for _ in range(500):
        site.tick()
    site.cut = False
    site.run(60)
    assert all(client.refused == {} for client in site.clients)
    assert site.relay.chunks.fetched_bytes == size == site.relay.chunks.served_bytes // 2, "nothing comes twice"


def test_a_chunk_that_is_another_one_is_not_handed_out_to_its_end(tmp_path: Path) -> None:
    site = Site(tmp_path, 1, bytes_per_s=1e7)
    site.lies[CHUNK_BYTES] = bytes(CHUNK_BYTES)
    site.publish(1, 3 * CHUNK_BYTES)
    # the robot hears that, and asks the gateway
    assert site.run(60) < 2
    assert site.relay.refused["wrong_chunk"] == 1
    assert site.clients[0].refused == {}


def test_what_the_gateway_refuses_somebody_is_nothing_to_the_others(tmp_path: Path) -> None:
    site = Site(tmp_path, 2, bytes_per_s=2e6)
    stranger = site.server.connect("robot-9", "edge")
    asked = [FetchWeights(9, offset, 10, False, bytes(32), CHUNK_BYTES) for offset in (3, 3 + CHUNK_BYTES)]
    site.publish(1, 4 * CHUNK_BYTES)
    for _ in range(30):
        site.tick()
    assert any(coming.under_way for coming in site.relay.chunks._coming.values())
    for one in asked:
        stranger.send(one)
    site.run(30)
    told = list(iter(stranger.recv, None))
    assert [answer.request.offset for answer in told if isinstance(answer, Rejection) and answer.request] == [
        one.offset for one in asked
    ]
    assert all(client.refused == {} for client in site.clients)
    assert site.sent_bytes == 4 * CHUNK_BYTES == site.relay.chunks.served_bytes // 2, "all of it by the relay"


def test_robots_ask_the_gateway_at_once_for_what_the_relay_cannot_have(tmp_path: Path) -> None:
    site = Site(tmp_path, 3, bytes_per_s=1e7)
    site.refuses = lambda asked: asked.offset >= 2 * CHUNK_BYTES
    site.publish(1, 4 * CHUNK_BYTES)
    assert site.run(60) < 2
    assert site.sent_bytes == 2 * CHUNK_BYTES
    assert all(client.refused == {} for client in site.clients), "it is nobody's fault"
    site.refuses = lambda asked: False
    site.publish(2, 4 * CHUNK_BYTES)
    assert site.run(60) < 3
    assert site.sent_bytes == 6 * CHUNK_BYTES, "the next version comes by the relay again"


def test_a_relay_whose_gateway_is_silent_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path, 3)
    site.silent = True
    site.publish(1, 2 * CHUNK_BYTES)
    assert site.run(60) < 10
    assert all(client.refused == {} for client in site.clients)
    # From then on at once.
    site.cut = True
    for _ in range(1100):
        site.tick()
    for number in (2, 3, 4):
        site.publish(number, 2 * CHUNK_BYTES)
        assert site.run(60) < 1
    assert all(client.refused == {} for client in site.clients)


def test_what_is_no_question_for_a_chunk_is_refused(tmp_path: Path) -> None:
    site = Site(tmp_path, 1)
    stranger = site.server.connect("trainer-1", "trainer")
    good = FetchWeights(1, 0, 10, False, bytes(32), CHUNK_BYTES)
    for peer, message in (
        (stranger, good),
        (site.links[0], VersionAvailable(PolicyVersion(1, "", 1, 0, 1, 1, 1), 1)),
        *(
            (site.links[0], FetchWeights(*asked))
            for asked in (
                (1, 0, 10, False, b"", CHUNK_BYTES),
                (1, -1, 10, False, bytes(32), CHUNK_BYTES),
                (1, CHUNK_BYTES - 5, 10, False, bytes(32), CHUNK_BYTES),
                (1, 0, 10, False, bytes(32), CHUNK_BYTES + 1),
                (1, 0, 10, False, bytes(32), 9),
                (1, 0, 0, False, bytes(32), CHUNK_BYTES),
                (0, 0, 10, False, bytes(32), CHUNK_BYTES),
            )
        ),
    ):
        peer.send(message)
        site.relay.poll()
        assert isinstance(peer.recv(), Rejection)
    assert site.relay.refused == {"role": 2, "impossible_part": 7}
    site.links[0].send(good)
    for _ in range(200):
        site.links[0].send(good)
    site.relay.poll()
    assert site.relay.refused["too_often"] > 100, "what one robot waits for is bounded"
