"""Channels over ZeroMQ: ROUTER and DEALER with CURVE, between machines.

All socket options are set before bind or connect: libzmq ignores most of them afterwards, without a word.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from wire.codec import MAX_MESSAGE_BYTES, Undecoded, decode, decode_unless, encode
from wire.errors import ConfigError, MessageTooLargeError, ProtocolError, ProtocolVersionError
from wire.identity.admission import Authenticator, TcpConnection
from wire.identity.guests import Guests
from wire.identity.keyring import Keyring
from wire.identity.refusals import AddressLimit, RefusalReason, Refusals
from wire.messages import Message
from wire.messages.gateway import Rejection
from wire.transport.channel import PEER_SUFFIX
from wire.transport.handshake import EVENTS, HandshakeWatch
from wire.transport.keys import GATEWAY, Credentials, KeyPair, KeyRecord, Teaching, load_pair, load_public
from wire.transport.shared_channel import SharedChannel
from wire.types import Role

log = logging.getLogger(__name__)
R = TypeVar("R")

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_CONNECT_MS = 3000
"""where nothing answers, not even that nobody is there, TCP alone would try for two minutes; each attempt looks up the
gateway's name again"""
_HANDSHAKE_MS = 8000
"""from then on a line that fell silent in the middle of a handshake is given up"""
_MAX_SILENT = 1000
_MAX_LINES = 4096
_MAX_EXTRA_PEERS = 1000
_EVENTS_AT_ONCE = 128
"""more than handshakes that are answered at once: who speaks is known to have come before"""
_WATCH_S = 0.005
"""between two looks at who wants in and who must out, while messages come one after the other"""
_INVALID_AT_ONCE = 32
"""so many messages that are none, and whoever calls does something else first"""


class _Line(NamedTuple):
    """A connection that something came by."""

    public: str
    tcp: TcpConnection


