"""What the gateway asks of its channel, and what it knows of each process that said hello."""

from __future__ import annotations

from typing import Protocol

import msgspec

from wire.transport.channel import ServerChannel


class AuthenticatedServerChannel(ServerChannel, Protocol):
    """A server channel that can say whom it turned away, and that tells two connections of one name apart."""

    def rejections(self) -> list[tuple[str, str]]: ...

    def adopt(self, peer: str) -> str: ...

    def address(self, peer: str) -> str: ...


class KnownPeer(msgspec.Struct):
    """A process that has said hello."""

    role: str
    clock: str
    pid: int
    site: str
    last_message_ns: int
    offset_ns: int | None = None
    """gateway time - its time, by the sample that waited least on its way"""
    rejected: bool = False
    """it is not listened to any more"""
