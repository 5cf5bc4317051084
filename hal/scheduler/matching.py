"""Who works for whom: free robots go to the most urgent job, and jobs of higher priority take robots from others.

Robots that are the same to every job are a group. Which job fits which group is decided once, so a robot that comes
free looks at jobs in their order until one fits, and a job that comes at the groups that it fits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from contextlib import suppress

import msgspec

from hal.resource.capabilities import missing_requirements, satisfies
from hal.resource.lease import Leases
from hal.scheduler.episodes import TaskBalancer, training_seeds
from hal.scheduler.records import (
    REST,
    Assignment,
    Decision,
    Group,
    JobRecord,
    RobotRecord,
    SchedulerConfig,
    job_of,
)
from wire.messages.fleet import Capabilities, JobPhase
from wire.messages.gateway import Job


class Matcher:
    """Robots, the jobs that are alive, and which of them belong together now."""

    def __init__(self, leases: Leases, balancer: TaskBalancer, config: SchedulerConfig) -> None:
        self._leases = leases
        self._balancer = balancer
        self._config = config
        self._aging_ns = round(config.aging_s * 1e9)
        self.robots: dict[str, RobotRecord] = {}
        self.jobs: dict[str, JobRecord] = {}  # those that are alive, and some that have ended
        self._groups: dict[tuple[str, Capabilities], Group] = {}
        self._ended: deque[str] = deque()
        self._asked: set[str] = set()  # names of robots that jobs ask for
        self._standing: dict[str, JobRecord] = {}  # those without an end
        self._waiting: list[JobRecord] = []  # those with an end that may want a robot, the most urgent first
        self._open: dict[Group, None] = {}  # in which a robot became free or a job came to wait
        self._new: dict[str, JobRecord] = {}  # jobs that came to want a robot and may take one from others
        self._left = 0  # assignments that may be made in this step
        self._look_ns = 0  # when jobs that wait behind others without an end are looked at next
        self._decisions: dict[str, Decision] = {}

    def regroup(self, robot: RobotRecord, available: bool) -> None:
        """Put a robot among those like it, again after whatever changed."""
        group = self.group(robot.name, robot.capabilities)
        if (group, available) == (robot.group, robot.available):
            return
        robot.available = False
        robot.group.update(robot)
        robot.group, robot.available = group, available
        group.update(robot)
        self._open[group] = None

    def group(self, name: str, capabilities: Capabilities) -> Group:
        """Of a robot of this name."""
        key = (name if name in self._asked else "", capabilities)
        if key not in self._groups:
            self._groups[key] = Group(*key)
            for job in self.jobs.values():
                self._meet(job, self._groups[key])
        return self._groups[key]

    def _meet(self, job: JobRecord, group: Group) -> None:
        """Decide whether robots of the group fit the job."""
        tasks = satisfies(job.tasks, group.capabilities)
        if tasks and not missing_requirements(job.request.requirement, group.name, group.capabilities):
            job.groups[group] = tasks

    # --- jobs -----------------------------------------------------------------------------------------------------

    def add(self, job: JobRecord) -> None:
        """A new job wants robots."""
        for name in job.request.requirement.robots:
            if name not in self._asked:
                self._asked.add(name)
                if (robot := self.robots.get(name)) is not None:
                    self.regroup(robot, robot.available)
        self.jobs[job.id] = job
        if job.standing:
            self._standing[job.id] = job
        for group in self._groups.values():
            self._meet(job, group)
        everyone = sum(robot.available for robot in self.robots.values())
        scarce = 1 - job.fitting / everyone if everyone and not job.standing else 0.0
        job.ahead_ns = job.priority * self._aging_ns + round(scarce * self._config.scarce_s * 1e9)
        job.urgency_ns = job.submitted_ns - job.ahead_ns
        self._wait(job)

    def finish(self, job: JobRecord, phase: JobPhase, now_ns: int) -> None:
        """A job is done or cancelled."""
        job.phase = phase
        for run in list(job.assignments.values()):
            self.end(run, f"job '{job.id}' is {phase}", now_ns)
        self._standing.pop(job.id, None)
        self._new.pop(job.id, None)
        self._requeue(job)
        self._ended.append(job.id)
        if len(self._ended) > self._config.kept:
            del self.jobs[self._ended.popleft()]

    def _wait(self, job: JobRecord) -> None:
        """The job may want a robot again."""
        if self._requeue(job):
            self._new[job.id] = job
            self._open.update((group, None) for group in job.groups if group.free)

    def _requeue(self, job: JobRecord) -> bool:
        """Put the job where it belongs among those that want a robot; whether it wants one."""
        with suppress(ValueError):
            self._waiting.remove(job)
        wants = job.wants(job.tasks)
        if wants and not job.standing:
            insort(self._waiting, job, key=lambda job: (job.urgency_ns, job.number))
        return wants

    # --- choosing -------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> list[Decision]:
        """What robots are to be told now."""
        self._left = self._config.most_a_step
        self._match(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + round(self._config.look_every_s * 1e9)
            stuck: set[Group] = set()
            for group in self._groups.values():
                if (job := self._most_urgent(group, now_ns)) is not None:
                    self._new[job.id] = job
                    self._make_room(group, stuck, now_ns)
            self._match(now_ns)
        decisions, self._decisions = list(self._decisions.values()), {}
        return decisions

    def _match(self, now_ns: int) -> None:
        """Work for the robots that are free, and robots for the jobs that outrank others."""
        while self._left > 0 and (self._open or self._new):
            # Robots that fit little choose first, so that the others are left for what only they can do.
            for group in sorted(self._open, key=self._flexible):
                while self._left > 0 and group.free and (job := self._most_urgent(group, now_ns)) is not None:
                    self._begin(next(iter(group.free.values())), job, "its turn", now_ns)
                if self._left > 0:
                    del self._open[group]
            for job in sorted(self._new.values(), key=lambda job: (-job.priority, job.rank(now_ns))):
                while self._left > 0 and (run := self._weakest(job, now_ns)) is not None:
                    self.end(run, f"job '{job.id}' comes first", now_ns)
                    self._begin(run.robot, job, "it comes first", now_ns)
                if self._left > 0:
                    del self._new[job.id]

    def _flexible(self, group: Group) -> int:
        """Jobs that wait and that the group fits."""
        return sum(group in job.groups for job in self._waiting) if len(self._open) > 1 and group.free else 0

    def _most_urgent(self, group: Group, now_ns: int) -> JobRecord | None:
        """The job that a free robot of the group is to work on."""
        first = next((job for job in self._waiting if group in job.groups and job.wants(job.groups[group])), None)
        found = [job for job in self._standing.values() if group in job.groups and job.wants(job.groups[group])]
        return min(found if first is None else (*found, first), key=lambda job: job.rank(now_ns), default=None)

    def _weakest(self, job: JobRecord, now_ns: int) -> Assignment | None:
        """What gives way to a job first."""
        groups = [group for group, tasks in job.groups.items() if job.wants(tasks)]
        runs = (run for group in groups for run in reversed(group.runs.values()))
        found = (run for run in runs if run.yields_to(job, now_ns, self._aging_ns))
        return min(found, key=lambda run: run.rank(now_ns), default=None)

    def _make_room(self, group: Group, stuck: set[Group], now_ns: int) -> bool:
        """Whether a robot of `group` is free. If need be its work moves on to a group with a free one, or in which one
        becomes free likewise: an augmenting path of the matching (Berge, 1957). `stuck` are groups without."""
        if group.free:
            return True
        stuck.add(group)
        for run in list(group.runs.values()):
            for other, tasks in run.job.groups.items():
                fits = other not in stuck and set(run.job.groups[group]) <= set(tasks)
                if self._left > 0 and fits and self._make_room(other, stuck, now_ns):
                    self.end(run, "another robot can do its work", now_ns)
                    self._begin(next(iter(other.free.values())), run.job, "another robot is needed elsewhere", now_ns)
                    return True
        return False

    # --- assignments ----------------------------------------------------------------------------------------------

    def _begin(self, robot: RobotRecord, job: JobRecord, reason: str, now_ns: int) -> None:
        """The robot works on the job from now on."""
        ttl_ns = round(self._config.ttl_s * 1e9)
        lease, _ = self._leases.acquire(robot.name, job.id, job.request.kind, job.priority, ttl_ns, now_ns)
        task, seeds, wire = self._unit(robot, job, job.groups[robot.group], lease.number)
        waited_ns = now_ns - job.ahead_ns - job.rank(now_ns)[0]
        kept_until_ns = now_ns + self._aging_ns if job.standing and waited_ns >= self._aging_ns else 0
        taken_up = robot.wire is not None and robot.wire.id == wire.id
        run = Assignment(job, robot, task, seeds, wire, now_ns, kept_until_ns, taken_up, job.urgency_ns)
        job.phase = JobPhase.running
        job.urgency_ns = now_ns - job.ahead_ns
        job.assignments[robot.name] = robot.assignment = run
        self._requeue(job)
        robot.group.update(robot)
        self._left -= 1
        self.notify(robot, wire, reason)

    def _unit(self, robot: RobotRecord, job: JobRecord, tasks: tuple[str, ...], lease: int) -> tuple[str, range, Job]:
        """What the robot is to do of the job, (task, seeds), and how it is told so."""
        last, before, request = robot.wire, robot.before, job.request
        cycle = self._balancer.cycle(tasks, robot.index)
        if job.standing and last is not None and job_of(last.id) == job.id:
            told = range(last.first_seed, last.first_seed + last.episodes)
            if training_seeds(robot.index, robot.seeds_spent).start in told:
                # It has been on this job all along, its link cut or under a person's hand: nothing starts anew.
                return "", told, msgspec.structs.replace(last, tasks=cycle, lease=lease)
        if before is not None and not before.task and len(before.done) < len(before.seeds):
            # An episode that runs now is not counted yet, and its seed is not to be used again.
            robot.seeds_spent += 1
        seeds = training_seeds(robot.index, robot.seeds_spent)
        task, seeds = job.work.pop(tasks, request.robots or job.fitting, seeds)
        id, cycle = f"{job.id}/{lease}", (task,) if task else cycle
        return task, seeds, Job(id, cycle, seeds.start, request.kind, len(seeds), request.version, lease)

    def end(self, run: Assignment, reason: str, now_ns: int, rest: bool = True) -> None:
        """The robot does not work on its job any more and is told to `rest`; what it has not done goes back."""
        robot, job = run.robot, run.job
        job.work.put_back(run.task, run.seeds, run.done)
        del job.assignments[robot.name]
        robot.assignment, robot.before = None, run
        if not job.assignments and job.alive:
            job.phase = JobPhase.waiting
        if job.standing and not job.assignments:
            job.urgency_ns = now_ns - job.ahead_ns
        elif not run.done:
            job.urgency_ns = min(job.urgency_ns, run.urgency_ns)
        lease = self._leases.of(robot.name, now_ns)
        if lease is not None and lease.number == run.wire.lease:
            self._leases.release(robot.name, lease.number, now_ns)
        robot.group.update(robot)
        self._open[robot.group] = None
        self._wait(job)
        if rest:
            self.notify(robot, Job(REST, (), 0), reason)

    def notify(self, robot: RobotRecord, job: Job, reason: str) -> None:
        """The robot is told this in the next step, unless something else comes up."""
        robot.wire = job
        self._decisions[robot.name] = Decision(robot.name, job, reason)
