"""What the gateway asks of its channel, and what it knows of each process that said hello."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Set
from typing import NamedTuple, Protocol

import msgspec

from wire.codec import Undecoded
from wire.identity.refusals import RefusalReason
from wire.messages import Message
from wire.messages.fleet import AcquireLease, CancelJob, ReleaseLease, SubmitJob
from wire.messages.gateway import FetchWeights, Hello, OperatorCommand, WeightBytes
from wire.transport.channel import PEER_SUFFIX, ServerChannel
from wire.transport.keys import KeyRecord
from wire.types import OperatorCommandKind, RobotSpec


class AuthenticatedServerChannel(ServerChannel, Protocol):
    """A server channel that can say whom it turned away, and that tells two connections of one name apart."""

    @property
    def refused(self) -> Counter[str]:
        """What was refused, by reason."""
        ...

    def recv_unless(self, kinds: Set[type[Message]]) -> tuple[str, Message | Undecoded] | None: ...

    def rejections(self) -> list[tuple[str, str]]: ...

    def adopt(self, peer: str) -> str: ...

    def address(self, peer: str) -> str: ...

    def key_record(self, name: str) -> KeyRecord | None: ...


_KEYS = 1000


class PeerBudget:
    """How much of something the holders of each key may send: so many at once, then one every so often."""

    def __init__(self, burst: int, every_ns: int) -> None:
        self._burst, self._every_ns = burst, every_ns
        self._spent_ns: OrderedDict[str, int] = OrderedDict()
        """by key, when all of its share can be spent again"""

    def take(self, peer: str, now_ns: int) -> bool:
        """Whether one more of `peer`, whichever connection of its key that is."""
        name = peer.partition(PEER_SUFFIX)[0]
        spent_ns = max(self._spent_ns.pop(name, now_ns), now_ns)
        granted = spent_ns - now_ns <= (self._burst - 1) * self._every_ns
        self._spent_ns[name] = spent_ns + self._every_ns * granted
        if len(self._spent_ns) > _KEYS:
            self._spent_ns.popitem(last=False)
        return granted


def event_budget() -> PeerBudget:
    """Of events that are kept, or told in the log: each takes room on a disk. At once: what an edge keeps while it has
    no connection, and as many again."""
    return PeerBudget(200, 100_000_000)


def is_wish(message: Message | Undecoded) -> bool:
    """Whether somebody wants a robot or a job, or no more: each is noted, or tells a robot something. Not a stop, nor
    what drives or keeps a robot."""
    if isinstance(message, OperatorCommand):
        return message.kind not in (OperatorCommandKind.estop, OperatorCommandKind.command)
    return isinstance(message, AcquireLease | ReleaseLease | SubmitJob | CancelJob)


class MessageRate:
    """How often the holders of each key may send what is no data, no stop and drives nothing."""

    def __init__(self) -> None:
        self._wishes = PeerBudget(500, 50_000_000)
        """a program may ask for a whole fleet at once"""
        self._others = PeerBudget(2000, 2_000_000)
        """several times what a robot with many cameras or a page of robots sends"""

    def take(self, peer: str, message: Message | Undecoded, now_ns: int) -> bool:
        """Whether one more of `peer`."""
        if is_wish(message):
            return self._wishes.take(peer, now_ns)
        return isinstance(message, OperatorCommand | WeightBytes | FetchWeights) or self._others.take(peer, now_ns)


def clock_budget() -> PeerBudget:
    """Of clocks: a computer has another one after each boot. What is known of a peer's clocks is kept."""
    return PeerBudget(8, 60_000_000_000)


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
    spec: RobotSpec | None = None
    """of the robot that it drives or does without, None: of none"""
    spec_hash: str = ""
    """of `spec`, which takes a while to hash"""
    welcomed: bool = False
    """it was answered: versions are announced to it, for it knows by which key they are signed"""


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
