"""Indexes that keep a decision short: robots that are alike, jobs that ask for the same, and who waits for whom.

Robots with equal capabilities are a `Group`; jobs with the same requirement and tasks share a `JobClass`. Which demand
fits which group is decided once. Each group has a queue of the jobs that fit it, so a free robot looks at the head of
one queue whatever the number of jobs, and a new job at the few groups it fits whatever the number of robots.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator

import msgspec

from hal.resource.capabilities import missing_requirements, satisfies
from hal.scheduler.jobs import Assignment, JobRecord
from wire.messages.fleet import Capabilities, Requirement
from wire.messages.gateway import Job
from wire.types import Lease


class Queue:
    """Jobs that wait for robots of one group, or for one robot by name.

    What does not want a robot any more, or has been served and comes later now, is found out at the head.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, JobRecord]] = []
        self._serial = itertools.count()
        self.standing: dict[int, JobRecord] = {}
        """jobs without an end, by number"""

    def add(self, job: JobRecord) -> None:
        if job.standing:
            self.standing[job.number] = job
        elif self not in job.queued or job.urgency < job.queued[self]:
            job.queued[self] = job.urgency
            heapq.heappush(self._heap, self._entry(job))

    def _entry(self, job: JobRecord) -> tuple[int, int, int, JobRecord]:
        return job.urgency, job.number, next(self._serial), job

    def head(self, group: Group) -> JobRecord | None:
        """The most urgent job with an end that wants one more robot of `group`."""
        while self._heap:
            urgency, _, _, job = self._heap[0]
            if job.queued.get(self) != urgency:
                # It stands further in front, too, or is not there any more.
                heapq.heappop(self._heap)
            elif not job.wants(group):
                heapq.heappop(self._heap)
                del job.queued[self]
            elif urgency < job.urgency:
                job.queued[self] = job.urgency
                heapq.heapreplace(self._heap, self._entry(job))
            else:
                return job
        return None


class SchedulableRobot:
    """A robot as the scheduler sees it."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        """its training lane"""
        self.spent = 0
        """training seeds it has used"""
        self.group: Group | None = None
        """None: it is not there, or may not be given work"""
        self.kin: Group | None = None
        """its group, whether it may be given work or not"""
        self.assignment: Assignment | None = None
        self.before: Assignment | None = None
        """what it did before; episodes of it may still come"""
        self.taken: Lease | None = None
        """held by somebody who is not a job"""
        self.wire: Job | None = None
        """the last job it was told"""
        self.spent_before = 0
        """`spent` when it was told it"""
        self.queue: Queue | None = None
        """of jobs that ask for it by name"""


class Group:
    """Robots with equal capabilities."""

    def __init__(self, number: int, capabilities: Capabilities) -> None:
        self.number = number
        self.capabilities = capabilities
        self.queue = Queue()
        self.free: OrderedDict[str, SchedulableRobot] = OrderedDict()
        """those without work, the longest idle first"""
        self.flexible = 0
        """demands of jobs at work or waiting that it fits: one with few is kept for them"""
        self.members = 0
        """robots that may be given work"""
        self.running: dict[JobClass, OrderedDict[str, Assignment]] = {}
        self.victims: list[tuple[int, int, Assignment]] = []
        """heap of assignments of jobs with an end, the least urgent first; those that ended meanwhile too"""
        self._tasks: dict[JobClass, tuple[str, ...]] = {}

    def tasks_for(self, demand: JobClass) -> tuple[str, ...]:
        """The tasks of `demand` that these robots can do."""
        found = self._tasks.get(demand)
        if found is None:
            found = self._tasks[demand] = satisfies(demand.tasks, self.capabilities)
        return found

    def forget(self, demand: JobClass) -> None:
        """No job asks for it any more."""
        self.flexible -= 1
        self._tasks.pop(demand, None)

    def started(self, assignment: Assignment, serial: int) -> None:
        job = assignment.job
        assignment.group = self
        self.running.setdefault(job.demand, OrderedDict())[assignment.robot] = assignment
        if not job.standing:
            heapq.heappush(self.victims, (-assignment.urgency, -serial, assignment))

    def ended(self, assignment: Assignment) -> None:
        assignment.group = None
        demand = assignment.job.demand
        running = self.running[demand]
        del running[assignment.robot]
        if not running:
            del self.running[demand]

    def weakest(self) -> Assignment | None:
        """The running assignment, of a job with an end, that would be preempted first: least urgent, then newest."""
        while self.victims and not (self.victims[0][2].live and self.victims[0][2].group is self):
            heapq.heappop(self.victims)
        return self.victims[0][2] if self.victims else None

    def standing_runs(self) -> Iterator[Assignment]:
        """The newest assignment of each job without an end."""
        for running in self.running.values():
            newest = running[next(reversed(running))]
            if newest.job.standing:
                yield newest


class JobClass:
    """What jobs with one requirement and one set of tasks ask for; a job without an end has one of its own."""

    def __init__(self, requirement: Requirement, tasks: tuple[str, ...], key: Hashable) -> None:
        self.names = requirement.robots
        """the only robots it may have, by name; none: any that fit"""
        self.requirement = msgspec.structs.replace(requirement, robots=())
        self.tasks = tuple(dict.fromkeys(tasks))
        self.key = key
        self.groups: dict[Group, None] = {}
        """that fit it"""
        self.jobs: dict[int, JobRecord] = {}
        """alive, by number"""

    @property
    def robots(self) -> int:
        """How many may be given it now, at most."""
        members = sum(group.members for group in self.groups)
        return min(len(self.names), members) if self.names else members

    def fits(self, group: Group) -> bool:
        return group in self.groups

    def meet(self, group: Group) -> bool:
        """A new group is there; whether it fits."""
        fits = not missing_requirements(self.requirement, "", group.capabilities) and bool(
            satisfies(self.tasks, group.capabilities)
        )
        if fits:
            self.groups[group] = None
            group.flexible += 1
        return fits
