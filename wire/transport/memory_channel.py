"""Channels within one process, for fast and deterministic tests.

Every message passes the real codec, so what works here is also valid on the wire. A connection can be cut and mended.
"""

from __future__ import annotations

from collections import deque

from wire.codec import decode, encode
from wire.messages import Message
from wire.transport.channel import PEER_SUFFIX
from wire.transport.keys import default_role


class MemoryServer:
    """The many-peers end. `connect(name)` makes a client."""

    def __init__(self) -> None:
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._outboxes: dict[str, deque[bytes]] = {}
        self.cut: set[str] = set()
        """names of peers whose connection is down: messages of either direction are lost"""
        self._adopted: dict[str, str] = {}
        self._roles: dict[str, str] = {}

    def connect(self, name: str, role: str = "") -> MemoryClient:
        """A client under `name`; "name@2" is a second connection of one name. `role`: default that of the name."""
        self._outboxes[name] = deque()
        key = name.partition(PEER_SUFFIX)[0]
        self._roles[key] = role or self._roles.get(key) or default_role(key)
        return MemoryClient(name, self)

    def send(self, peer: str, message: Message) -> bool:
        if peer not in self._outboxes or peer in self.cut:
            return False
        self._outboxes[peer].append(encode(message))
        return True

    def recv(self) -> tuple[str, Message] | None:
        if not self._inbox:
            return None
        peer, data = self._inbox.popleft()
        return self._adopted.get(peer, peer), decode(data)

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

    def address(self, peer: str) -> str:
        """Where `peer` is: in this process."""
        return f"memory:{peer}" if peer in self._outboxes else ""

    def rejections(self) -> list[tuple[str, str]]:
        """Nobody is ever rejected: there are no keys within one process."""
        return []

    def close(self) -> None:
        self._outboxes.clear()


def memory_pair() -> tuple[MemoryPairEnd, MemoryPairEnd]:
    """Two ends of one connection."""
    there: deque[bytes] = deque()
    back: deque[bytes] = deque()
    return MemoryPairEnd(there, back), MemoryPairEnd(back, there)


class MemoryPairEnd:
    """One end of `memory_pair`."""

    def __init__(self, outbox: deque[bytes], inbox: deque[bytes]) -> None:
        self._outbox = outbox
        self._inbox = inbox

    def send(self, message: Message) -> bool:
        self._outbox.append(encode(message))
        return True

    def recv(self) -> Message | None:
        return decode(self._inbox.popleft()) if self._inbox else None

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

    def send(self, message: Message) -> bool:
        if self._name in self._server.cut:
            return False
        self._server._inbox.append((self._name, encode(message)))
        return True

    def close(self) -> None:
        self._server._outboxes.pop(self._name, None)
