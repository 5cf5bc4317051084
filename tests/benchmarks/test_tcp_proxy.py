"""A bad network between real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.tcp_proxy import TcpProxy
from wire.messages.gateway import Heartbeat
from wire.transport.faults import FaultPlan, FaultWindow, LinkState
from wire.transport.keys import make_keys
from wire.transport.zmq_channel import ZmqClient, ZmqServer, wait_any

DATA = bytes(range(256)) * 40


@pytest.fixture
def echo() -> Iterator[int]:
    """A port that says what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=repeat, args=(connection,), daemon=True).start()

        def repeat(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def through(port: int, plan: FaultPlan, data: bytes = DATA) -> bytes:
    """What comes back of `data`."""
    with TcpProxy("127.0.0.1", port, plan) as proxy:
        return said_back(proxy, data)


def said_back(proxy: TcpProxy, data: bytes = DATA) -> bytes:
    came = b""
    with socket.create_connection(("127.0.0.1", proxy.port), 60) as line:
        line.sendall(data)
        while len(came) < len(data) and (part := line.recv(1 << 16)):
            came += part
    return came


def until(true: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_faults_everything_passes(echo: int) -> None:
    assert through(echo, FaultPlan()) == DATA


def test_delays_losses_and_a_slow_line_make_it_late_and_no_more(echo: int) -> None:
    plan = FaultPlan((FaultWindow(delay_s=0.1, jitter_s=0.01, drop=0.2, bytes_per_s=1e5),), seed=3)
    begun_s = time.monotonic()
    assert through(echo, plan) == DATA
    # twice the delay, twice the way of 10 kB at 100 kB/s
    assert time.monotonic() - begun_s > 0.3


def test_the_same_bits_are_turned_each_time_however_the_bytes_come_in(echo: int) -> None:
    plan = FaultPlan((FaultWindow(corrupt=0.5),), seed=1)
    first, again = through(echo, plan), through(echo, plan)
    assert first == again
    turned = sum(a != b for a, b in zip(first, DATA, strict=True))
    assert 0 < turned <= 2 * (len(DATA) // 1400 + 1)
    assert through(echo, FaultPlan(plan.windows, seed=2)) != first


def test_what_a_stalled_line_holds_comes_afterwards(echo: int) -> None:
    begun_s = time.monotonic()
    assert through(echo, FaultPlan((FaultWindow(0, 0.5, LinkState.stalled),))) == DATA
    assert time.monotonic() - begun_s >= 0.5


def test_a_cut_ends_what_is_open_and_refuses_what_comes_until_it_is_over(echo: int) -> None:
    with TcpProxy("127.0.0.1", echo, FaultPlan()) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), 60) as line:
            line.sendall(b"a")
            assert line.recv(1) == b"a"
            proxy.follow(FaultPlan((FaultWindow(link=LinkState.cut),)))
            with pytest.raises(ConnectionError):
                assert line.recv(1) == b""
                raise ConnectionResetError
        with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", proxy.port), 60) as line:
            if line.recv(1) == b"":
                raise ConnectionResetError
        proxy.follow(FaultPlan())
        assert said_back(proxy) == DATA


def test_a_silent_line_looks_alive_and_ends_when_it_could_speak_again(echo: int) -> None:
    silent = FaultPlan((FaultWindow(link=LinkState.silent),))
    with (
        TcpProxy("127.0.0.1", echo, silent) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), 60) as line,
    ):
        line.sendall(b"a")
        line.settimeout(0.3)
        with pytest.raises(TimeoutError):
            line.recv(1)
        line.settimeout(60)
        proxy.follow(FaultPlan())
        with pytest.raises(ConnectionError):
            assert line.recv(1) == b""
            raise ConnectionResetError


def test_a_peer_with_a_key_comes_back_after_a_cut(tmp_path: Path) -> None:
    make_keys(tmp_path, ["gateway", "robot-0"])
    server = ZmqServer("tcp://127.0.0.1:*", tmp_path)
    port = int(server.endpoint.rpartition(":")[2])
    heard: list[int] = []

    def hears(number: int) -> bool:
        client.send(Heartbeat(number))
        wait_any([server, client], 0.02)
        while (received := server.recv()) is not None:
            assert isinstance(received[1], Heartbeat)
            heard.append(received[1].sent_ns)
        client.recv()
        return number in heard

    with TcpProxy("127.0.0.1", port, FaultPlan()) as proxy:
        client = ZmqClient(f"tcp://127.0.0.1:{proxy.port}", "robot-0", tmp_path)
        try:
            until(lambda: hears(1))
            proxy.follow(FaultPlan((FaultWindow(0, 0.3, LinkState.cut), FaultWindow(0.3, 0.6, corrupt=1.0))))
            until(lambda: hears(2) and proxy.now_s() > 0.6)
            until(lambda: hears(3))
        finally:
            client.close()
            server.close()
