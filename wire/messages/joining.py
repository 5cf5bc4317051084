"""What a robot whose key is not filed yet and its gateway say to each other, over a connection made with that key."""

from __future__ import annotations

from wire.messages import Message


class Join(Message, frozen=True, eq=False):
    """A join token's secret, from whoever holds the secret half of the connection's key. Only `Joined` answers it."""

    secret: bytes


class Joined(Message, frozen=True, eq=False):
    """The connection's key is filed."""

    name: str
    role: str
    """a `Role`"""
