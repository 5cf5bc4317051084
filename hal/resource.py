"""A robot as something that can be scheduled: who it is, what it can do, how it is and who holds it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from wire.types import Lease


class Health(StrEnum):
    """How a robot is, as far as the fleet can tell."""

    starting = "starting"
    """connected, has not reported yet"""
    ready = "ready"
    degraded = "degraded"
    """works, but holds often or reports late"""
    lost = "lost"
    """no report for too long; it goes on by itself"""
    stopped = "stopped"
    """e-stop or fault: a person has to look"""


DEGRADED_AFTER_S = 1.0
LOST_AFTER_S = 5.0


class RobotResource(msgspec.Struct, frozen=True):
    """One robot of the fleet."""

    name: str
    spec_hash: str
    tasks: tuple[str, ...]
    """task names it can do"""
    health: Health = Health.starting
    lease: Lease | None = None

    def can_work(self, now_ns: int) -> bool:
        """Whether it may be given a job: alive and not held by anybody at `now_ns` (the lease's clock)."""
        free = self.lease is None or self.lease.expires_ns <= now_ns
        return free and self.health in (Health.starting, Health.ready, Health.degraded)


def health_of(silent_s: float, stopped: bool, holding: bool) -> Health:
    """The health of a robot whose last report is `silent_s` old and said it was stopped or holding."""
    if silent_s > LOST_AFTER_S:
        return Health.lost
    if stopped:
        return Health.stopped
    return Health.degraded if holding or silent_s > DEGRADED_AFTER_S else Health.ready
