"""A key is revoked while its robot is connected, over real ZeroMQ to both of the gateway's ports; and strangers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from cloud_learner.gateway.stop_server import StopServer
from tests.cloud_learner.dispatch.hall import SPEC, Hall
from wire.clock import clock_name
from wire.identity.refusals import AddressLimit, RefusalReason
from wire.messages.gateway import Heartbeat, Hello, HelloAck
from wire.transport.keys import load_public, make_keys, revoke
from wire.transport.zmq_channel import ZmqClient, ZmqServer

NAMES = ("robot-0", "robot-1")


class Robot:
    """Its two connections, kept as a robot keeps them."""

    def __init__(self, name: str, keys: Path, gateway: ZmqServer, stops: ZmqServer) -> None:
        self.name = name
        self.messages = ZmqClient(gateway.endpoint, name, keys)
        self.stops = ZmqClient(stops.endpoint, name, keys)
        self.acks = [0, 0]

    def poll(self) -> None:
        self.messages.send(Hello(self.name, "edge", clock_name(), 1, 7, SPEC, ("reach", "push")))
        self.stops.send(Heartbeat(1))
        for number, client in enumerate((self.messages, self.stops)):
            while (message := client.recv()) is not None:
                self.acks[number] += isinstance(message, HelloAck)

    @property
    def lost(self) -> tuple[int, int]:
        return self.messages.handshake.lost, self.stops.handshake.lost


class Fleet:
    """A gateway with both of its ports, and two robots."""

    def __init__(self, root: Path) -> None:
        self.keys = root / "keys"
        make_keys(self.keys, ["gateway", *NAMES])
        self.ports = tuple(ZmqServer("tcp://127.0.0.1:*", self.keys, apart=True) for _ in range(2))
        self.hall = Hall(root / "data", server=self.ports[0], stops=self._stops)  # type: ignore[arg-type]
        self.robots = [Robot(name, self.keys, *self.ports) for name in NAMES]

    def _stops(self, clock: object) -> StopServer:
        return StopServer(self.ports[1], clock, 1)  # type: ignore[arg-type]

    def until(self, done: Callable[[], object], *more: Robot) -> None:
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end, "it took too long"
            for robot in (*self.robots, *more):
                robot.poll()
            self.hall.gateway.poll()
            assert self.hall.stops is not None
            self.hall.stops.poll()
            time.sleep(0.005)

    def close(self) -> None:
        for robot in self.robots:
            robot.messages.close()
            robot.stops.close()
        assert self.hall.stops is not None
        self.hall.stops.close()
        self.ports[0].close()
        self.hall.ledger.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_a_revoked_key_is_cut_off_from_both_ports_and_stays_out(fleet: Fleet) -> None:
    stolen, other = fleet.robots
    fleet.until(lambda: min(*stolen.acks, *other.acks) > 0)
    assert fleet.ports[0].role("robot-0") == "edge"
    revoke(fleet.keys, "robot-0")
    fleet.until(lambda: min(stolen.lost) > 0)
    fleet.until(lambda: stolen.messages.refusal and stolen.stops.refusal)
    assert "does not let its key in" in stolen.messages.refusal
    for port in fleet.ports:
        assert port.role("robot-0") == "" and not port.send("robot-0", Heartbeat(1))
        assert port.refusals.counts[RefusalReason.revoked_key] >= 2, "once when it was cut, and when it came again"
    acks, seen = list(stolen.acks), list(other.acks)
    fleet.until(lambda: min(other.acks) > max(seen) + 20)
    assert stolen.acks == acks and other.lost == (0, 0), "the other robot was not disturbed"
    events = [event["text"] for event in fleet.hall.view.snapshot()["events"] if event["robot"] == "robot-0"]
    assert any("its key was revoked" in text for text in events)


def test_a_new_pair_under_the_name_of_a_revoked_one_is_let_in(fleet: Fleet) -> None:
    stolen, _ = fleet.robots
    fleet.until(lambda: min(stolen.acks) > 0)
    revoke(fleet.keys, "robot-0")
    fleet.until(lambda: min(stolen.lost) > 0)
    make_keys(fleet.keys, ["robot-0"])
    again = Robot("robot-0", fleet.keys, *fleet.ports)
    fleet.until(lambda: min(again.acks) > 0, again)
    assert min(stolen.lost) > 0 and "does not let its key in" in stolen.messages.refusal
    again.messages.close()
    again.stops.close()


def test_unknown_keys_by_the_thousand_cost_no_look_at_the_disk(fleet: Fleet, tmp_path: Path) -> None:
    """As libzmq asks about them, from one address: a few are heard, the others not even let in."""
    port = fleet.ports[0]
    reads, authenticator = port._keyring.reads, port._authenticator
    authenticator._guests = AddressLimit(20, 1.0, lambda: 0.0)
    admitted = sum(authenticator._admits(f"{number:040}", "10.0.0.9") for number in range(5000))
    assert admitted == 20
    assert port.refusals.counts[RefusalReason.too_many_unknown] == 5000 - admitted
    assert port._keyring.reads == reads
    assert authenticator._admits(load_public(fleet.keys, "robot-1").decode(), "10.0.0.9"), "its own robot is let in"


def test_unknown_keys_by_the_hundred_over_real_sockets(fleet: Fleet) -> None:
    """Meanwhile the robots are served as ever."""
    port, server_public = fleet.ports[0], load_public(fleet.keys, "gateway")
    port._authenticator._guests = AddressLimit(5, 1.0, lambda: 0.0)
    fleet.until(lambda: min(min(robot.acks) for robot in fleet.robots) > 0)
    reads, robot = port._keyring.reads, fleet.robots[0]
    for _ in range(8):
        context, before = zmq.Context(), list(robot.acks)
        strangers = [context.socket(zmq.DEALER) for _ in range(40)]
        for stranger in strangers:
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_serverkey = server_public
            stranger.linger = 0
            stranger.connect(port.endpoint)
            stranger.send(b"\x06garbage")
        counts, seen = port.refusals.counts, sum(port.refusals.counts.values())
        fleet.until(lambda: sum(counts.values()) >= seen + 40 and min(robot.acks) > max(before))
        context.destroy()
    assert 1 <= counts[RefusalReason.malformed] <= 5 and counts[RefusalReason.too_many_unknown] >= 8 * 40 - 5
    assert port._keyring.reads == reads
    assert all(one.lost == (0, 0) for one in fleet.robots)


def test_a_stranger_that_goes_on_talking_does_not_keep_the_gateway_from_its_turn(fleet: Fleet, tmp_path: Path) -> None:
    make_keys(tmp_path / "strange", ["robot-9", "gateway"])
    (tmp_path / "strange" / "public" / "gateway.key").write_bytes((fleet.keys / "public" / "gateway.key").read_bytes())
    stranger = ZmqClient(fleet.ports[0].endpoint, "robot-9", tmp_path / "strange", queue=100_000)
    good = fleet.robots[0]
    fleet.until(lambda: min(good.acks) > 0 and stranger.recv() is None and stranger.handshake.succeeded)
    sent = 0
    while sent < 3000:
        try:
            stranger.socket.send(b"\x06garbage", zmq.NOBLOCK)
        except zmq.Again:
            stranger.recv()
            fleet.ports[0].recv()
        sent += 1
    before = list(good.acks)
    fleet.until(lambda: min(good.acks) > max(before) and stranger.recv() is None and stranger.handshake.lost > 0)
    assert good.lost == (0, 0)
    assert fleet.ports[0].refusals.counts[RefusalReason.malformed] >= 1
    assert len(fleet.ports[0]._guests._here) <= 1000
    stranger.close()
