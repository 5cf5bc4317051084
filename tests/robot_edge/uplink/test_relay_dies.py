"""A relay that is gone from one moment to the next, by real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from robot_edge.uplink.relay_link import RelayLink
from robot_edge.uplink.server import Uplink
from tests import samples
from tests.wire.weights.files import version_of
from wire.clock import MonotonicClock
from wire.identity.sealing import Sealer
from wire.messages.gateway import FetchWeights, Heartbeat, Hello, HelloAck, VersionAvailable, WeightBytes
from wire.transport.keys import GATEWAY, load_pair, load_public, make_keys
from wire.transport.memory_channel import memory_pair
from wire.transport.zmq_channel import ZmqClient, ZmqServer
from wire.weights.manifest import CHUNK_BYTES, Signer, describe, hash_bytes

SIGNER = Signer(b"x" * 40)
DATA = samples.weights(1, 3 * CHUNK_BYTES)


class Robot:
    """Its uplink; the test is its gateway, and its relay as long as that lives."""

    def __init__(self, root: Path) -> None:
        keys = root / "keys"
        make_keys(keys, [GATEWAY, "relay", "robot-0"])
        self.relay: ZmqServer | None = ZmqServer("tcp://127.0.0.1:*", keys, "relay")
        self.line = ZmqClient(self.relay.endpoint, "robot-0", keys, "relay")
        clock = MonotonicClock()
        sealer = Sealer(load_pair(keys, "robot-0").secret, load_public(keys, GATEWAY))
        self.gateway, channel = memory_pair()
        link = RelayLink("robot-0", self.line, sealer, clock)
        self.uplink = Uplink("robot-0", root, channel, memory_pair()[0], memory_pair()[0], clock, relay=link)
        self.relayed = self.direct = 0
        """bytes that either was asked for"""

    def poll(self, most_by_relay: int) -> None:
        time.sleep(0.002)
        self.uplink.poll()
        while self.relay is not None and (found := self.relay.recv()) is not None:
            robot, message = found
            if isinstance(message, Hello | Heartbeat):
                self.relay.send(robot, HelloAck("c", 1, message.sent_ns))
            if isinstance(message, FetchWeights) and self.relayed < most_by_relay:
                self.relayed += message.size
                self.relay.send(robot, answer(message))
        while (message := self.gateway.recv()) is not None:
            if isinstance(message, FetchWeights):
                self.direct += message.size
                self.gateway.send(answer(message))

    def close(self) -> None:
        self.uplink.close()
        self.line.close()
        if self.relay is not None:
            self.relay.close()


def answer(asked: FetchWeights) -> WeightBytes:
    return WeightBytes(asked.number, asked.offset, DATA[asked.offset : asked.offset + asked.size])


def until(robot: Robot, done: Callable[[], bool], most_by_relay: int = 0, seconds: float = 9.0) -> float:
    """How long it took."""
    began_s = time.monotonic()
    while not done():
        robot.poll(most_by_relay)
        assert time.monotonic() - began_s < seconds
    return time.monotonic() - began_s


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Robot]:
    made = Robot(tmp_path)
    yield made
    made.close()


def test_a_relay_that_is_killed_in_the_middle_costs_a_second_or_two(robot: Robot, tmp_path: Path) -> None:
    assert robot.relay is not None
    until(robot, lambda: robot.uplink.relay is not None and robot.line.handshake.succeeded)
    version = version_of(1, DATA)
    (tmp_path / "file").write_bytes(DATA)
    manifest = describe(version, tmp_path / "file", "", (), hash_bytes(DATA))
    robot.gateway.send(HelloAck("c", 1, 1, signing_key=SIGNER.public))
    robot.gateway.send(VersionAvailable(version, 1, manifest, SIGNER.sign(manifest)))
    until(robot, lambda: robot.relayed >= CHUNK_BYTES, CHUNK_BYTES)
    robot.relay.close()
    robot.relay = None
    took_s = until(robot, lambda: robot.uplink.weights.ready is not None)
    assert took_s < 3.0
    assert robot.direct <= len(DATA) - CHUNK_BYTES // 2, "what came by the relay is not fetched again"
    assert robot.uplink.weights.refused == {}, "it is no fault of the relay's"
