"""Who fits whom, kept so that a decision is short.

Robots that are the same to every job are a `Group`, and jobs that ask for the same are a `JobClass`. Which class fits
which group is decided once: a robot that comes free looks at the first job of each class whatever the number of jobs.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

from hal.resource.capabilities import missing_requirements, satisfies
from hal.scheduler.decision import SchedulerConfig
from hal.scheduler.jobs import Assignment, JobRecord
from wire.messages.all import Job
from wire.messages.fleet import Capabilities, Requirement


@dataclass(slots=True, eq=False)
class SchedulableRobot:
    """A robot as the scheduler sees it."""

    name: str
    index: int
    """of its seed partition"""
    seeds_spent: int = 0
    """training seeds it has used"""
    group: Group | None = None
    """None: it is not there"""
    available: bool = False
    """whether it may be given work"""
    assignment: Assignment | None = None
    before: Assignment | None = None
    """what it did before; episodes of it may still come"""
    wire: Job | None = None
    """the last job it was told"""


class Group:
    """Robots with equal capabilities that may be given work; one that jobs ask for by `name` is alone."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name = name
        self.capabilities = capabilities
        self.classes: list[JobClass] = []
        """of jobs at work or waiting, those that it fits"""
        self.free: dict[str, SchedulableRobot] = {}
        """the longest idle first"""
        self.runs: dict[str, Assignment] = {}
        """by robot, the newest last"""

    @property
    def robots(self) -> int:
        return len(self.free) + len(self.runs)

    def enter(self, robot: SchedulableRobot) -> None:
        """The robot may be given work, or has begun or ended some."""
        if robot.assignment is None:
            self.runs.pop(robot.name, None)
            self.free.setdefault(robot.name, robot)
        else:
            self.free.pop(robot.name, None)
            self.runs[robot.name] = robot.assignment

    def leave(self, robot: SchedulableRobot) -> None:
        """The robot may not be given work."""
        self.free.pop(robot.name, None)
        self.runs.pop(robot.name, None)

    def most_urgent(self, now_ns: int) -> JobRecord | None:
        """The job that a free robot of the group is to work on."""
        found = [job for job_class in self.classes if (job := job_class.first_for(self)) is not None]
        return min(found, key=lambda job: job.rank(now_ns), default=None)


class JobClass:
    """Jobs with one requirement and one set of tasks; a job without an end has a class of its own."""

    def __init__(self, key: Hashable, requirement: Requirement, tasks: tuple[str, ...]) -> None:
        self.key = key
        self.requirement = requirement
        self.tasks = tuple(dict.fromkeys(tasks))
        self.groups: dict[Group, tuple[str, ...]] = {}
        """that fit, with those of `tasks` that their robots can do"""
        self.alive = 0
        """jobs that wait or run"""
        self.waiting: list[JobRecord] = []
        """those that may want a robot, the most urgent first"""

    @property
    def robots(self) -> int:
        """How many may be given it now, at most."""
        return sum(group.robots for group in self.groups)

    def meet(self, group: Group) -> None:
        """Decide whether the two fit."""
        tasks = satisfies(self.tasks, group.capabilities)
        if tasks and not missing_requirements(self.requirement, group.name, group.capabilities):
            self.groups[group] = tasks
            group.classes.append(self)

    def first_for(self, group: Group) -> JobRecord | None:
        """The most urgent of its jobs that wants one more robot of `group`."""
        return next((job for job in self.waiting if job.wants(self.groups[group])), None)

    def requeue(self, job: JobRecord) -> bool:
        """Put the job where it belongs among those that wait; whether it does."""
        if job in self.waiting:
            self.waiting.remove(job)
        wants = job.wants(self.tasks)
        if wants:
            insort(self.waiting, job, key=lambda job: (job.urgency_ns, job.number))
        return wants


class Fleet:
    """All groups and classes, and where there is something to decide."""

    def __init__(self, robots: Mapping[str, SchedulableRobot], config: SchedulerConfig) -> None:
        """`robots`: all that are known, by name; more may come."""
        self.robots = robots
        self.aging_ns = round(config.aging_s * 1e9)
        self._scarce_ns = config.scarce_s * 1e9
        self._groups: dict[tuple[str, Capabilities], Group] = {}
        self._classes: dict[Hashable, JobClass] = {}
        self._asked: set[str] = set()
        """names of robots that jobs ask for"""
        self.open: dict[Group, None] = {}
        """in which a robot became free or a job came to wait"""
        self.new: dict[str, JobRecord] = {}
        """jobs that came to want a robot and may take one from others"""

    @property
    def groups(self) -> Collection[Group]:
        return self._groups.values()

    def place(self, robot: SchedulableRobot, capabilities: Capabilities | None, available: bool) -> None:
        """Put a robot among those like it, again after whatever changed. No `capabilities`: it is not there."""
        group = None if capabilities is None else self._group(robot.name, capabilities)
        if robot.group is not None and (robot.group is not group or not available):
            robot.group.leave(robot)
        robot.group, robot.available = group, available
        if group is not None and available:
            group.enter(robot)
            self.open[group] = None

    def _group(self, name: str, capabilities: Capabilities) -> Group:
        key = (name if name in self._asked else "", capabilities)
        if key not in self._groups:
            self._groups[key] = Group(*key)
            for job_class in self._classes.values():
                job_class.meet(self._groups[key])
        return self._groups[key]

    def add(self, job: JobRecord) -> None:
        """A new job wants robots."""
        need, tasks = job.request.requirement, job.request.tasks
        for name in need.robots:
            robot = self.robots.get(name)
            if name not in self._asked and robot is not None and robot.group is not None:
                self._asked.add(name)
                self.place(robot, robot.group.capabilities, robot.available)
            self._asked.add(name)
        key = need, tasks, job.number if job.standing else -1
        if key not in self._classes:
            self._classes[key] = JobClass(key, need, tasks)
            for group in self.groups:
                self._classes[key].meet(group)
        job.job_class = self._classes[key]
        job.job_class.alive += 1
        everyone = sum(group.robots for group in self.groups)
        scarce = 1 - job.job_class.robots / everyone if everyone and not job.standing else 0.0
        job.ahead_ns = job.priority * self.aging_ns + round(scarce * self._scarce_ns)
        job.urgency_ns = job.submitted_ns - job.ahead_ns
        self.wait(job)

    def wait(self, job: JobRecord) -> None:
        """A job may want a robot again."""
        if job.job_class.requeue(job):
            self.new[job.id] = job
            self.open.update((group, None) for group in job.job_class.groups if group.free)

    def remove(self, job: JobRecord) -> None:
        """A job is not alive any more."""
        self.new.pop(job.id, None)
        job_class = job.job_class
        job_class.requeue(job)
        job_class.alive -= 1
        if not job_class.alive:
            del self._classes[job_class.key]
            for group in job_class.groups:
                group.classes.remove(job_class)

    def weakest(self, job: JobRecord, groups: Iterable[Group], now_ns: int) -> Assignment | None:
        """What gives way to a job first, of that at work in `groups`."""
        wanted = (group for group in groups if job.wants(job.job_class.groups[group]))
        runs = (run for group in wanted for run in reversed(group.runs.values()))
        yields = (run for run in runs if run.yields_to(job, now_ns, self.aging_ns))
        return min(yields, key=Assignment.strength, default=None)
