"""Channels over ZeroMQ: ROUTER and DEALER with CURVE, between machines.

All socket options are set before bind or connect: libzmq ignores most of them afterwards, without a word.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from wire.codec import MAX_MESSAGE_BYTES, decode, encode
from wire.errors import ConfigError, MessageTooLargeError, ProtocolError
from wire.messages import Message
from wire.messages.gateway import Hello, Rejection
from wire.transport.channel import PEER_SUFFIX
from wire.transport.keys import GATEWAY, KeyPair, authorised, load_pair, load_public
from wire.transport.shared_channel import SharedChannel

log = logging.getLogger(__name__)

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_MAX_GUESTS = 1000
_MAX_EXTRA_PEERS = 1000
_GUEST_HELLO_BYTES = 64 * 1024
_INVALID_AT_ONCE = 32
"""so many messages that are none, and whoever calls does something else first"""
_GUEST = "?"
"""starts the user id of a peer whose key is not filed; its public key follows"""


class Authenticator:
    """Says who is on the other end of a CURVE connection (ZAP, RFC 27): the name that the peer's key is filed under.

    ZAP is asked before a peer can say its name, and an operator has to know *which* robot was turned away. So a
    connection with an unknown key is let in as a guest: encrypted, under no name, able to say one `Hello` and hear one
    `Rejection`, and nothing else. pyzmq's own authenticator can only cut it without a word.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Path) -> None:
        self._keys = keys
        self._known = authorised(keys)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def poll(self) -> None:
        """Answer the handshakes that wait."""
        while self.socket.poll(0):
            # libzmq itself asks, and only about CURVE: a server with a key ends any other handshake before.
            version, request, _domain, _address, _identity, _mechanism, key = self.socket.recv_multipart()
            self.socket.send_multipart([version, request, b"200", b"OK", self._name(key).encode(), b""])

    def close(self) -> None:
        self.socket.close()

    def _name(self, key: bytes) -> str:
        public = z85.encode(key)
        if public not in self._known:
            # Keys may be filed while the gateway runs; a guest's handshake is rare enough to look again.
            self._known = authorised(self._keys)
        return self._known.get(public, _GUEST + public.decode())


