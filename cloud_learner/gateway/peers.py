"""What the gateway asks of its channel, and what it knows of each process that said hello."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from wire.identity.refusals import RefusalReason
from wire.messages.gateway import Hello
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


class KeyMismatch(NamedTuple):
    """What a process says of itself that its key does not."""

    reason: RefusalReason
    text: str


def key_mismatch(name: str, role: str, hello: Hello) -> KeyMismatch | None:
    """Where `hello` says something else than the record of the key it came with, of `name` and `role`."""
    if hello.name != name:
        text = f"the key of '{name}' cannot speak for '{hello.name[:64]}'."
        return KeyMismatch(RefusalReason.wrong_name, text)
    if hello.role != role:
        text = (
            f"role: the key of '{name}' was made for role {role}, not for '{hello.role[:64]}'. A process of another "
            "role needs a key of its own: `vla-fleet keys NAME --role ROLE`."
        )
        return KeyMismatch(RefusalReason.wrong_role, text)
    return None
