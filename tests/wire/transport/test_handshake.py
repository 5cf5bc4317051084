"""A gateway with another key is told from one that is starting, one that was killed and a tunnel that leads nowhere."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from wire.clock import ManualClock
from wire.messages.gateway import Heartbeat, Hello
from wire.transport import handshake, zmq_channel
from wire.transport.handshake import GatewayProbe, HandshakeWatch
from wire.transport.keys import make_keys, revoke
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any

CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Scripted:
    """A probe that finds what the test says."""

    found: bool | None = True

    def __init__(self, endpoint: str) -> None:
        self.closed = False

    def poll(self) -> bool | None:
        return self.found

    def close(self) -> None:
        self.closed = True


class Watched:
    """The watch, and libzmq as the test plays it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: bool | None = True) -> None:
        monkeypatch.setattr(Scripted, "found", found)
        monkeypatch.setattr(handshake, "GatewayProbe", Scripted)
        self.now_s = 0.0
        self.watch = HandshakeWatch("robot-0", "tcp://there:5760", "gateway", lambda: self.now_s)

    def attempt(self, *events: int, after_s: float = 0.01) -> None:
        """A TCP connection, what becomes of it, and its end, after which libzmq tries again."""
        self.watch.on_event(zmq.EVENT_CONNECT_DELAYED)
        self.watch.on_event(zmq.EVENT_CONNECTED)
        self.now_s += after_s
        for event in (*events, zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED):
            self.watch.on_event(event)
        self.now_s += 0.1
        assert not self.watch.poll()


def test_another_key_is_named_when_a_gateway_answers_and_closes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch)
    scene.attempt(CLOSED)
    scene.attempt(CLOSED)
    assert scene.watch.refusal == ""
    scene.attempt(CLOSED)
    assert "its gateway has another key than public/gateway.key here" in scene.watch.refusal
    scene.watch.on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert scene.watch.refusal == ""


def test_a_gateway_that_is_killed_in_the_middle_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them nobody listens."""
    scene = Watched(monkeypatch)
    for _ in range(20):
        scene.attempt(CLOSED)
        scene.watch.on_event(zmq.EVENT_CONNECT_DELAYED)
        scene.watch.on_event(zmq.EVENT_CLOSED)
        scene.watch.on_event(zmq.EVENT_CONNECT_RETRIED)
    assert scene.watch.refusal == ""


def test_a_tunnel_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Watched(monkeypatch, found=False)
    for _ in range(20):
        scene.attempt(CLOSED)
    assert scene.watch.refusal == ""


def test_a_gateway_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq gives a handshake up after half a minute."""
    scene = Watched(monkeypatch)
    for _ in range(20):
        scene.attempt(CLOSED, after_s=30.0)
    assert scene.watch.refusal == ""


@pytest.mark.parametrize("event", [zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, None])
def test_where_libzmq_gives_up_we_do_not(monkeypatch: pytest.MonkeyPatch, event: int | None) -> None:
    scene = Watched(monkeypatch)
    for one in (zmq.EVENT_CONNECTED, *([] if event is None else [event]), zmq.EVENT_DISCONNECTED):
        scene.watch.on_event(one)
    assert not scene.watch.poll()
    assert (scene.watch.refusal != "") == (event is not None)
    scene.now_s += 5.0
    assert scene.watch.poll()
    assert not scene.watch.poll()


# --- over real sockets ------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["gateway", "robot-0", "trainer"])
    return tmp_path / "keys"


class Listener:
    """TCP, and something other than a gateway behind it."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self.accepted = 0
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            with connection:
                self._answer(connection)

    def close(self) -> None:
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[socket.socket], None]], Listener]]:
    made: list[Listener] = []

    def make(answer: Callable[[socket.socket], None]) -> Listener:
        made.append(Listener(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(done: Callable[[], object], *channels: ZmqServer | ZmqClient) -> None:
    """Have every channel hear what comes until something is so."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it took too long"
        wait_any(channels, 0.01)
        for channel in channels:
            channel.recv()


def test_a_tunnel_without_a_gateway_behind_it_is_not_another_key(
    keys: Path, listen: Callable[[Callable[[socket.socket], None]], Listener]
) -> None:
    """It takes every connection and closes it: what a gateway that has not started looks like from outside."""
    tunnel = listen(lambda connection: None)
    client, clock = ZmqClient(tunnel.endpoint, "trainer", keys), ManualClock(10**9)
    session = GatewaySession(client, Hello("trainer", "trainer", "c", 0), clock)
    until(lambda: tunnel.accepted > 12, client)
    session.raise_if_rejected()
    clock.advance(60 * 10**9)
    session.raise_if_rejected()
    assert session.refusal == ""
    client.close()


