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
from wire.messages.fleet import JobKind
from wire.types import Lease

log = logging.getLogger(__name__)

CRASH_SLACK_NS = 5_000_000_000
"""so long after a killed gateway stored its last segment its leases are taken to have stood: a segment lasts less"""
_OF_JOB = {JobKind.teleoperation: LeaseKind.person, JobKind.evaluation: LeaseKind.evaluation}


class LeaseHistory:
    """Notes the leases that matter when they begin and when they end, with the times they had.

    What is noted is done before segments that come later, for these are judged by it.
    """

    def __init__(self, ledger: Ledger, notes: Notes, is_job: Callable[[str], bool], now_ns: int) -> None:
        """End what the last gateway left open. Raises `StorageError`."""
        self._ledger, self._notes, self._is_job = ledger, notes, is_job
        self._open: dict[str, LeaseNote] = {}
        if ended := ledger.end_leases(now_ns, CRASH_SLACK_NS):
            log.info("%d leases that a gateway left open have ended with it; those that stand begin anew.", ended)

    def note(self, leases: Iterable[Lease], now_ns: int) -> None:
        """These leases, all there are, stand now."""
        now = {lease.robot: (lease, kind) for lease in leases if (kind := self._kind(lease)) is not None}
        changes: list[LeaseNote] = []
        for robot, before in list(self._open.items()):
            found = now.get(robot)
            if found is None or found[0].number != before.number:
                del self._open[robot]
                changes.append(LeaseNote(robot, before.number, before.holder, before.kind, now_ns, ended=True))
        for robot, (lease, kind) in now.items():
            if robot not in self._open:
                self._open[robot] = LeaseNote(robot, lease.number, lease.holder, kind, now_ns)
                changes.append(self._open[robot])
        if changes:
            self._notes.submit(Note(partial(self._ledger.note_leases, changes), ordered=True))

    def forget(self, robot: str) -> None:
        """It comes from another gateway, which has ended what stood here: a lease that stands begins anew."""
        self._open.pop(robot, None)

    def _kind(self, lease: Lease) -> LeaseKind | None:
        """None for what says nothing about steps: somebody beside a robot is seen by the robot's own word alone."""
        if self._is_job(lease.holder):
            return _OF_JOB.get(JobKind(lease.purpose)) if lease.purpose in tuple(JobKind) else None
        drives = lease.priority >= Priority.operator and lease.purpose != ESTOP
        return LeaseKind.person if drives and lease.holder != BESIDE and not lease.holder.startswith(DROPPED) else None