class ZmqServer:
    """The gateway's one TCP port. Peers are known by the name their key is filed under, never by a claim.

    libzmq gives each connection a random routing id; a name points to the newest connection of its key, so a robot that
    comes back after its connection was cut does not wait for TCP to give the old one up. With `apart` a second
    connection of one name is a peer of its own, `name@2` and so on, until `adopt` makes it the connection of the name.
    A key that is filed counts at once, one that is revoked is cut within half a second.
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
        enrols: bool = False,
    ) -> None:
        """Bind `endpoint` ("tcp://127.0.0.1:5599"; port `*` picks a free one, see `endpoint`) with the key of `name`.
        `enrols`: whether robots may join here by a token.

        Raises `ConfigError`, which names the `option`, when the port is in use.
        """
        pair = load_pair(keys, name)
        self.refusals = Refusals()
        self._keyring = Keyring(keys)
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context, self._keyring, self.refusals)
        self._connections: dict[str, bytes] = {}
        self._roles: dict[str, Role] = {}
        self._apart = apart
        self._extra_peers: OrderedDict[bytes, str] = OrderedDict()
        self._numbers = itertools.count(2)
        self._addresses: dict[str, str] = {}
        self._lines: OrderedDict[bytes, _Line] = OrderedDict()
        self._guests = Guests(keys, self._keyring, self.refusals, enrols=enrols)
        self._silent: OrderedDict[int, TcpConnection] = OrderedDict()
        """by file descriptor: accepted, and nothing came by it yet"""
        self._handshakes = AddressLimit(1, 10.0)
        self._versions = AddressLimit(1, 60.0)
        """a peer of another version goes on trying"""
        server: dict[int, int | bytes] = {zmq.ROUTER_MANDATORY: 1, zmq.CURVE_SERVER: 1, zmq.ZAP_DOMAIN: b"fleet"}
        self.socket = _make_socket(self._context, zmq.ROUTER, pair, queue, server)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
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
        self._next_watch_s = 0.0
        self._port = self._guests.port = int(self.endpoint.rpartition(":")[2])

    def send(self, peer: str, message: Message) -> bool:
        connection = self._connections.get(peer)
        return connection is not None and self._send(connection, message)

    def recv(self) -> tuple[str, Message] | None:
        """The next valid message that has come, None also after many that are none. What is not one is counted in
        `refusals`, told with its sender, and dropped."""
        return self._recv(decode)

    def recv_unless(self, kinds: Set[type[Message]]) -> tuple[str, Message | Undecoded] | None:
        """As `recv`; messages of these kinds come undecoded, for whoever hands them on."""
        return self._recv(lambda data: decode_unless(data, kinds))

    def _recv(self, read: Callable[[bytes], R]) -> tuple[str, R] | None:
        if time.monotonic() >= self._next_watch_s:
            self._watch()
        for _ in range(_INVALID_AT_ONCE):
            if not _readable(self.socket):
                self._watch()
                return None
            frames = self.socket.recv_multipart(copy=False)
            connection, public = frames[0].bytes, str(frames[-1].get("User-Id"))
            address = str(frames[-1].get("Peer-Address"))
            if connection not in self._lines:
                self._note_line(connection, public, frames[-1])
            if (record := self._keyring.record(public)) is None:
                answer = self._guests.hear(connection, self._lines[connection].tcp, public, address, frames)
                if answer is not None:
                    self._send(connection, answer)
                continue
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} parts instead of one.")
                message = read(frames[1].bytes)
            except ProtocolVersionError as error:
                # It cannot read the answer, but for the version that it begins with.
                self.refusals.note(
                    RefusalReason.version, record.name, f"from {address}: {error}", record.name, self._versions
                )
                self._send(connection, Rejection(reason=str(error)))
                continue
            except (ProtocolError, MessageTooLargeError) as error:
                self.refusals.counts[error.reason] += 1
                if self.refusals.limit.take(record.name):
                    log.error("dropped a message of '%s': %s", record.name, error)
                self._send(connection, Rejection(reason=str(error)))
                continue
            peer = self._peer_of(connection, record.name)
            self._addresses[peer] = address
            self._roles[record.name] = record.role
            return peer, message
        return None

    @property
    def refused(self) -> Counter[str]:
        """What was refused here, by reason: `RefusalReason`, and those of the codec."""
        return self.refusals.counts

    def role(self, peer: str) -> str:
        """The role of the key of `peer`, '' when it never spoke or its key was revoked."""
        return self._roles.get(peer.partition(PEER_SUFFIX)[0], "")

    def may_teach(self, peer: str) -> frozenset[Teaching]:
        """As the record of its key says now, nothing when that was revoked. For any thread."""
        record = self._keyring.of_name(peer.partition(PEER_SUFFIX)[0])
        return record.may_teach if record is not None else frozenset()

    def key_record(self, name: str) -> KeyRecord | None:
        """Of the key that this name has now, whether or not it ever spoke. For any thread."""
        return self._keyring.of_name(name)

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
        return self.refusals.pop_news()

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

    def _note_line(self, connection: bytes, public: str, frame: zmq.Frame) -> None:
        tcp = TcpConnection.of(frame)
        self._silent.pop(tcp.fd, None)
        self._lines[connection] = _Line(public, tcp)
        if len(self._lines) > _MAX_LINES:
            # One that still speaks is noted again.
            self._lines.popitem(last=False)

    def _watch(self) -> None:
        """Answer handshakes, cut those whose key does not stand any more; note who came and who could not."""
        self._authenticator.poll()
        self._keyring.refresh()
        for public, record in self._keyring.pop_ended().items():
            self._cut(public, record)
        for _ in range(_EVENTS_AT_ONCE):
            if not _readable(self._monitor):
                break
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._silent.pop(event["value"], None)
                self._silent[event["value"]] = TcpConnection.at(event["value"])
                if len(self._silent) > _MAX_SILENT:
                    self._silent.popitem(last=False)[1].cut(self._port)
                continue
            # A peer without a key tries again several times a second: one report every ten seconds tells enough.
            text = f"on {self.endpoint}: it has no key, or another gateway's."
            self.refusals.note(RefusalReason.no_handshake, "unknown", text, limit=self._handshakes)
        self._next_watch_s = time.monotonic() + _WATCH_S

    def _cut(self, public: str, record: KeyRecord) -> None:
        """End the connections of a key, whatever their names are here."""
        lines = [connection for connection, line in self._lines.items() if line.public == public]
        for connection in lines:
            self._lines[connection].tcp.cut(self._port)
            self._extra_peers.pop(connection, None)
        gone = set(lines)
        for peer in [peer for peer, connection in self._connections.items() if connection in gone]:
            del self._connections[peer]
            self._addresses.pop(peer, None)
        self._roles.pop(record.name, None)
        if self._keyring.revoked(public) is not None:
            text = f"its key was revoked; {len(lines)} connections of it are cut."
            self.refusals.note(RefusalReason.revoked_key, record.name, text, record.name)


class ZmqClient:
    """A named peer's connection to the gateway. Connects in the background and reconnects by itself."""

    def __init__(
        self, endpoint: str, name: str, keys: Path | Credentials, server: str = GATEWAY, queue: int = 1000
    ) -> None:
        """`keys`: the directory that has the key of `name` and the public one of `server`, or both keys. Raises
        `ConfigError` when one is missing, or for an `endpoint` that is none."""
        pair, server_public = keys if isinstance(keys, tuple) else (load_pair(keys, name), load_public(keys, server))
        self._endpoint = endpoint
        self.handshake = HandshakeWatch(name, endpoint, server)
        """what has become of the connection so far"""
        self._context = zmq.Context()
        client: dict[int, int | bytes] = {
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
            zmq.CONNECT_TIMEOUT: _CONNECT_MS,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.CURVE_SERVERKEY: server_public,
        }
        self.socket = _make_socket(self._context, zmq.DEALER, pair, queue, client)
        self._monitor = self.socket.get_monitor_socket(EVENTS)
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
            if not _readable(self.socket):
                return None
            try:
                return decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except ProtocolVersionError as error:
                self.refused[error.reason] += 1
                self.handshake.refuse(f"the gateway at {self._endpoint}: {error}")
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                log.error("dropped a message of the gateway at %s: %s", self._endpoint, error)
        return None

    @property
    def refusal(self) -> str:
        """Why no connection can be made, '' when nothing is wrong; an unknown key is answered with `Rejection`."""
        return self.handshake.refusal

    def close(self) -> None:
        self.handshake.close()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self._context.term()

    def _watch(self) -> None:
        while _readable(self._monitor):
            self.handshake.on_event(recv_monitor_message(self._monitor)["event"])
        if self.handshake.poll():
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether something can be received: what pyzmq's `poll(0)` says, at a fraction of its cost."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


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
