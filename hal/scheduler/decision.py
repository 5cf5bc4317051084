"""What the scheduler decides, and how patient it is."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hal.scheduler.groups import SchedulableRobot
from hal.scheduler.jobs import JobRecord, WorkUnit
from hal.scheduler.seeds import training_stretch
from wire.errors import ConfigError
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
    most_a_turn: int = 200
    """assignments; the rest follows in the next turn, so that no turn is long"""
    kept: int = 1000
    """ended jobs whose state is still told"""

    def __post_init__(self) -> None:
        for name in ("ttl_s", "aging_s", "take_up_s", "settle_s", "look_every_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"SchedulerConfig: {name} is {getattr(self, name)}; give more than 0.")

    def overtaken_s(self, priority: int, highest: int) -> float:
        """After so long a job that waits has become so urgent that no other, up to priority `highest`, comes before it
        that is submitted or given a part later."""
        return max(0, highest - priority) * self.aging_s + self.scarce_s


class Decision(msgspec.Struct, frozen=True):
    """What a robot is to be told now."""

    robot: str
    job: Job
    """without tasks: rest"""
    reason: str


def job_of(wire_id: str) -> str:
    """The id of the job that a robot was told as `wire_id`."""
    return wire_id.rpartition("/")[0] or wire_id


def wire_job(robot: SchedulableRobot, job: JobRecord, slice_: WorkUnit, tasks: tuple[str, ...], lease: int) -> Job:
    """A part of a job as the robot is told it; a training seed that may be in use is counted as spent."""
    request, last = job.request, robot.wire
    same = job.standing and last is not None and job_of(last.id) == job.id
    if same and last is not None and robot.spent - robot.spent_before < last.episodes:
        # It has been on this job all along, with the line cut or under a person's hand: nothing starts anew.
        return msgspec.structs.replace(last, tasks=tasks, lease=lease)
    before = robot.before
    if before is not None and before.wire.kind != "evaluation" and len(before.done) < before.slice.episodes:
        # An episode that runs now is not counted yet, and its seed is not to be used again.
        robot.spent += 1
    examined = request.kind == "evaluation"
    stretch = training_stretch(robot.index, robot.spent, slice_.episodes)
    return Job(
        id=f"{job.id}/{lease}",
        tasks=tasks,
        first_seed=slice_.first_seed if examined else stretch.first_seed,
        kind=request.kind,
        episodes=slice_.episodes if examined else stretch.episodes,
        version=request.version,
        lease=lease,
    )
