"""The record of who had which robot: by it the gateway judges later what robots say of their steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import LeaseKind, LeaseNote
from cloud_learner.dispatch.notes import Note, Notes
from cloud_learner.dispatch.robot_stops import BESIDE
from cloud_learner.operator.view_models import DROPPED
from hal.resource.lease import ESTOP, Priority
from wire.errors import StorageError
from wire.messages.fleet import JobKind
from wire.types import Lease

log = logging.getLogger(__name__)

CRASH_SLACK_NS = 5_000_000_000
"""so long after a killed gateway stored its last segment its leases are taken to have stood: a segment lasts less"""
MOST_WAITING = 2000
"""begins and ends of leases of one robot that wait for the ledger"""
_OF_JOB = {JobKind.teleoperation: LeaseKind.person, JobKind.evaluation: LeaseKind.evaluation}


class LeaseHistory:
    """Notes the leases that matter when they begin and when they end, with the times they had.

    What is noted is done before segments that come later, for these are judged by it. Of each robot one note waits,
    which has all that the ledger may not have yet.
    """

    def __init__(
        self,
        ledger: Ledger,
        notes: Notes,
        is_job: Callable[[str], bool],
        tell: Callable[[str, str], None],
        now_ns: int,
    ) -> None:
        """End what the last gateway left open; `tell(robot, text)` people. Raises `StorageError`."""
        self._ledger, self._notes, self._is_job, self._tell = ledger, notes, is_job, tell
        self._open: dict[str, LeaseNote] = {}
        self._waiting: dict[str, list[LeaseNote]] = {}
        """by robot: what the ledger was not heard to have, oldest first"""
        self._told: set[str] = set()
        """robots of which too much waits"""
        if ended := ledger.end_leases(now_ns, CRASH_SLACK_NS):
            log.info("%d leases that a gateway left open have ended with it; those that stand begin anew.", ended)

    def note(self, leases: Iterable[Lease], now_ns: int) -> None:
        """These leases, all there are, stand now. One for which there is no room begins when there is."""
        now = {lease.robot: (lease, kind) for lease in leases if (kind := self._kind(lease)) is not None}
        changes: dict[str, list[LeaseNote]] = {}
        for robot, before in list(self._open.items()):
            found = now.get(robot)
            if found is None or found[0].number != before.number:
                del self._open[robot]
                ended = LeaseNote(robot, before.number, before.holder, before.kind, now_ns, ended=True)
                changes[robot] = [ended]
        for robot, (lease, kind) in now.items():
            if robot in self._open:
                continue
            if len(self._waiting.get(robot, ())) >= MOST_WAITING:
                self._tell_full(robot)
                continue
            self._open[robot] = LeaseNote(robot, lease.number, lease.holder, kind, now_ns)
            changes.setdefault(robot, []).append(self._open[robot])
        for robot, of_it in changes.items():
            waiting = self._waiting.setdefault(robot, [])
            waiting += of_it
            run = partial(self._ledger.note_leases, tuple(waiting))
            done, failed = partial(self._forget, robot, waiting[-1]), partial(self._on_failed, robot, waiting[-1])
            self._notes.submit(Note(run, done, failed, key=f"lease history {robot}", ordered=True))

    def _forget(self, robot: str, last: LeaseNote, _: object = None) -> None:
        """The ledger has all up to `last`."""
        waiting = self._waiting.get(robot, [])
        if (at := next((at for at, one in enumerate(waiting) if one is last), None)) is not None:
            del waiting[: at + 1]
        if not waiting:
            self._waiting.pop(robot, None)
            self._told.discard(robot)

    def _on_failed(self, robot: str, last: LeaseNote, error: Exception) -> None:
        if not isinstance(error, StorageError):
            self._forget(robot, last)  # it can never be noted

    def _tell_full(self, robot: str) -> None:
        if robot not in self._told:
            self._told.add(robot)
            self._tell(
                robot,
                f"changed hands more than {MOST_WAITING // 2} times while the ledger takes nothing: who has it from "
                "now on is noted when the ledger is back. What they teach it until then will lie in quarantine.",
            )

    def forget(self, robot: str) -> None:
        """It comes from another gateway, which has ended what stood here: a lease that stands begins anew."""
        self._open.pop(robot, None)

    def _kind(self, lease: Lease) -> LeaseKind | None:
        """None for what says nothing about steps: somebody beside a robot is seen by the robot's own word alone."""
        if self._is_job(lease.holder):
            return _OF_JOB.get(JobKind(lease.purpose)) if lease.purpose in tuple(JobKind) else None
        drives = lease.priority >= Priority.operator and lease.purpose != ESTOP
        return LeaseKind.person if drives and lease.holder != BESIDE and not lease.holder.startswith(DROPPED) else None