def test_a_gateway_that_is_killed_while_hands_are_shaken_and_comes_back(keys: Path) -> None:
    """It listens, and does not come to say whose key it is; then another one does."""
    server = ZmqServer("tcp://127.0.0.1:*", keys)
    endpoint = server.endpoint
    client = ZmqClient(endpoint, "robot-0", keys)
    for _ in range(3):
        until(lambda: server._authenticator.socket.poll(0), client)
        server.close()
        server = ZmqServer(endpoint, keys)
    until(lambda: client.handshake.succeeded, client, server)
    assert client.send(Heartbeat(1)) and client.refusal == ""
    client.close()
    server.close()


def test_a_gateway_that_is_slow_to_start_is_not_another_key(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, opens a buffer that is far away, and hears nobody meanwhile: attempt after attempt is given up."""
    monkeypatch.setattr(zmq_channel, "_HANDSHAKE_MS", 300)
    monkeypatch.setattr(handshake, "_AT_ONCE_S", 0.2)
    server = ZmqServer("tcp://127.0.0.1:*", keys)
    client, clock = ZmqClient(server.endpoint, "trainer", keys), ManualClock(10**9)
    session, given_up = GatewaySession(client, Hello("trainer", "trainer", "c", 0), clock), 0
    seen = client.handshake.on_event

    def note(event: int) -> None:
        nonlocal given_up
        given_up += event == CLOSED
        seen(event)

    monkeypatch.setattr(client.handshake, "on_event", note)
    until(lambda: given_up >= 5, client)
    clock.advance(60 * 10**9)
    session.raise_if_rejected()
    assert session.refusal == ""
    until(lambda: client.send(Heartbeat(1)) and client.handshake.succeeded, client, server)
    client.close()
    server.close()


def test_a_gateway_with_another_key_is_named_and_the_right_one_is_found_afterwards(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", ["gateway"])
    server = ZmqServer("tcp://127.0.0.1:*", tmp_path / "other")
    client = ZmqClient(server.endpoint, "robot-0", keys)
    until(lambda: "its gateway has another key" in client.refusal, client, server)
    server.close()
    server = ZmqServer(server.endpoint, keys)
    until(lambda: client.handshake.succeeded, client, server)
    assert client.refusal == ""
    client.close()
    server.close()


def test_what_is_no_gateway_is_said_and_the_gateway_found_when_it_is_there(
    keys: Path, listen: Callable[[Callable[[socket.socket], None]], Listener]
) -> None:
    """libzmq does not try again by itself after such an answer."""

    def web(connection: socket.socket) -> None:
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(55, b"\0"))
        while connection.recv(1000):
            pass

    there = listen(web)
    client = ZmqClient(there.endpoint, "robot-0", keys)
    until(lambda: "is no gateway" in client.refusal, client)
    there.close()
    server = ZmqServer(there.endpoint, keys)
    until(lambda: client.handshake.succeeded, client, server)
    assert client.refusal == ""
    client.close()
    server.close()


def test_a_key_that_is_not_let_in_any_more_is_told_from_another_gateway(keys: Path) -> None:
    server = ZmqServer("tcp://127.0.0.1:*", keys)
    client = ZmqClient(server.endpoint, "robot-0", keys)
    until(lambda: client.send(Heartbeat(1)), client, server)
    revoke(keys, "robot-0")
    until(lambda: client.refusal, client, server)
    assert "does not let its key in" in client.refusal and "another key" not in client.refusal
    client.close()
    server.close()


def test_a_probe_knows_a_gateway(keys: Path, listen: Callable[[Callable[[socket.socket], None]], Listener]) -> None:
    server = ZmqServer("tcp://127.0.0.1:*", keys)
    web = listen(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)))
    nobody = socket.create_server(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    for endpoint, there in ((server.endpoint, True), (web.endpoint, False), (f"tcp://127.0.0.1:{port}", False)):
        probe, found, end = GatewayProbe(endpoint), None, time.monotonic() + 60
        while (found := probe.poll()) is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        probe.close()
        assert found is there, endpoint
    server.close()
