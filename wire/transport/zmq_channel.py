"""Channels over ZeroMQ: ROUTER and DEALER with CURVE between machines, DEALER pairs over ipc within one.

All socket options are set before bind or connect: libzmq ignores most of them afterwards, without a word.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from wire.codec import MAX_MESSAGE_BYTES, decode, encode
from wire.errors import ConfigError, MessageTooLargeError, ProtocolError
from wire.messages.all import Hello, Message, Rejection
from wire.transport.auth import GUEST, Authenticator
from wire.transport.channel import FURTHER
from wire.transport.keys import GATEWAY, KeyPair, check_name, load_pair

log = logging.getLogger(__name__)

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_GUESTS_REMEMBERED = 1000
_FURTHER_REMEMBERED = 1000
_GUEST_HELLO_BYTES = 64 * 1024


class ZmqServer:
    """The gateway's one TCP port. Peers are known by the name their key is filed under, never by a claim.

    libzmq gives each line a random routing id; a name points to the newest line of its key, so a robot that comes back
    after its line was cut does not wait for TCP to give the old one up. With `apart` a second line of one name is a
    peer of its own, `name@2` and so on, until `adopt` makes it the line of the name.
    """

    def __init__(
        self, endpoint: str, keys: Path, name: str = GATEWAY, queue: int = 1000, *, apart: bool = False
    ) -> None:
        """Bind `endpoint` ("tcp://127.0.0.1:5599"; port `*` picks a free one, see `endpoint`) with the key of `name`.

        Raises `ConfigError` when the port is in use.
        """
        pair = load_pair(keys, name)
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self._lines: dict[str, bytes] = {}
        self._apart = apart
        self._further: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count(2)
        self._places: dict[str, str] = {}
        self._guests: OrderedDict[bytes, None] = OrderedDict()
        self._refused: list[tuple[str, str]] = []
        self._next_handshake_line_s = 0.0
        self.socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, queue),
            (zmq.RCVHWM, queue),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, pair.secret),
            (zmq.CURVE_PUBLICKEY, pair.public),
            (zmq.ZAP_DOMAIN, b"fleet"),
        ):
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"the gateway cannot listen on {endpoint}: {error.strerror}. "
                "Stop the program that uses the port or choose another with --port."
            ) from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: str, message: Message) -> bool:
        line = self._lines.get(peer)
        return line is not None and self._send(line, message)

    def recv(self, timeout_s: float = 0.0) -> tuple[str, Message] | None:
        """The next valid message. What is not one is logged with its sender and dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._authenticator.turn()
            self._report_handshakes()
            remaining_ms = max(0, round(1e3 * (deadline - time.monotonic())))
            # The ZAP socket must be served while we wait, or nobody new could come in.
            if not self.socket.poll(min(remaining_ms, 20)):
                if remaining_ms == 0:
                    return None
                continue
            frames = self.socket.recv_multipart(copy=False)
            line, peer = frames[0].bytes, str(frames[-1].get("User-Id"))
            if peer.startswith(GUEST):
                self._turn_away(line, peer, frames)
                continue
            if len(frames) != 2:
                log.error("dropped a message of '%s': %d parts instead of one.", peer, len(frames) - 1)
                continue
            try:
                message = decode(frames[1].bytes)
            except (ProtocolError, MessageTooLargeError) as error:
                log.error("dropped a message of '%s': %s", peer, error)
                self._send(line, Rejection(reason=str(error)))
                continue
            peer = self._peer_of(line, peer)
            self._places[peer] = str(frames[-1].get("Peer-Address"))
            return peer, message

    def adopt(self, peer: str) -> str:
        """Make the further line `peer` ("name@2") the line of its name, which is returned; the old one is forgotten."""
        name = peer.partition(FURTHER)[0]
        if peer != name and (line := self._lines.pop(peer, None)) is not None:
            self._further.pop(line, None)
            self._lines[name] = line
            self._places[name] = self._places.pop(peer, "")
        return name

    def place(self, peer: str) -> str:
        """The address that `peer` spoke from last, '' when it never did."""
        return self._places.get(peer, "")

    def refused(self) -> list[tuple[str, str]]:
        """(name, reason) of those turned away since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._authenticator.close()
        self._context.term()

    def _send(self, line: bytes, message: Message) -> bool:
        try:
            self.socket.send_multipart([line, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _peer_of(self, line: bytes, name: str) -> str:
        """Whom a message of `line` comes from."""
        if not self._apart or self._lines.setdefault(name, line) == line:
            self._lines[name] = line
            return name
        if line not in self._further:
            self._further[line] = f"{name}{FURTHER}{next(self._numbers)}"
            if len(self._further) > _FURTHER_REMEMBERED:
                _, oldest = self._further.popitem(last=False)
                self._lines.pop(oldest, None)
                self._places.pop(oldest, None)
        peer = self._further[line]
        self._lines[peer] = line
        return peer

    def _turn_away(self, line: bytes, peer: str, frames: list[zmq.Frame]) -> None:
        """Answer a guest once, with the name it gives, the reason and the way in."""
        if line in self._guests:
            return
        self._guests[line] = None
        if len(self._guests) > _GUESTS_REMEMBERED:
            self._guests.popitem(last=False)
        name = ""
        if len(frames) == 2 and len(frames[1].bytes) <= _GUEST_HELLO_BYTES:
            try:
                hello = decode(frames[1].bytes)
            except (ProtocolError, MessageTooLargeError) as error:
                log.debug("a guest sent no message: %s", error)
            else:
                if isinstance(hello, Hello):
                    name = hello.name[:64]
        file = name or "NAME"
        reason = (
            f"its key {peer[len(GUEST) :]} is not filed at the gateway. If it may connect, make its key with "
            f"`vla-fleet keys {file} --keys {self._keys}` there and copy {file}.key_secret to its machine."
        )
        self._note_refused(name or "unknown", f"from {frames[-1].get('Peer-Address')}: {reason}")
        self._send(line, Rejection(reason=f"'{name or 'unknown'}' is refused: {reason}"))

    def _note_refused(self, name: str, reason: str) -> None:
        log.error("refused '%s' %s", name, reason)
        if len(self._refused) < _GUESTS_REMEMBERED:
            self._refused.append((name, reason))

    def _report_handshakes(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            # A peer without a key tries again several times a second: one line every ten seconds tells enough.
            if time.monotonic() >= self._next_handshake_line_s:
                self._next_handshake_line_s = time.monotonic() + 10.0
                self._note_refused("unknown", f"on {event['endpoint'].decode()}: it has no key, or another gateway's.")


class ZmqClient:
    """A named peer's line to the gateway. Connects in the background and reconnects by itself."""

    def __init__(self, endpoint: str, name: str, pair: KeyPair, server_public: bytes, queue: int = 1000) -> None:
        self._name = check_name(name)
        self._endpoint = endpoint
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, queue),
            (zmq.RCVHWM, queue),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.IMMEDIATE, 1),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.CURVE_SERVERKEY, server_public),
            (zmq.CURVE_SECRETKEY, pair.secret),
            (zmq.CURVE_PUBLICKEY, pair.public),
        ):
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
        )
        self.connected = False
        """whether an authenticated line stands now"""
        self.refusal = ""
        """why no line could be made, '' when nothing is wrong; an unknown key is answered with `Rejection`"""
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"'{endpoint}' is no address of a gateway: {error.strerror}. Use tcp://HOST:PORT."
            ) from error

    def send(self, message: Message) -> bool:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        self._watch()
        if timeout_s > 0 and not self.socket.poll(round(1e3 * timeout_s)):
            return None
        return _receive(self.socket, f"the gateway at {self._endpoint}")

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.refusal = True, ""
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = False
            else:
                self.connected = False
                reason = (
                    f"'{self._name}': no CURVE handshake with {self._endpoint}: its gateway has another key than "
                    "public/gateway.key here. Copy that file from the gateway's machine."
                )
                if reason != self.refusal:
                    log.error("%s", reason)
                self.refusal = reason


