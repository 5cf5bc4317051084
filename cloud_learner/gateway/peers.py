"""What the gateway asks of its channel, and what it knows of each process that said hello."""

from __future__ import annotations

from typing import Protocol

import msgspec

from wire.errors import RejectedError
from wire.messages.gateway import Evaluation, Hello
from wire.transport.channel import ServerChannel


class AuthenticatedServerChannel(ServerChannel, Protocol):
    """A server channel that can say whom it turned away, and that tells two connections of one name apart."""

    def rejections(self) -> list[tuple[str, str]]: ...

    def adopt(self, peer: str) -> str: ...

    def address(self, peer: str) -> str: ...


MAX_TEXT = 2000
"""characters of what a peer says to people"""
_EVENTS = 200
"""at once: what an edge keeps while it has no connection, and as many again"""
_EVENT_NS = 100_000_000
"""and then one in so long"""
_LATEST_NS = 2**62


class EventBudget(msgspec.Struct):
    """How many events of a peer are kept: each takes room on the disk."""

    spent_ns: int = 0
    """when all of it can be spent again"""

    def take(self, now_ns: int) -> bool:
        """Whether one more may be kept."""
        spent_ns = max(self.spent_ns, now_ns)
        if spent_ns - now_ns > (_EVENTS - 1) * _EVENT_NS:
            return False
        self.spent_ns = spent_ns + _EVENT_NS
        return True


def check_hello(hello: Hello) -> None:
    """Raise `RejectedError`, naming the field, for what is too long or too large to be kept."""
    texts = {"name": (hello.name, 64), "role": (hello.role, 64), "clock": (hello.clock, 200), "site": (hello.site, 200)}
    for field, (text, most) in texts.items():
        if len(text) > most:
            raise RejectedError(f"{field}: {text[:40]!r} and so on has {len(text)} characters; {most} are taken.")
    if len(hello.tasks) > 1000 or any(len(task) > 200 for task in hello.tasks):
        raise RejectedError("tasks: up to 1000 are taken, of up to 200 characters each.")
    check_time(hello.sent_ns)
    if not 0 <= hello.pid < _LATEST_NS:
        raise RejectedError(f"pid: {hello.pid} cannot be.")


def check_time(sent_ns: int) -> int:
    """`sent_ns`, of a peer's clock. Raises `RejectedError` when it cannot be."""
    if not 0 <= sent_ns < _LATEST_NS:
        raise RejectedError(f"sent_ns: {sent_ns} cannot be.")
    return sent_ns


def check_evaluation(evaluation: Evaluation) -> None:
    """Raise `RejectedError`, naming the field, for what cannot be kept or shown."""
    texts = {"label": evaluation.label, **{f"success: task {task[:40]!r}": task for task in evaluation.success}}
    for field, text in texts.items():
        if len(text) > 200:
            raise RejectedError(f"{field}: {len(text)} characters; 200 are taken.")
    if len(evaluation.success) > 1000:
        raise RejectedError(f"success: {len(evaluation.success)} tasks; 1000 are taken.")
    for field in ("number", "episodes", "first_seed", "started_ns"):
        if not 0 <= getattr(evaluation, field) < _LATEST_NS:
            raise RejectedError(f"{field}: {getattr(evaluation, field)} cannot be.")
    if not all(0 <= share <= 1 for share in evaluation.success.values()):
        raise RejectedError("success: a share is from 0 to 1.")


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
    events: EventBudget = msgspec.field(default_factory=EventBudget)
