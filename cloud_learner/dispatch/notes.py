"""What is to be noted in the ledger, or asked of it: said in the gateway's loop, done by a thread that may wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wire.task_thread import Task


@dataclass(frozen=True, slots=True)
class Note(Task):
    """Something to do in the ledger. What belongs together is one note; those of a turn share a transaction.

    Its `run` is called again when the transaction was undone, so it changes nothing but the ledger; `done` is called
    once it is on the device.
    """

    key: str = ""
    """of those that wait under one key the newest is done, in the place of the oldest; '': of no other"""
    lasting: bool = True
    """tried until storage takes it; else once"""
    droppable: bool = False
    """the oldest of these are dropped when too many wait"""
    ordered: bool = False
    """done after all segments that came before it, and before those that come after it"""


class Notes(Protocol):
    """Who takes notes; done in the order in which they were submitted."""

    def submit(self, note: Note) -> None: ...

    @property
    def fault(self) -> str:
        """Why nothing can be noted now, '' when it can."""
        ...
