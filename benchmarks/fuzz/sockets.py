"""The same by real sockets: both ports of a gateway with CURVE, and the operator page by websocket and HTTP."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from benchmarks.fuzz.gateway import ATTACKERS, THIEF, UNGREETED, VICTIM, Colleagues, GatewayBench
from benchmarks.fuzz.mutations import JSON, MESSAGES
from benchmarks.fuzz.samples import hello
from benchmarks.fuzz.targets import fleet_messages
from cloud_learner.operator.app import serve
from cloud_learner.operator.sessions import PageMessage, PageMessageKind
from cloud_learner.operator.view import FleetView
from wire.clock import MonotonicClock
from wire.codec import encode
from wire.messages.gateway import Heartbeat
from wire.transport.keys import load_pair, load_public, make_keys
from wire.transport.zmq_channel import ZmqClient, ZmqServer

_TIMEOUT_S = 60.0
_REQUEST_S = 0.2
_SETTLE_S = 0.02
_NO_KEY = "no key"
_STRANGER, _FOREIGN = "a key that is not filed", "robot-5"
_TRIES = 20
"""messages that do not leave him, and a stranger connects anew"""
_REQUESTS = (
    b"GET / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
    b"GET /static/../app.py HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /static/%2e%2e/%2e%2e/app.py HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /api/fleet HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 1000,
    b"GET / HTTP/9.9\r\n\r\n",
)


class SocketGatewayTarget:
    """Peers with stolen keys, one with a key that nobody filed, and one that speaks no ZeroMQ at all."""

    form = MESSAGES

    def __init__(self, root: Path) -> None:
        keys, self._foreign = root / "keys", root / "foreign"
        make_keys(keys, ["gateway", VICTIM, "trainer", "console", *ATTACKERS])
        make_keys(self._foreign, [_FOREIGN])
        self._keys = keys
        self._ports = [
            ZmqServer("tcp://127.0.0.1:*", keys, apart=True),
            ZmqServer("tcp://127.0.0.1:*", keys, apart=True),
        ]
        self._bench = GatewayBench(root, self._ports[0], self._ports[1], MonotonicClock())
        self._context = zmq.Context()
        main = self._ports[0].endpoint
        self._clients = [ZmqClient(main, name, keys) for name in (VICTIM, "trainer", "console")]
        self._until(lambda: all(client.send(Heartbeat(0)) for client in self._clients))
        self.colleagues = Colleagues(self._bench, *self._clients)
        self._until(lambda: self._bench.ledger.episodes_of_robot(VICTIM) == 1)
        self._sockets = {name: [self._socket(port.endpoint, name, keys) for port in self._ports] for name in ATTACKERS}
        self._sockets[_STRANGER] = [self._socket(port.endpoint, _FOREIGN, self._foreign) for port in self._ports]
        self.kept_out = 0
        """messages of the stranger that could not leave him, for he is cut"""
        for name in ATTACKERS:
            if name != UNGREETED:
                self._send(self._sockets[name][0], [encode(hello(name, ATTACKERS[name]))])
        self.settle()

    def valid(self) -> list[tuple[str, bytes]]:
        known = fleet_messages()
        return known + [(who, data) for who in (_NO_KEY, _STRANGER) for _, data in known[:40]]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        stops = draw.random() < 0.2
        if who == _NO_KEY:
            # Rarely: each one is a connection.
            if draw.random() < 0.05:
                self._speak(self._ports[stops].endpoint, data)
            return
        parts = [data] if draw.random() < 0.9 else [data, b"", data[:5]]
        if who == _STRANGER:
            self._send_uninvited(stops, parts)
        else:
            self._send(self._sockets[who][stops], parts)

    def settle(self) -> None:
        for _ in range(4):
            self._bench.poll()
            self.colleagues.poll()
            for sockets in self._sockets.values():
                for one in sockets:
                    with contextlib.suppress(zmq.Again):
                        while True:
                            one.recv_multipart(zmq.NOBLOCK)

    def fingerprint(self) -> dict[str, Any]:
        # Whoever is served now is served at all.
        before = self.colleagues.answers
        self._until(lambda: self.colleagues.answers > before)
        return self._bench.fingerprint()

    def refused(self) -> Counter[str]:
        return self._bench.refused() + Counter({"kept out": self.kept_out})

    def close(self) -> None:
        for sockets in self._sockets.values():
            for one in sockets:
                one.close(0)
        self._context.term()
        for client in self._clients:
            client.close()
        self._ports[0].close()
        self._bench.close()

    def _socket(self, endpoint: str, name: str, keys: Path) -> zmq.Socket[bytes]:
        pair = load_pair(keys, name)
        made = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDTIMEO, 10),
            (zmq.CURVE_SERVERKEY, load_public(self._keys, "gateway")),
            (zmq.CURVE_SECRETKEY, pair.secret),
            (zmq.CURVE_PUBLICKEY, pair.public),
        ):
            made.setsockopt(option, value)
        made.connect(endpoint)
        return made

    def _send(self, one: zmq.Socket[bytes], parts: list[bytes]) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                one.send_multipart(parts)
                return
            except zmq.Again:
                if time.monotonic() > deadline_s:
                    raise
                self.settle()

    def _send_uninvited(self, stops: bool, parts: list[bytes]) -> None:
        """The gateway cuts who is not filed and says too much, and lets few in again: he comes back, and goes on."""
        try:
            self._sockets[_STRANGER][stops].send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            self.kept_out += 1
            if self.kept_out % _TRIES == 0:
                self._sockets[_STRANGER][stops].close(0)
                self._sockets[_STRANGER][stops] = self._socket(self._ports[stops].endpoint, _FOREIGN, self._foreign)

    def _speak(self, endpoint: str, data: bytes) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0) as line:
            line.sendall(data)

    def _until(self, true: Any) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not true():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the gateway does not answer")
            self._bench.poll()
            if hasattr(self, "colleagues"):
                self.colleagues.poll()
            time.sleep(0.001)


class SocketPageTarget:
    """A page by its websocket, and requests that no browser makes."""

    form = JSON

    def __init__(self, root: Path) -> None:
        self._view, self._stack = FleetView(), contextlib.ExitStack()
        self._server = serve(self._view, port=0)
        self._port = int(self._server.url.rpartition(":")[2])
        self._page = self._stack.enter_context(self._open())
        self.answered: Counter[str] = Counter()

    def valid(self) -> list[tuple[str, bytes]]:
        return [("page", msgspec.json.encode(PageMessage(kind, THIEF, (0.1,), 5, 1e3))) for kind in PageMessageKind]

    def send(self, who: str, data: bytes, draw: random.Random) -> None:
        if draw.random() < 0.02:
            self._request(draw.choice(_REQUESTS))
        try:
            self._page.send(data if draw.random() < 0.5 else data.decode(errors="replace"))
            self._read()
        except WebSocketException:
            # A message above the cap ends the connection.
            self.answered["closed"] += 1
            self._stack.close()
            self._page = self._stack.enter_context(self._open())

    def settle(self) -> None:
        time.sleep(_SETTLE_S)
        with contextlib.suppress(WebSocketException):
            self._read()
        self._view.pop_commands()

    def fingerprint(self) -> dict[str, Any]:
        with self._open() as page:
            page.send(b'{"type": "heartbeat"}')
            first = msgspec.json.decode(page.recv(_TIMEOUT_S))
        return {"served": first["type"], "robots": self._view.robots()}

    def refused(self) -> Counter[str]:
        return self.answered

    def close(self) -> None:
        self._stack.close()
        self._server.close()

    def _open(self) -> ClientConnection:
        return connect(f"ws://localhost:{self._port}/ws", origin=Origin(f"http://localhost:{self._port}"))

    def _read(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                answer = msgspec.json.decode(self._page.recv(0))
                if answer["type"] in ("error", "not_held"):
                    self.answered[answer["type"]] += 1

    def _request(self, data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), _REQUEST_S) as line:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            status = line.recv(64).split(b" ")[1:2]
            self.answered[f"http {status[0].decode(errors='replace')}" if status else "http cut"] += 1
