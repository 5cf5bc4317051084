"""What the gateway asks of its channel, and what it knows of each process that said hello."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

import msgspec

from wire.identity.refusals import RefusalReason
from wire.messages.gateway import Hello
from wire.transport.channel import PEER_SUFFIX, ServerChannel


class AuthenticatedServerChannel(ServerChannel, Protocol):
    """A server channel that can say whom it turned away, and that tells two connections of one name apart."""

    def rejections(self) -> list[tuple[str, str]]: ...

    def adopt(self, peer: str) -> str: ...

    def address(self, peer: str) -> str: ...


_EVENTS = 200
"""at once: what an edge keeps while it has no connection, and as many again"""
_EVENT_NS = 100_000_000
"""and then one in so long"""
_KEYS = 1000


class EventBudget:
    """How many events of a key are kept, or told in the log: each takes room on a disk."""

    def __init__(self) -> None:
        self._spent_ns: OrderedDict[str, int] = OrderedDict()
        """by key, when all of its share can be spent again"""

    def take(self, peer: str, now_ns: int) -> bool:
        """Whether one more of `peer`, whichever connection of its key that is."""
        name = peer.partition(PEER_SUFFIX)[0]
        spent_ns = max(self._spent_ns.pop(name, now_ns), now_ns)
        granted = spent_ns - now_ns <= (_EVENTS - 1) * _EVENT_NS
        self._spent_ns[name] = spent_ns + _EVENT_NS * granted
        if len(self._spent_ns) > _KEYS:
            self._spent_ns.popitem(last=False)
        return granted


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
