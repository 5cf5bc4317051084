"""Which leases the ledger knows of, for the next gateway: who held a robot goes on holding it when this one is killed.

A lease acts before its note is on the device. Its number comes from a block that was reserved before, so that no lease
of a later gateway has it, or a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.notes import Note, Notes
from hal.resource.lease import Leases
from wire.types import Lease

WhenNoted = Callable[[Callable[[], None], Callable[[Exception], None]], None]
RESERVED = 1_000_000
"""numbers at once: more than a fleet uses up while a database is away"""


class LeaseStore:
    """For the gateway's loop. `leases` go on where the last gateway was; `kept` are those that stood."""

    def __init__(self, ledger: Ledger, notes: Notes, wall_ns: Callable[[], int]) -> None:
        """Reads them, and reserves numbers. Raises `StorageError`."""
        self._ledger, self._notes, self._wall_ns = ledger, notes, wall_ns
        self.kept = ledger.kept_leases()
        self.leases = Leases(ledger.reserve_leases(RESERVED))
        self._reserved_until = self.leases.last_number + RESERVED
        self._reserving = False
        self._wanted = {lease.robot: _kept(lease) for lease in self.kept}
        """what is noted, or being noted, by robot"""
        self._changed: set[str] = set()
        """robots of which the ledger may say something else"""
        self._revision, self._noted_revision = 0, 0
        """of what is wanted, and of what is on the device"""
        self._waiting: list[tuple[int, Callable[[], None], Callable[[Exception], None]]] = []

    def note(self, leases: Iterable[Lease]) -> None:
        """Note who holds what now. A heartbeat changes nothing here: only who holds a robot is kept, not until when."""
        now = {lease.robot: lease for lease in leases}
        wanted = {robot: _kept(lease) for robot, lease in now.items()}
        if wanted != self._wanted:
            robots = wanted.keys() | self._wanted.keys()
            self._changed |= {robot for robot in robots if wanted.get(robot) != self._wanted.get(robot)}
            self._wanted, self._revision = wanted, self._revision + 1
            run = partial(self._ledger.keep_leases, {robot: now.get(robot) for robot in self._changed}, self._wall_ns())
            self._notes.submit(Note(run, partial(self._on_noted, self._revision), self._on_failed, key="leases"))
        self._reserve()

    def when_noted(self, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call `then` when what was said last is on the device, or `failed` when it cannot be put there now."""
        if self._noted_revision == self._revision:
            then()
        else:
            self._waiting.append((self._revision, then, failed))

    def _on_noted(self, revision: int, _: object) -> None:
        self._noted_revision = revision
        if revision == self._revision:
            self._changed.clear()
        due = [one for one in self._waiting if one[0] <= revision]
        self._waiting = [one for one in self._waiting if one[0] > revision]
        for _revision, then, _failed in due:
            then()

    def _on_failed(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for _revision, _then, failed in waiting:
            failed(error)

    def _reserve(self) -> None:
        if self._reserving or self._reserved_until - self.leases.last_number > RESERVED // 2:
            return
        self._reserving = True
        self._notes.submit(Note(partial(self._ledger.reserve_leases, RESERVED), self._on_reserved))

    def _on_reserved(self, number: int) -> None:
        self._reserving = False
        self.skip_to(number)

    def skip_to(self, number: int) -> None:
        """The next leases have numbers above `number`, after which a block is reserved; unless they are above it."""
        if number > self.leases.last_number:
            self.leases.last_number, self._reserved_until = number, number + RESERVED


def _kept(lease: Lease) -> tuple[int, dict[str, str]]:
    """What must be noted again when it changes."""
    return lease.number, lease.stops
