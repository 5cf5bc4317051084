"""Which job an episode is of, and why a job has none."""

from __future__ import annotations

from collections.abc import Iterable

from hal.resource.capabilities import missing_requirements
from hal.scheduler.groups import SchedulableRobot
from hal.scheduler.jobs import Assignment, JobRecord
from hal.scheduler.seeds import LANE_EPISODES


def likely(robot: SchedulableRobot) -> tuple[Assignment | None, ...]:
    """What an episode of the robot may be of: the earlier job first while it has not taken up the later one."""
    if robot.assignment is not None and robot.assignment.slice.task and not robot.assignment.taken_up:
        return robot.before, robot.assignment
    return robot.assignment, robot.before


def belongs(assignment: Assignment, task: str, seed: int) -> bool:
    """Whether an episode is one of the assignment."""
    if assignment.slice.task and task != assignment.slice.task:
        return False
    if not assignment.slice.task and task not in assignment.job.request.tasks:
        return False
    if seed < 0:
        return assignment.taken_up
    slice_ = assignment.slice
    # In training an aborted episode makes a part run on to later seeds of the lane.
    seeds = slice_.seeds if slice_.task else range(slice_.first_seed, slice_.first_seed + LANE_EPISODES)
    return seed in seeds and seed not in assignment.done


def why_it_waits(job: JobRecord, robots: Iterable[SchedulableRobot]) -> str:
    """A sentence for people."""
    here = [(robot, robot.kin) for robot in robots if robot.kin is not None]
    names = job.demand.names
    fit = [robot for robot, kin in here if job.demand.fits(kin) and (not names or robot.name in names)]
    if not fit:
        reasons = (missing_requirements(job.request.requirement, robot.name, kin.capabilities) for robot, kin in here)
        return next(reasons, "there is no robot yet") or "tasks: no robot that fits can do any of them"
    if not any(robot.group is not None for robot in fit):
        return "no robot that fits is well and free of people"
    return "all robots that fit work on jobs that come first"
