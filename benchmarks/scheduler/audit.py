"""Looks over the shoulder of a scheduler: how long it takes, and whether a robot ever has two holders."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.scheduler.simulator import SchedulerInterface
from hal.resource.lease import Leases
from hal.scheduler.scheduler import Scheduler
from wire.types import Lease


class Timed:
    """Notes how long a decider takes to decide, in seconds of the thread's processor time. A report renews a lease and
    is no decision; asking for the time would take longer."""

    def __init__(self, decider: SchedulerInterface) -> None:
        self._decider = decider
        self.joined, self.reported = decider.joined, decider.reported
        self.submit, self.stored, self.step = (self._timed(c) for c in (decider.submit, decider.stored, decider.step))
        self.took_s: list[float] = []

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_ns = time.thread_time_ns()
            answer = call(*arguments)
            self.took_s.append((time.thread_time_ns() - begun_ns) / 1e9)
            return answer

        return timed


class Audit(Leases):
    """Leases that are kept account of a second time: a lease is live from when it is given until it is released, runs
    out or is preempted by a higher one, and no robot may have two."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.double = 0
        self._live: dict[str, Lease] = {}

    def acquire(
        self, robot: str, holder: str, purpose: str, priority: int, ttl_ns: int, now_ns: int
    ) -> tuple[Lease, Lease | None]:
        lease, preempted = super().acquire(robot, holder, purpose, priority, ttl_ns, now_ns)
        live = self._live.get(robot)
        over = live is None or live.expires_ns <= now_ns or (preempted is not None and live.number == preempted.number)
        newer = live is None or lease.number > live.number
        self.given += 1
        self.double += not (over and newer)
        self._live[robot] = lease
        return lease, preempted

    def renew(self, robot: str, number: int, now_ns: int) -> Lease:
        lease = super().renew(robot, number, now_ns)
        live = self._live.get(robot)
        self.double += live is None or live.number != lease.number or live.expires_ns <= now_ns
        self._live[robot] = lease
        return lease

    def release(self, robot: str, number: int, now_ns: int) -> Lease:
        lease = super().release(robot, number, now_ns)
        self._live.pop(robot, None)
        return lease


def assigned(scheduler: Scheduler) -> dict[str, str]:
    """The job of every robot that works on one, as the robots' records say."""
    robots = scheduler._robots.values()
    return {robot.name: robot.assignment.job.id for robot in robots if robot.assignment is not None}


class Books:
    """Looks every so often whether every robot that a job counts as its own is leased to that job and to no other."""

    def __init__(self, scheduler: Scheduler, audit: Audit, every_ns: int) -> None:
        self._scheduler = scheduler
        self._audit = audit
        self._every_ns = every_ns
        self._next_ns = 0
        self.looks = 0
        self.wrong = 0

    def __call__(self, now_ns: int) -> None:
        if now_ns < self._next_ns:
            return
        self._next_ns = now_ns + self._every_ns
        self.looks += 1
        for robot, job in assigned(self._scheduler).items():
            lease = self._audit.of(robot)
            self.wrong += lease is None or lease.holder != job