class ZmqPair:
    """One end of a line between two processes of one robot computer (ipc, no encryption needed).

    A side that dies and comes back finds the line again. Sending never blocks: with nobody there, or a full queue,
    `send` returns False.
    """

    def __init__(self, endpoint: str, *, bind: bool, queue: int = 2000) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, queue)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        if bind:
            self.socket.bind(endpoint)
        else:
            self.socket.connect(endpoint)

    def send(self, message: Message) -> bool:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self, timeout_s: float = 0.0) -> Message | None:
        if timeout_s > 0 and not self.socket.poll(round(1e3 * timeout_s)):
            return None
        return _receive(self.socket, "the other process")

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def _receive(socket: zmq.Socket[bytes], sender: str) -> Message | None:
    """The next valid message that has already come; what is not one is logged and dropped."""
    # To ask costs a tenth of what ZeroMQ's exception does.
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        try:
            return decode(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        except (ProtocolError, MessageTooLargeError) as error:
            log.error("dropped a message of %s: %s", sender, error)
    return None


class Waitable(Protocol):
    """A channel that can be waited for: these here, and those through shared memory."""

    @property
    def socket(self) -> Any:
        """A ZeroMQ socket or a file descriptor."""
        ...


def wait_any(channels: Sequence[Waitable], timeout_s: float) -> None:
    """Return when one of `channels` has something to read, or after `timeout_s`."""
    sockets = [channel.socket for channel in channels]
    sockets += [channel._authenticator.socket for channel in channels if isinstance(channel, ZmqServer)]
    zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], round(1e3 * timeout_s))
