"""Channels within one process, for fast and deterministic tests.

Every message passes the real codec, so what works here is also valid on the wire. A connection can be cut and mended,
and its messages be lost, late, doubled, overtaken or damaged by a `FaultPlan`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Set
from typing import TypeVar

from wire.clock import Clock, MonotonicClock
from wire.codec import Undecoded, decode, decode_unless, encode
from wire.errors import MessageTooLargeError, ProtocolError
from wire.messages import Message
from wire.messages.gateway import Rejection
from wire.transport.channel import PEER_SUFFIX
from wire.transport.faults import FaultPlan, FaultyQueue
from wire.transport.keys import KeyRecord, Teaching, default_role

log = logging.getLogger(__name__)
R = TypeVar("R")

_Queue = deque[bytes] | FaultyQueue


class MemoryServer:
    """The many-peers end. `connect(name)` makes a client."""

    def __init__(self, faults: FaultPlan | None = None, clock: Clock | None = None) -> None:
        """`faults`: of each connection and direction by itself, by `clock`."""
        self._faults, self._clock = faults, clock or MonotonicClock()
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._ways: dict[str, FaultyQueue] = {}
        """by peer, what is on its way here"""
        self._outboxes: dict[str, _Queue] = {}
        self.refused: Counter[str] = Counter()
        """what was no message, by reason"""
        self.cut: set[str] = set()
        """names of peers whose connection is down: messages of either direction are lost"""
        self._adopted: dict[str, str] = {}
        self._roles: dict[str, str] = {}
        self.teaches: dict[str, frozenset[Teaching]] = {}
        """by name, what a peer may say of its episodes by its own word; default: everything"""

    def connect(self, name: str, role: str = "") -> MemoryClient:
        """A client under `name`; "name@2" is a second connection of one name. `role`: default that of the name."""
        self._outboxes[name] = deque()
        key = name.partition(PEER_SUFFIX)[0]
        self._roles[key] = role or self._roles.get(key) or default_role(key)
        if self._faults is not None:
            self._outboxes[name] = FaultyQueue(self._faults, self._clock, f"{name}/down")
            self._ways[name] = FaultyQueue(self._faults, self._clock, f"{name}/up")
        return MemoryClient(name, self)

    def send(self, peer: str, message: Message) -> bool:
        if peer not in self._outboxes or self._is_cut(peer):
            return False
        self._outboxes[peer].append(encode(message))
        return True

    def recv(self) -> tuple[str, Message] | None:
        """The next valid message; what is none is counted, and its sender is told."""
        return self._recv(decode)

    def recv_unless(self, kinds: Set[type[Message]]) -> tuple[str, Message | Undecoded] | None:
        """As `recv`; messages of these kinds come undecoded."""
        return self._recv(lambda data: decode_unless(data, kinds))

    def _recv(self, read: Callable[[bytes], R]) -> tuple[str, R] | None:
        for peer, way in self._ways.items():
            while way:
                self._inbox.append((peer, way.popleft()))
        while self._inbox:
            peer, data = self._inbox.popleft()
            name = self._adopted.get(peer, peer)
            try:
                return name, read(data)
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                log.debug("dropped a message of '%s': %s", name, error)
                self.send(name, Rejection(str(error)))
        return None

    def adopt(self, peer: str) -> str:
        """Make the further connection `peer` ("name@2") the connection of its name, which is returned."""
        name = peer.partition(PEER_SUFFIX)[0]
        if peer != name and peer in self._outboxes:
            self._outboxes[name] = self._outboxes[peer]
            self._adopted[peer] = name
        return name

    def role(self, peer: str) -> str:
        """What `peer` was connected as."""
        return self._roles.get(peer.partition(PEER_SUFFIX)[0], "")

    def may_teach(self, peer: str) -> frozenset[Teaching]:
        """Everything, unless `teaches` says otherwise: there are no keys within one process."""
        return self.teaches.get(peer.partition(PEER_SUFFIX)[0], frozenset(Teaching))

    def key_record(self, name: str) -> KeyRecord | None:
        """None: there are no keys within one process."""
        return None

    def address(self, peer: str) -> str:
        """Where `peer` is: in this process."""
        return f"memory:{peer}" if peer in self._outboxes else ""

    def rejections(self) -> list[tuple[str, str]]:
        """Nobody is ever rejected: there are no keys within one process."""
        return []

    def close(self) -> None:
        self._outboxes.clear()

    def _is_cut(self, peer: str) -> bool:
        way = self._ways.get(peer)
        return peer in self.cut or (way is not None and way.cut)

    def _arrive(self, peer: str, data: bytes) -> bool:
        if self._is_cut(peer):
            return False
        if (way := self._ways.get(peer)) is not None:
            way.append(data)
        else:
            self._inbox.append((peer, data))
        return True


def memory_pair(faults: FaultPlan | None = None, clock: Clock | None = None) -> tuple[MemoryPairEnd, MemoryPairEnd]:
    """Two ends of one connection. `faults`: of each direction by itself, by `clock`."""
    there: _Queue = deque()
    back: _Queue = deque()
    if faults is not None:
        clock = clock or MonotonicClock()
        there, back = FaultyQueue(faults, clock, "there"), FaultyQueue(faults, clock, "back")
    return MemoryPairEnd(there, back), MemoryPairEnd(back, there)


class MemoryPairEnd:
    """One end of `memory_pair`."""

    def __init__(self, outbox: _Queue, inbox: _Queue) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self.refused: Counter[str] = Counter()
        """what was no message, by reason"""

    def send(self, message: Message) -> bool:
        return self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> bool:
        """As `send`, of whatever somebody may have put together."""
        if isinstance(self._outbox, FaultyQueue) and self._outbox.cut:
            return False
        self._outbox.append(data)
        return True

    def recv(self) -> Message | None:
        """The next valid message; what is none is counted."""
        while self._inbox:
            try:
                return decode(self._inbox.popleft())
            except (ProtocolError, MessageTooLargeError) as error:
                self.refused[error.reason] += 1
                log.debug("dropped a message: %s", error)
        return None

    def discard(self) -> None:
        """What has come is dropped unread."""
        self._inbox.clear()

    def close(self) -> None:
        self._outbox.clear()


class MemoryClient(MemoryPairEnd):
    """One peer's end of a connection to a `MemoryServer`."""

    def __init__(self, name: str, server: MemoryServer) -> None:
        super().__init__(deque(), server._outboxes[name])
        self._name = name
        self._server = server

    def send_bytes(self, data: bytes) -> bool:
        return self._server._arrive(self._name, data)

    def close(self) -> None:
        self._server._outboxes.pop(self._name, None)
        self._server._ways.pop(self._name, None)
