"""Robots to jobs: who is free, who waits, who has to give way. Each event touches few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.scheduler.groups import Group, JobClass, Queue, SchedulableRobot
from hal.scheduler.jobs import Assignment, JobRecord
from wire.messages.fleet import Capabilities

Begin = Callable[[SchedulableRobot, JobRecord, str, int], Assignment]
End = Callable[[Assignment, str, int], None]
_MOST_A_LOOK = 20
"""robots of a group that jobs without an end give away at a time"""


class Dispatch:
    """Keeps the indexes and chooses. `begin` and `end` of the scheduler make it so."""

    def __init__(self, aging_s: float, scarce_s: float, most: int, begin: Begin, end: End) -> None:
        self._aging_ns = round(aging_s * 1e9)
        self._scarce_ns = round(scarce_s * 1e9)
        self._most = most
        self._begin_job = begin
        self._end_job = end
        self._groups: dict[Capabilities, Group] = {}
        self._demands: dict[object, JobClass] = {}
        self._named: dict[str, Queue] = {}
        """jobs that ask for a robot by name, by that name"""
        self._todo: dict[Group, None] = {}
        """groups in which a robot became free or a job came to wait"""
        self._new: dict[int, JobRecord] = {}
        """jobs that came to want a robot and may take one from others"""
        self._asked: dict[str, SchedulableRobot] = {}
        """robots that jobs ask for by name, and that became free or whose jobs came"""
        self._all: dict[str, SchedulableRobot] = {}
        self._members = 0
        self._free = 0
        self._serial = 0
        self._left = 0

    # --- jobs -----------------------------------------------------------------------------------------------------

    def enter(self, job: JobRecord) -> None:
        """A job wants robots."""
        request = job.request
        key = (request.requirement, request.tasks, job.number if job.standing else -1)
        demand = self._demands.get(key)
        if demand is None:
            demand = self._demands[key] = JobClass(request.requirement, request.tasks, key)
            for group in self._groups.values():
                demand.meet(group)
        demand.jobs[job.number] = job
        job.entered = demand
        scarce = max(0.0, 1.0 - demand.robots / self._members) if self._members else 0.0
        job.ahead_ns = job.priority * self._aging_ns + round(scarce * self._scarce_ns)
        job.urgency = job.submitted_ns - job.ahead_ns
        self._wait(job)

    def leave(self, job: JobRecord) -> None:
        """A job is done or cancelled."""
        demand = job.entered
        if demand is None:
            return
        self._new.pop(job.number, None)
        del demand.jobs[job.number]
        if job.standing:
            for queue in self._queues(demand):
                queue.standing.pop(job.number, None)
        if not demand.jobs:
            for group in demand.groups:
                group.forget(demand)
            del self._demands[demand.key]

    def _wait(self, job: JobRecord) -> None:
        """The job wants a robot again."""
        demand = job.demand
        for queue in self._queues(demand):
            queue.add(job)
        if demand.names:
            self._asked.update((name, self._all[name]) for name in demand.names if name in self._all)
        else:
            self._todo.update((group, None) for group in demand.groups if group.free)
        self._new[job.number] = job

    def _queues(self, demand: JobClass) -> list[Queue]:
        if not demand.names:
            return [group.queue for group in demand.groups]
        for name in demand.names:
            if name not in self._named:
                self._named[name] = Queue()
                if name in self._all:
                    self._all[name].queue = self._named[name]
        return [self._named[name] for name in demand.names]

    # --- robots ---------------------------------------------------------------------------------------------------

    def kin(self, robot: SchedulableRobot, capabilities: Capabilities | None) -> None:
        """The robot has these capabilities; None: it has left."""
        if capabilities is None:
            self.place(robot, False)
            robot.kin = None
            self._all.pop(robot.name, None)
            return
        group = self._groups.get(capabilities)
        if group is None:
            group = self._groups[capabilities] = Group(len(self._groups), capabilities)
            for demand in self._demands.values():
                if demand.meet(group) and not demand.names:
                    for job in demand.jobs.values():
                        group.queue.add(job)
        if robot.kin is not group:
            self.place(robot, False)
            robot.kin = group
            for demand in self._demands.values():
                if robot.name in demand.names:
                    for job in demand.jobs.values():
                        self._wait(job)
        robot.queue = self._named.get(robot.name)
        self._all[robot.name] = robot

    def place(self, robot: SchedulableRobot, available: bool) -> None:
        """Whether the robot may be given work."""
        group = robot.kin if available else None
        if robot.group is group:
            return
        if robot.group is not None:
            robot.group.members -= 1
            self._members -= 1
            if robot.group.free.pop(robot.name, None) is not None:
                self._free -= 1
            if robot.assignment is not None and robot.assignment.group is not None:
                # It keeps its job while its lease lives, but cannot be given another.
                robot.group.ended(robot.assignment)
        robot.group = group
        if group is not None:
            group.members += 1
            self._members += 1
            if robot.assignment is not None:
                group.started(robot.assignment, self._next())
            self._freed(robot)

    def _freed(self, robot: SchedulableRobot) -> None:
        group = robot.group
        if group is None or robot.assignment is not None or robot.name in group.free:
            return
        group.free[robot.name] = robot
        self._free += 1
        self._todo[group] = None
        if robot.queue is not None:
            self._asked[robot.name] = robot

    def ended(self, robot: SchedulableRobot, assignment: Assignment) -> None:
        """The robot does not work on that any more."""
        if assignment.group is not None:
            assignment.group.ended(assignment)
        self._freed(robot)
        if assignment.job.alive:
            self._wait(assignment.job)

    # --- choosing -------------------------------------------------------------------------------------------------

    def fill(self, now_ns: int, again: bool = False) -> None:
        """Work for the robots that are free, and robots for the jobs that outrank others.

        A turn makes `most` assignments and leaves the rest to the next one. `again`: it is still the same turn.
        """
        self._left = self._left if again else self._most
        while self._left > 0 and (self._asked or self._todo or self._new):
            self._fill_asked(now_ns)
            # Robots that fit little choose first, so that the others are left for what only they can do.
            for group in sorted(self._todo, key=lambda group: (group.flexible, group.number)):
                self._fill_group(group, now_ns)
            while self._left > 0 and self._new:
                job = min(self._new.values(), key=lambda job: (-job.priority, job.urgency, job.number))
                while self._left > 0 and (victim := self._victim(job, now_ns)) is not None:
                    self._replace(victim, job, f"job '{job.id}' has priority", now_ns)
                if self._left > 0:
                    del self._new[job.number]
            while self._left > 0 and not self._todo and self._swap(now_ns):
                pass

    def _fill_asked(self, now_ns: int) -> None:
        while self._left > 0 and self._asked:
            name, robot = next(iter(self._asked.items()))
            del self._asked[name]
            if robot.group is not None and name in robot.group.free:
                job = self._best(robot.group, robot, now_ns)
                if job is not None:
                    self._begin(robot, job, "its turn", now_ns)

    def _fill_group(self, group: Group, now_ns: int) -> None:
        while group.free and (job := self._best(group, None, now_ns)) is not None:
            if self._left <= 0:
                return
            self._begin(next(iter(group.free.values())), job, "its turn", now_ns)
        del self._todo[group]

    def look(self, now_ns: int) -> None:
        """Jobs without an end give robots to those that have waited for long behind them, and share with each other."""
        for group in self._groups.values():
            for _ in range(_MOST_A_LOOK):
                runs = sorted(group.standing_runs(), key=_weakness)
                job = self._best(group, None, now_ns) if runs else None
                if job is None or not self._give_way(runs, job, now_ns):
                    break
        for name in self._named:
            robot = self._all.get(name)
            if robot is None or robot.group is None or robot.assignment is None or not robot.assignment.job.standing:
                continue
            job = self._best(robot.group, robot, now_ns)
            if job is not None:
                self._give_way([robot.assignment], job, now_ns)

    def _give_way(self, runs: Sequence[Assignment], job: JobRecord, now_ns: int) -> bool:
        """One of `runs`, the weakest first, all of jobs without an end, makes room for `job` if it is time."""
        for run in runs:
            if self._owes(run, job, now_ns):
                self._replace(run, job, f"job '{job.id}' has waited", now_ns)
                return True
        return False

    def _owes(self, run: Assignment, poor: JobRecord, now_ns: int) -> bool:
        """Whether a job without an end is to give a robot to another job."""
        rich = run.job
        if rich is poor or now_ns < run.kept_until_ns:
            return False
        if poor.standing and rich.priority == poor.priority and len(rich.assignments) > len(poor.assignments) + 1:
            return True
        waits = not (poor.standing and poor.assignments)
        return waits and self._age(poor, now_ns) >= rich.priority + 1

    def _age(self, job: JobRecord, now_ns: int) -> float:
        """The priority that its waiting makes of a job's. With each part that it is given it waits anew for the next,
        and so comes after those that have waited for their first."""
        if not job.standing:
            return (now_ns - job.urgency) / self._aging_ns
        return job.priority + _waited_ns(job, now_ns) / self._aging_ns

    def _rank(self, run: Assignment, now_ns: int) -> float:
        """The same for what a robot works on: who has waited for it does not lose it to who has waited less."""
        return run.job.priority if run.job.standing else (now_ns - run.urgency) / self._aging_ns

    def _best(self, group: Group, robot: SchedulableRobot | None, now_ns: int) -> JobRecord | None:
        """The job that a free robot of `group` is to work on; with `robot`, those that ask for it by name too."""
        found: list[JobRecord] = []
        for queue in (group.queue, robot.queue if robot is not None else None):
            if queue is None:
                continue
            if (head := queue.head(group)) is not None:
                found.append(head)
            found += [job for job in queue.standing.values() if job.wants(group)]
        return min(found, key=lambda job: (-self._age(job, now_ns), job.standing, *_poverty(job)), default=None)

    def _begin(self, robot: SchedulableRobot, job: JobRecord, reason: str, now_ns: int) -> None:
        group = robot.group
        assert group is not None
        del group.free[robot.name]
        self._free -= 1
        in_turn = job.standing and _waited_ns(job, now_ns) >= self._aging_ns
        assignment = self._begin_job(robot, job, reason, now_ns)
        if in_turn:
            assignment.kept_until_ns = now_ns + self._aging_ns
        group.started(assignment, self._next())
        job.urgency = now_ns - job.ahead_ns
        self._left -= 1

    def _replace(self, victim: Assignment, job: JobRecord, reason: str, now_ns: int) -> None:
        """The victim's robot goes on to `job`."""
        robot = self._all[victim.robot]
        if not victim.done:
            victim.job.urgency = min(victim.job.urgency, victim.urgency)
        self._end_job(victim, reason, now_ns)
        self._begin(robot, job, reason, now_ns)

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _victim(self, job: JobRecord, now_ns: int) -> Assignment | None:
        """What gives way to a job: of lower priority, and not so old that it may stay."""
        demand, age = job.demand, self._age(job, now_ns)
        if demand.names:
            robots = (self._all[name] for name in demand.names if name in self._all)
            found = [
                robot.assignment
                for robot in robots
                if robot.assignment is not None and robot.group is not None and job.wants(robot.group)
            ]
        else:
            found = []
            for group in demand.groups:
                if job.wants(group):
                    found += group.standing_runs()
                    if (weakest := group.weakest()) is not None:
                        found.append(weakest)
        yields = (
            run
            for run in found
            if run.job.priority < job.priority and self._rank(run, now_ns) < age and run.kept_until_ns <= now_ns
        )
        return min(yields, key=_weakness, default=None)

    def _swap(self, now_ns: int) -> bool:
        """Free a robot for a job that waits by moving another to a robot that stands idle: the shortest augmenting path
        of the matching, found breadth first over groups (Berge, 1957)."""
        if not self._free:
            return False
        came: dict[Group, tuple[Group, JobClass] | None] = {}
        waits: dict[Group, JobRecord] = {}
        for group in self._groups.values():
            if not group.free and group.running and (job := self._best(group, None, now_ns)) is not None:
                came[group], waits[group] = None, job
        todo = list(came)
        for group in todo:
            for demand in group.running:
                if demand.names:
                    continue
                for other in demand.groups:
                    if other in came or not _movable(group, demand, other):
                        continue
                    came[other] = group, demand
                    if other.free:
                        return self._move(other, came, waits, now_ns)
                    todo.append(other)
        return False

    def _move(
        self,
        to: Group,
        came: dict[Group, tuple[Group, JobClass] | None],
        waits: dict[Group, JobRecord],
        now_ns: int,
    ) -> bool:
        """Every job on the path moves one group on."""
        while (step := came[to]) is not None:
            group, demand = step
            running = group.running[demand]
            assignment = running[next(reversed(running))]
            job = assignment.job
            job.urgency = min(job.urgency, assignment.urgency)
            self._end_job(assignment, "another robot can do its work", now_ns)
            if not job.wants(to):
                return True
            self._begin(next(iter(to.free.values())), job, "in place of a robot that is needed elsewhere", now_ns)
            to = group
        if to.free and waits[to].wants(to):
            self._begin(next(iter(to.free.values())), waits[to], "another robot took over its work", now_ns)
        return True


def _movable(group: Group, demand: JobClass, other: Group) -> bool:
    running = group.running[demand]
    job = running[next(reversed(running))].job
    # Robots of its own kind it has anyway, and its part must be one that the others can do.
    return set(group.tasks_for(demand)) <= set(other.tasks_for(demand)) and job.alive


def _weakness(run: Assignment) -> tuple[int, bool, int, int]:
    job = run.job
    return job.priority, not job.standing, -len(job.assignments) if job.standing else -run.urgency, -job.number


def _waited_ns(job: JobRecord, now_ns: int) -> int:
    return 0 if job.assignments else now_ns - job.waits_since_ns


def _poverty(job: JobRecord) -> tuple[int, int]:
    return len(job.assignments) if job.standing else 0, job.number