class ZmqServer:
    """The gateway's one TCP port. Peers are known by the name their key is filed under, never by a claim.

    libzmq gives each connection a random routing id; a name points to the newest connection of its key, so a robot that
    comes back after its connection was cut does not wait for TCP to give the old one up. With `apart` a second
    connection of one name is a peer of its own, `name@2` and so on, until `adopt` makes it the connection of the name.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Path,
        name: str = GATEWAY,
        queue: int = 1000,
        *,
        apart: bool = False,
        option: str = "--port",
    ) -> None:
        """Bind `endpoint` ("tcp://127.0.0.1:5599"; port `*` picks a free one, see `endpoint`) with the key of `name`.

        Raises `ConfigError`, which names the `option`, when the port is in use.
        """
        pair = load_pair(keys, name)
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self._connections: dict[str, bytes] = {}
        self._apart = apart
        self._extra_peers: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count(2)
        self._addresses: dict[str, str] = {}
        self._guests: OrderedDict[bytes, None] = OrderedDict()
        self._rejections: list[tuple[str, str]] = []
        self.refused: Counter[str] = Counter()
        """what was no message of a known key, by reason"""
        self._next_handshake_report_s = 0.0
        server: dict[int, int | bytes] = {zmq.ROUTER_MANDATORY: 1, zmq.CURVE_SERVER: 1, zmq.ZAP_DOMAIN: b"fleet"}
        self.socket = _make_socket(self._context, zmq.ROUTER, pair, queue, server)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"the gateway cannot listen on {endpoint}: {error.strerror}. "
                f"Stop the program that uses the port or choose another with {option}."
            ) from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, peer: str, message: Message) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and self._send(connection, message)

    def recv(self) -> tuple[str, Message] | None:
        """The next valid message that has come, None also after many that are none. What is not one is counted, logged
        with its sender, and dropped."""
        self._authenticator.poll()
        self._report_handshakes()
        for _ in range(_INVALID_AT_ONCE):
            if not self.socket.poll(0):
                return None
            frames = self.socket.recv_multipart(copy=False)
            connection, peer = frames[0].bytes, str(frames[-1].get("User-Id"))
            if peer.startswith(_GUEST):
                self.refused["unknown_key"] += 1
                self._reject(connection, peer, frames)
                continue
            if len(frames) != 2:
                self.refused["malformed"] += 1
                log.error("dropped a message of '%s': %d parts instead of one.", peer, len(frames) - 1)
                continue
            try:
                message = decode(frames[1].bytes)
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                log.error("dropped a message of '%s': %s", peer, error)
                self._send(connection, Rejection(reason=str(error)))
                continue
            peer = self._peer_of(connection, peer)
            self._addresses[peer] = str(frames[-1].get("Peer-Address"))
            return peer, message
        return None

    def adopt(self, peer: str) -> str:
        """Make the further connection `peer` ("name@2") that of its name, which is returned; forget the old one."""
        name = peer.partition(PEER_SUFFIX)[0]
        if peer != name and (connection := self._connections.pop(peer, None)) is not None:
            self._extra_peers.pop(connection, None)
            self._connections[name] = connection
            self._addresses[name] = self._addresses.pop(peer, "")
        return name

    def address(self, peer: str) -> str:
        """The address that `peer` spoke from last, '' when it never did."""
        return self._addresses.get(peer, "")

    def rejections(self) -> list[tuple[str, str]]:
        """(name, reason) of those turned away since the last call."""
        rejections, self._rejections = self._rejections, []
        return rejections

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._authenticator.close()
        self._context.term()

    def _send(self, connection: bytes, message: Message) -> bool:
        try:
            self.socket.send_multipart([connection, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _peer_of(self, connection: bytes, name: str) -> str:
        """Whom a message of `connection` comes from."""
        if not self._apart or self._connections.setdefault(name, connection) == connection:
            self._connections[name] = connection
            return name
        if connection not in self._extra_peers:
            self._extra_peers[connection] = f"{name}{PEER_SUFFIX}{next(self._numbers)}"
            if len(self._extra_peers) > _MAX_EXTRA_PEERS:
                _, oldest = self._extra_peers.popitem(last=False)
                self._connections.pop(oldest, None)
                self._addresses.pop(oldest, None)
        peer = self._extra_peers[connection]
        self._connections[peer] = connection
        return peer

    def _reject(self, connection: bytes, peer: str, frames: list[zmq.Frame]) -> None:
        """Answer a guest once, with the name it gives, the reason and the way in."""
        if connection in self._guests:
            return
        self._guests[connection] = None
        if len(self._guests) > _MAX_GUESTS:
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
            f"its key {peer[len(_GUEST) :]} is not filed at the gateway. If it may connect, make its key with "
            f"`vla-fleet keys {file} --keys {self._keys}` there and copy {file}.key_secret to its machine."
        )
        self._note_rejection(name or "unknown", f"from {frames[-1].get('Peer-Address')}: {reason}")
        self._send(connection, Rejection(reason=f"'{name or 'unknown'}' is refused: {reason}"))

    def _note_rejection(self, name: str, reason: str) -> None:
        log.error("refused '%s' %s", name, reason)
        if len(self._rejections) < _MAX_GUESTS:
            self._rejections.append((name, reason))

    def _report_handshakes(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            # A peer without a key tries again several times a second: one report every ten seconds tells enough.
            if time.monotonic() >= self._next_handshake_report_s:
                self._next_handshake_report_s = time.monotonic() + 10.0
                endpoint = event["endpoint"].decode()
                self._note_rejection("unknown", f"on {endpoint}: it has no key, or another gateway's.")


class ZmqClient:
    """A named peer's connection to the gateway. Connects in the background and reconnects by itself."""

    def __init__(self, endpoint: str, name: str, keys: Path, server: str = GATEWAY, queue: int = 1000) -> None:
        """`keys`: the directory that has the key of `name` and the public one of `server`. Raises `ConfigError` when
        one is missing, or for an `endpoint` that is none."""
        pair, server_public = load_pair(keys, name), load_public(keys, server)
        self._name = name
        self._endpoint = endpoint
        self._context = zmq.Context()
        client: dict[int, int | bytes] = {
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
            zmq.CURVE_SERVERKEY: server_public,
        }
        self.socket = _make_socket(self._context, zmq.DEALER, pair, queue, client)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.refusal = ""
        """why no connection could be made, '' when nothing is wrong; an unknown key is answered with `Rejection`"""
        self.refused: Counter[str] = Counter()
        """what was no message, by reason"""
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

    def recv(self) -> Message | None:
        self._watch()
        for _ in range(_INVALID_AT_ONCE):
            # To ask costs a tenth of what ZeroMQ's exception does.
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return None
            try:
                return decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                log.error("dropped a message of the gateway at %s: %s", self._endpoint, error)
        return None

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()

    def _watch(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.refusal = ""
                continue
            reason = (
                f"'{self._name}': no CURVE handshake with {self._endpoint}: its gateway has another key than "
                "public/gateway.key here. Copy that file from the gateway's machine."
            )
            if reason != self.refusal:
                log.error("%s", reason)
            self.refusal = reason


def _make_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, pair: KeyPair, queue: int, more: Mapping[int, int | bytes]
) -> zmq.Socket[bytes]:
    """A socket with the options of both sides and `more`, before it is bound or connected."""
    options = {
        zmq.LINGER: 500,
        zmq.SNDHWM: queue,
        zmq.RCVHWM: queue,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
        zmq.CURVE_SECRETKEY: pair.secret,
        zmq.CURVE_PUBLICKEY: pair.public,
        **more,
    }
    socket = context.socket(kind)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def wait_any(channels: Sequence[ZmqServer | ZmqClient | SharedChannel | int], timeout_s: float) -> None:
    """Return when one of `channels`, or of file descriptors, has something to read or to do, or after `timeout_s`."""
    sockets: list[zmq.Socket[bytes] | int] = [
        channel if isinstance(channel, int) else channel.socket for channel in channels
    ]
    sockets += [channel._authenticator.socket for channel in channels if isinstance(channel, ZmqServer)]
    zmq.zmq_poll([(socket, zmq.POLLIN) for socket in sockets], round(1e3 * timeout_s))
