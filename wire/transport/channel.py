"""How messages travel. Two small interfaces; ZeroMQ and in-memory versions keep them."""

from __future__ import annotations

from typing import Protocol

from wire.messages import Message
from wire.transport.keys import Teaching

PEER_SUFFIX = "@"
"""stands between a name and a number in the peer's name of a second connection; no name has it"""


class Channel(Protocol):
    """One end of a connection between two processes. Nothing here ever blocks: `wait_any` waits."""

    def send(self, message: Message) -> bool:
        """Queue `message`; False when the queue is full or nobody is there (the caller decides what that means)."""
        ...

    def recv(self) -> Message | None:
        """The next message that has come, None when there is none."""
        ...

    def close(self) -> None:
        """Give the connection back; queued messages get a short while to leave."""
        ...


class ServerChannel(Protocol):
    """The end that many named peers connect to. Names are authenticated, not claimed."""

    def send(self, peer: str, message: Message) -> bool:
        """Queue `message` for `peer`; False when that peer is gone or its queue is full."""
        ...

    def recv(self) -> tuple[str, Message] | None:
        """The next message that has come and who sent it, None when there is none."""
        ...

    def role(self, peer: str) -> str:
        """A `Role`: what the key of `peer` was made for; '' when it has none."""
        ...

    def may_teach(self, peer: str) -> frozenset[Teaching]:
        """What `peer` may say of its episodes by its own word, as its key's record has it now."""
        ...

    def close(self) -> None:
        """Give the port back."""
        ...
