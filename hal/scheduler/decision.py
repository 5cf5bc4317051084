"""What the scheduler decides, and how patient it is."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from wire.messages.gateway import Job

REST = "rest"
"""id of the job that is none"""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How patient it is."""

    ttl_s: float = 15.0
    """time to live of a job's lease"""
    aging_s: float = 30.0
    """a job that waits so long counts as one point of priority higher"""
    scarce_s: float = 30.0
    """head start of a job that hardly any robot fits over one that all fit"""
    take_up_s: float = 180.0
    """a robot ends its running episode first; one that has not taken up its job by then loses it"""
    settle_s: float = 30.0
    """a robot's last episodes of a job may be stored so much later than it says that it has finished them"""
    look_every_s: float = 1.0
    """jobs that wait behind others without an end are looked at so often"""
    most_a_step: int = 200
    """assignments; the rest follows in the next step, so that no step is long"""
    kept: int = 1000
    """ended jobs whose state is still told"""


class Decision(msgspec.Struct, frozen=True):
    """What a robot is to be told now."""

    robot: str
    job: Job
    """without tasks: rest"""
    reason: str


def job_of(wire_id: str) -> str:
    """The id of the job that a robot was told as `wire_id`."""
    return wire_id.rpartition("/")[0] or wire_id
