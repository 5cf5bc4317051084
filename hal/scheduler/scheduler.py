"""Which robot works on which job. Pure: the time is passed in, nothing is drawn, same calls give same decisions.

An assignment of a robot to a job is a lease that the robot's reports renew. Work comes in units; what a robot did not
do of its unit, because it failed, was taken or was needed elsewhere, goes back to the job and on to the next robot.

    scheduler.submit(request, now_ns)
    scheduler.join(name, capabilities, now_ns)              a robot said hello
    scheduler.heartbeat(name, status.job, ..., now_ns)      it reported
    scheduler.episode_done(name, task, success, now_ns)     an episode of it is stored
    for decision in scheduler.step(now_ns): tell the robot
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from hal.resource.capabilities import missing_requirements
from hal.resource.health import RobotHealth
from hal.resource.lease import Leases
from hal.resource.robot_registry import Change, RobotRegistry
from hal.scheduler.decision import REST, Decision, SchedulerConfig, job_of
from hal.scheduler.groups import Fleet, Group, SchedulableRobot
from hal.scheduler.jobs import Assignment, Done, JobPhase, JobRecord, WorkUnit, check_request
from hal.scheduler.seeds import training_seeds
from hal.scheduler.tasks import TaskBalancer, TaskCount
from wire.errors import RejectedError, suggest
from wire.messages.all import Job
from wire.messages.fleet import Capabilities, JobRequest, JobState
from wire.types import Lease

S = 1_000_000_000


class Scheduler:
    """Times are of one clock that does not go back. Every robot, job and lease goes through here."""

    def __init__(
        self,
        registry: RobotRegistry,
        leases: Leases,
        robots: Sequence[str] = (),
        counts: Mapping[str, TaskCount] | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        """`robots` named here keep their training seeds whatever the order they come in; others get the next free ones.
        `counts`: what was practised before, by task."""
        self._registry = registry
        self._leases = leases
        self._config = config or SchedulerConfig()
        self._robots: dict[str, SchedulableRobot] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._submitted = 0
        self._ended: deque[str] = deque()
        self._fleet = Fleet(self._robots, self._config)
        self._left = 0
        """assignments that may be made in this step"""
        self._looked_ns: int | None = None
        self._tell: dict[str, Decision] = {}
        self.balancer = TaskBalancer(counts)
        for name in robots:
            self._robot(name)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, now_ns: int, done: Iterable[Done] = ()) -> JobState:
        """Take a job. One of this id that is known already stays as it is; its state is returned.

        `done`: finished episodes of it, when it is submitted again after a restart. Raises `ConfigError` that names the
        field for a job that cannot work.
        """
        if request.id not in self._jobs:
            check_request(request)
            job = self._jobs[request.id] = JobRecord(request, self._submitted, now_ns)
            self._submitted += 1
            self._fleet.add(job)
            for episode in done:
                if job.alive and job.work.claim(episode.task, episode.seed):
                    self._count(job, episode.success, now_ns)
        return self._state(self._jobs[request.id])

    def cancel(self, id: str, now_ns: int) -> JobState:
        """End a job; its robots go on to others after their running episode. Raises `RejectedError` if unknown."""
        job = self._jobs.get(id)
        if job is None:
            raise RejectedError(f"there is no job '{id}'.{suggest(id, self._jobs)} `jobs` lists them.")
        if job.alive:
            self._finish(job, JobPhase.cancelled, now_ns)
        return self._state(job)

    def states(self) -> tuple[JobState, ...]:
        """All jobs that wait or run, and the newest of those that ended, in the order they were submitted."""
        return tuple(map(self._state, self._jobs.values()))

    def job(self, id: str) -> JobState | None:
        """The state of one job."""
        return self._state(self._jobs[id]) if id in self._jobs else None

    def assigned(self) -> dict[str, str]:
        """The job of every robot that works on one."""
        return {name: robot.assignment.job.id for name, robot in self._robots.items() if robot.assignment is not None}

    # --- robots ---------------------------------------------------------------------------------------------------

    def join(
        self, name: str, capabilities: Capabilities, now_ns: int, identity: str = "", seeds_spent: int = 0
    ) -> None:
        """A robot is there; `RobotRegistry.join` says the rest. `seeds_spent`: training episodes it ever began."""
        self._registry.join(name, capabilities, now_ns, identity)
        robot = self._robot(name)
        robot.seeds_spent = max(robot.seeds_spent, seeds_spent)

    def heartbeat(self, name: str, job: str, episodes: int, now_ns: int) -> None:
        """The robot lives: `job` is the id of the job it says it works on, `episodes` how many it has finished of it.

        Renews its lease if it works on what it was told, or has not had the time to take it up.
        """
        robot = self._robots.get(name)
        run = robot.assignment if robot is not None else None
        if run is None:
            return
        if job == run.wire.id:
            run.taken_up = True
            if run.finished_ns is None and 0 < run.wire.episodes <= episodes:
                run.finished_ns = now_ns
        elif run.taken_up or now_ns - run.since_ns > self._config.take_up_s * S:
            return
        lease = self._leases.of(name, now_ns)
        if lease is not None and lease.number == run.wire.lease:
            self._leases.renew(name, lease.number, now_ns)
        if run.finished_ns is not None:
            late = now_ns - run.finished_ns > self._config.settle_s * S
            if late or run.stored >= run.wire.episodes:
                self._end(run, "some of its episodes were not stored", now_ns)

    def episode_done(
        self, name: str, task: str, success: bool | None, now_ns: int, seed: int = -1, source: str = "online"
    ) -> str:
        """An episode of the robot is stored; returns the id of the job it counts for, '' for none.

        `success` None: it was aborted, which uses a seed and counts for nothing. `seed` -1: not known. `source` as in
        `Episode.source`; demonstrations count for nothing.
        """
        if source == "demonstration":
            return ""
        robot, examined = self._robot(name), source == "evaluation"
        if not examined:
            robot.seeds_spent += 1
            if success is not None:
                self.balancer.add(task, success)
        if success is None:
            return ""
        current, runs = robot.assignment, [robot.assignment, robot.before]
        if current is not None and current.unit.task and not current.taken_up:
            runs.reverse()
        for run in runs:
            if run is None or run.job.examines != examined:
                continue
            if not run.owns(task, seed):
                # After an aborted episode an evaluation runs past the seeds of its unit; those left go out again.
                run.stored += examined and task == run.unit.task and seed >= run.unit.seeds.stop
            elif run is current:
                self._advance(run, seed, success, now_ns)
                return run.job.id
            elif run.job.alive and run.job.work.claim(task, seed):
                # It ended after the robot had been given something else, and no other has its work yet.
                self._count(run.job, success, now_ns)
                return run.job.id
        return ""

    def acquire(
        self, name: str, holder: str, purpose: str, priority: int, ttl_ns: int, now_ns: int, rest: bool = True
    ) -> tuple[Lease, Lease | None]:
        """Lease a robot to somebody who is not a job: the lease, and the one that ended for it.

        `rest`: it is told to rest, so that nothing moves but what the holder moves; an operator who only corrects the
        running job leaves it its job. Raises `RejectedError` for a robot that is not there or is held by as high a
        priority.
        """
        if name not in self._registry:
            raise RejectedError(f"there is no robot '{name}'.{suggest(name, self._robots)} `robots` lists them.")
        robot = self._robot(name)
        lease, preempted = self._leases.acquire(name, holder, purpose, priority, ttl_ns, now_ns)
        if robot.assignment is not None:
            self._end(robot.assignment, f"held by {holder}", now_ns, rest=False)
        if rest:
            self._rest(robot, f"held by {holder}")
        self._place(robot, now_ns)
        return lease, preempted

    def release(self, name: str, number: int, now_ns: int) -> Lease:
        """The robot is free again; `number` 0: whoever holds it. Raises `RejectedError` when that lease has ended."""
        lease = self._leases.release(name, number, now_ns)
        self._lease_ended(lease, now_ns)
        return lease

    # --- deciding -------------------------------------------------------------------------------------------------

    def step(self, now_ns: int, changes: Sequence[Change] | None = None) -> list[Decision]:
        """What robots are to be told now, at most one thing each. `changes`: what `RobotRegistry.poll` has just
        returned; None: it is asked here."""
        for change in self._registry.poll(now_ns) if changes is None else changes:
            self._changed(change, now_ns)
        for lease in self._leases.expire(now_ns):
            self._lease_ended(lease, now_ns)
        self._left = self._config.most_a_step
        self._match(now_ns)
        if self._looked_ns is None or now_ns - self._looked_ns >= self._config.look_every_s * S:
            self._looked_ns = now_ns
            self._rearrange(now_ns)
            self._match(now_ns)
        decisions, self._tell = list(self._tell.values()), {}
        return decisions

    def _match(self, now_ns: int) -> None:
        """Work for the robots that are free, and robots for the jobs that outrank others."""
        fleet = self._fleet
        while self._left > 0 and (fleet.open or fleet.new):
            # Robots that fit little choose first, so that the others are left for what only they can do.
            for group in sorted(fleet.open, key=lambda group: len(group.classes)):
                while self._left > 0 and group.free and (job := group.most_urgent(now_ns)) is not None:
                    self._begin(next(iter(group.free.values())), job, "its turn", now_ns)
                if self._left > 0:
                    del fleet.open[group]
            for job in sorted(fleet.new.values(), key=lambda job: (-job.priority, job.urgency_ns, job.number)):
                while self._left > 0 and (run := fleet.weakest(job, job.job_class.groups, now_ns)) is not None:
                    self._replace(run, job, f"job '{job.id}' has priority", now_ns)
                if self._left > 0:
                    del fleet.new[job.id]

    def _rearrange(self, now_ns: int) -> None:
        """Jobs without an end make room for those that have waited for long, and work moves on to robots that stand
        idle if others need its own."""
        stuck: set[Group] = set()
        for group in list(self._fleet.groups):
            while self._left > 0 and (job := group.most_urgent(now_ns)) is not None:
                if not group.free and (run := self._fleet.weakest(job, (group,), now_ns)) is not None:
                    self._replace(run, job, f"job '{job.id}' has waited", now_ns)
                elif (robot := self._make_room(group, stuck, now_ns)) is not None:
                    self._begin(robot, job, "another robot took over its work", now_ns)
                else:
                    break

    def _make_room(self, group: Group, stuck: set[Group], now_ns: int) -> SchedulableRobot | None:
        """A free robot of `group`. If need be the work of another moves on to a group with a free one, or in which one
        becomes free likewise: an augmenting path of the matching (Berge, 1957). `stuck` are groups without."""
        if group.free:
            return next(iter(group.free.values()))
        stuck.add(group)
        for job_class, run in {run.job.job_class: run for run in group.runs.values()}.items():
            for other, tasks in job_class.groups.items():
                if other in stuck or not set(job_class.groups[group]) <= set(tasks):
                    continue
                if (robot := self._make_room(other, stuck, now_ns)) is not None:
                    stuck.discard(group)
                    self._end(run, "another robot can do its work", now_ns, keeps_place=True)
                    self._begin(robot, run.job, "in place of a robot that is needed elsewhere", now_ns)
                    return run.robot
        return None

    def _replace(self, run: Assignment, job: JobRecord, reason: str, now_ns: int) -> None:
        self._end(run, reason, now_ns, keeps_place=not run.done)
        self._begin(run.robot, job, reason, now_ns)

    # --- a robot's work -------------------------------------------------------------------------------------------

    def _begin(self, robot: SchedulableRobot, job: JobRecord, reason: str, now_ns: int) -> None:
        """The robot works on the job from now on."""
        assert robot.group is not None
        tasks, ttl_ns = job.job_class.groups[robot.group], round(self._config.ttl_s * S)
        lease, _ = self._leases.acquire(robot.name, job.id, job.request.kind, job.priority, ttl_ns, now_ns)
        waited = job.standing and not job.assignments and now_ns - job.waits_since_ns >= self._fleet.aging_ns
        unit, wire = self._unit(robot, job, tasks, lease.number)
        run = Assignment(
            job,
            robot,
            unit,
            wire,
            since_ns=now_ns,
            urgency_ns=job.urgency_ns,
            taken_up=robot.wire is not None and robot.wire.id == wire.id,
            kept_until_ns=now_ns + self._fleet.aging_ns if waited else 0,
            cycle_ends=len(wire.tasks),
        )
        job.phase, job.started_ns = JobPhase.running, job.started_ns or now_ns
        job.urgency_ns = now_ns - job.ahead_ns
        job.assignments[robot.name] = robot.assignment = run
        job.job_class.requeue(job)
        robot.group.enter(robot)
        self._left -= 1
        self._notify(robot, wire, reason)

    def _unit(
        self, robot: SchedulableRobot, job: JobRecord, tasks: tuple[str, ...], lease: int
    ) -> tuple[WorkUnit, Job]:
        """What the robot is to do of the job, and how it is told so."""
        last, before, request = robot.wire, robot.before, job.request
        cycle = self.balancer.cycle(tasks, robot.index)
        if job.standing and last is not None and job_of(last.id) == job.id:
            told = range(last.first_seed, last.first_seed + last.episodes)
            if training_seeds(robot.index, robot.seeds_spent).start in told:
                # It has been on this job all along, its link cut or under a person's hand: nothing starts anew.
                return WorkUnit("", told), msgspec.structs.replace(last, tasks=cycle, lease=lease)
        if before is not None and not before.unit.task and len(before.done) < len(before.unit.seeds):
            # An episode that runs now is not counted yet, and its seed is not to be used again.
            robot.seeds_spent += 1
        seeds = training_seeds(robot.index, robot.seeds_spent)
        unit = job.work.pop(tasks, request.robots or job.job_class.robots, seeds)
        wire = Job(
            id=f"{job.id}/{lease}",
            tasks=(unit.task,) if unit.task else cycle,
            first_seed=unit.seeds.start,
            kind=request.kind,
            episodes=len(unit.seeds),
            version=request.version,
            lease=lease,
        )
        return unit, wire

    def _end(
        self, run: Assignment, reason: str, now_ns: int, rest: bool = True, keeps_place: bool = False
    ) -> None:
        """The robot does not work on its job any more; what it has not done goes back.

        `rest`: it is told so. `keeps_place`: the job waits where it did before it was given the robot.
        """
        robot, job = run.robot, run.job
        job.work.put_back(run.unit, run.done)
        del job.assignments[robot.name]
        robot.assignment, robot.before = None, run
        if keeps_place:
            job.urgency_ns = min(job.urgency_ns, run.urgency_ns)
        if not job.assignments:
            job.waits_since_ns = now_ns
            job.phase = JobPhase.waiting if job.alive else job.phase
        lease = self._leases.of(robot.name, now_ns)
        if lease is not None and lease.number == run.wire.lease:
            self._leases.release(robot.name, lease.number, now_ns)
        self._place(robot, now_ns)
        self._fleet.wait(job)
        if rest:
            self._rest(robot, reason)

    def _rest(self, robot: SchedulableRobot, reason: str) -> None:
        """It is told to rest, unless there is other work for it in the same step."""
        self._notify(robot, Job(REST, (), 0), reason)

    def _notify(self, robot: SchedulableRobot, job: Job, reason: str) -> None:
        robot.wire = job
        self._tell[robot.name] = Decision(robot.name, job, reason)

    def _advance(self, run: Assignment, seed: int, success: bool, now_ns: int) -> None:
        """An episode counts for what its robot works on."""
        run.stored += 1
        run.taken_up = True
        run.done.append(run.unit.seeds.start + len(run.done) if run.unit.task and seed < 0 else seed)
        self._count(run.job, success, now_ns)
        if not run.job.alive:
            return
        if len(run.done) >= len(run.unit.seeds):
            self._end(run, "its part is done", now_ns)
        elif run.stored >= run.cycle_ends and not run.unit.task and run.robot.group is not None:
            # It went through its tasks once: what they need has changed.
            tasks = self.balancer.cycle(run.job.job_class.groups[run.robot.group], run.robot.index)
            run.cycle_ends = run.stored + len(tasks)
            if tasks != run.wire.tasks:
                run.wire = msgspec.structs.replace(run.wire, tasks=tasks)
                self._notify(run.robot, run.wire, "the tasks need other shares")

    def _count(self, job: JobRecord, success: bool, now_ns: int) -> None:
        if job.count(success):
            self._finish(job, JobPhase.done, now_ns)

    def _finish(self, job: JobRecord, phase: JobPhase, now_ns: int) -> None:
        job.phase, job.ended_ns = phase, now_ns
        for run in list(job.assignments.values()):
            self._end(run, f"job '{job.id}' is {phase}", now_ns)
        self._fleet.remove(job)
        self._ended.append(job.id)
        if len(self._ended) > self._config.kept:
            del self._jobs[self._ended.popleft()]

    # --- robots that change ---------------------------------------------------------------------------------------

    def _robot(self, name: str) -> SchedulableRobot:
        return self._robots.setdefault(name, SchedulableRobot(name, len(self._robots)))

    def _place(self, robot: SchedulableRobot, now_ns: int) -> None:
        """Put a robot among those like it: it may be given work while it is well and nobody else holds it."""
        health, lease, run = self._registry.health(robot.name), self._leases.of(robot.name, now_ns), robot.assignment
        held = lease is not None and (run is None or lease.number != run.wire.lease)
        available = health is not None and health.works and not held
        self._fleet.place(robot, self._registry.capabilities(robot.name), available)

    def _changed(self, change: Change, now_ns: int) -> None:
        """A robot came, left, or is better or worse."""
        robot, health, run = self._robot(change.robot), change.health, self._robot(change.robot).assignment
        if change.joined or health is None:
            # A new process, or other capabilities: what it had begun is over.
            if run is not None:
                self._end(run, change.reason, now_ns, rest=False)
            robot.wire = None
            self._tell.pop(robot.name, None)
        elif health in (RobotHealth.draining, RobotHealth.stopped) and run is not None:
            self._end(run, f"{health}: {change.reason}", now_ns, rest=health is RobotHealth.draining)
        if change.joined:
            lease = self._leases.of(robot.name, now_ns)
            if lease is not None and lease.holder in self._jobs:
                # From before a restart: the job goes on from what is known to be done of it.
                self._leases.release(robot.name, lease.number, now_ns)
            # It may still be on a job of an earlier time, which nobody counts any more.
            self._rest(robot, "no job for it now")
        self._place(robot, now_ns)

    def _lease_ended(self, lease: Lease, now_ns: int) -> None:
        robot = self._robots.get(lease.robot)
        if robot is None:
            return
        if robot.assignment is not None and robot.assignment.wire.lease == lease.number:
            self._end(robot.assignment, "its lease has ended", now_ns, rest=False)
        self._place(robot, now_ns)

    def _state(self, job: JobRecord) -> JobState:
        return job.state(self._why_it_waits(job) if job.phase is JobPhase.waiting else "")

    def _why_it_waits(self, job: JobRecord) -> str:
        """A sentence for people."""
        here = [(robot, robot.group) for robot in self._robots.values() if robot.group is not None]
        fit = [robot for robot, group in here if group in job.job_class.groups]
        if not fit:
            need = job.request.requirement
            reasons = (missing_requirements(need, robot.name, group.capabilities) for robot, group in here)
            return next(reasons, "there is no robot yet") or "tasks: no robot that fits can do any of them"
        if not any(robot.available for robot in fit):
            return "no robot that fits is well and free of people"
        return "all robots that fit work on jobs that come first"
