"""Why a connection to a gateway does not come about, from what libzmq's monitor says of it.

libzmq says the same when a gateway's key is another one, when the gateway was killed in the middle of a handshake and
when a tunnel has none behind it: the connection was closed. So what is there is looked at before anything is said.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

log = logging.getLogger(__name__)

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""of ZMTP 3.1 (RFC 37), from a client"""
_MECHANISM = slice(12, 32)
_AT_ONCE_S = 5.0
"""a gateway of another key closes the connection at once; one that is busy leaves it open until libzmq gives it up"""
_SUSPICIOUS = 2
_AGAIN_S = 2.0
"""libzmq does not try again after a refusal by key, nor after bytes that are not ZeroMQ's; we do, after so long"""


class HandshakeWatch:
    """Fed with events of a client's monitor. `refusal` says what is wrong, once that is certain."""

    def __init__(self, name: str, endpoint: str, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`server`: whose public key the client has."""
        self.refusal = ""
        """why no connection can be made, '' when nothing is wrong or nobody can tell"""
        self.succeeded = False
        """whether the other side has ever shown that it has the key, and let ours in"""
        self.lost = 0
        """how often a connection ended since"""
        self._name, self._endpoint, self._server, self._clock = name, endpoint, server, clock
        self._connected_s = 0.0
        self._closed_at_once = 0
        self._probe: GatewayProbe | None = None
        self._gateway_there = False
        self._ended_s: float | None = None

    def on_event(self, event: int) -> None:
        """Something happened to the connection."""
        now_s = self._clock()
        self._ended_s = now_s if event == zmq.EVENT_DISCONNECTED else None
        self.lost += self.succeeded and event == zmq.EVENT_DISCONNECTED
        match event:
            case zmq.EVENT_CONNECTED:
                self._connected_s = now_s
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.succeeded, self.refusal = True, ""
                self._forget()
            case zmq.EVENT_CLOSED:
                # Nobody listens there now: what was closed before was a gateway that ended.
                self._forget()
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._ended_s = now_s
                self.refuse(
                    f"the gateway at {self._endpoint} does not let its key in: the key was revoked there, or it is not "
                    "filed and too many such came from here. The gateway's log says which."
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._ended_s = now_s
                self.refuse(f"what answers at {self._endpoint} is no gateway, or what it says arrives damaged.")
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if now_s - self._connected_s < _AT_ONCE_S:
                self._on_closed_at_once()

    def poll(self) -> bool:
        """Look at what is there, if there is reason to; True when libzmq has given up and has to be told to connect."""
        if self._probe is not None and (found := self._probe.poll()) is not None:
            self._probe.close()
            self._probe, self._gateway_there = None, found
            self._closed_at_once *= found
        if self._ended_s is None or self._clock() - self._ended_s < _AGAIN_S:
            return False
        self._ended_s = None
        return True

    def close(self) -> None:
        self._forget()

    def _on_closed_at_once(self) -> None:
        self._closed_at_once += 1
        if self._gateway_there:
            # A gateway answered, and still closes what is encrypted for the key that we know.
            self.refuse(
                f"no CURVE handshake with {self._endpoint}: its {self._server} has another key than "
                f"public/{self._server}.key here. Copy that file from the {self._server}'s machine."
            )
        elif self._closed_at_once >= _SUSPICIOUS and self._probe is None:
            self._probe = GatewayProbe(self._endpoint)

    def refuse(self, why: str) -> None:
        """Note what is wrong, until hands are shaken again."""
        reason = f"'{self._name}': {why}"
        if reason != self.refusal:
            log.error("%s", reason)
        self.refusal = reason

    def _forget(self) -> None:
        self._closed_at_once, self._gateway_there = 0, False
        if self._probe is not None:
            self._probe.close()
            self._probe = None


class GatewayProbe:
    """Says hello as ZeroMQ does, on a connection of its own: does anything answer that speaks ZeroMQ with CURVE?"""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: tcp://HOST:PORT, which was reached a moment ago."""
        self._to_send, self._received = _GREETING, b""
        self._socket: socket.socket | None = None
        parts = urlsplit(endpoint)
        with contextlib.suppress(OSError, ValueError):
            family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind)
            self._socket.setblocking(False)
            self._socket.connect_ex(address)

    def poll(self) -> bool | None:
        """True or False, None while that is not known; never waits."""
        if self._socket is None:
            return False
        try:
            if self._to_send:
                self._to_send = self._to_send[self._socket.send(self._to_send) :]
            part = self._socket.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._received += part
        if len(self._received) >= _MECHANISM.stop:
            return self._received[:1] == b"\xff" and self._received[_MECHANISM].rstrip(b"\0") == b"CURVE"
        return None if part else False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
