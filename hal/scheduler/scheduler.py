"""Which robot works on which job. Pure: the time is passed in, nothing is drawn, same calls give same decisions.

An assignment of a robot to a job is a lease that the robot's reports renew. Work comes in slices; what a robot did not
do of its slice, because it failed, was taken or was needed elsewhere, goes back to the job and on to the next robot.
`join`, `heartbeat` and `episode_done` say what happened, `turn` what each robot is to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from hal.resource.health import RobotHealth
from hal.resource.lease import Leases
from hal.resource.roster import Change, RobotRegistry
from hal.scheduler.attribution import belongs, likely, why_it_waits
from hal.scheduler.decision import REST, Decision, SchedulerConfig, wire_job
from hal.scheduler.dispatch import Dispatch
from hal.scheduler.groups import SchedulableRobot
from hal.scheduler.jobs import Assignment, Done, JobRecord, WorkUnit, check_request
from hal.scheduler.tasks import TaskBalancer, TaskCount
from wire.errors import RejectedError, suggest
from wire.messages.all import Job
from wire.messages.fleet import Capabilities, JobRequest, JobState
from wire.types import Lease


class Scheduler:
    """Times are of one clock that does not go back. Every robot, job and lease goes through here."""

    def __init__(
        self,
        roster: RobotRegistry,
        leases: Leases,
        robots: Sequence[str] = (),
        counts: Mapping[str, TaskCount] | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        """`robots` named here keep their training lanes whatever the order they come in; others get the next free one.
        `counts`: what was practised before, by task."""
        self._roster = roster
        self._leases = leases
        self._config = config or SchedulerConfig()
        self._robots: dict[str, SchedulableRobot] = {}
        for name in dict.fromkeys(robots):
            self._robots[name] = SchedulableRobot(name, len(self._robots))
        self._jobs: dict[str, JobRecord] = {}
        self._ended: list[str] = []
        self._submitted = 0
        self._tell: dict[str, Decision] = {}
        self._check: dict[str, Assignment] = {}
        """finished by the robot, not all stored"""
        self._came: dict[str, SchedulableRobot] = {}
        """joined since the last turn"""
        self._looked_ns: int | None = None
        self._dispatch = Dispatch(
            self._config.aging_s, self._config.scarce_s, self._config.most_a_turn, self._begin, self._end
        )
        self.spread = TaskBalancer(counts)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, now_ns: int, done: Iterable[Done] = ()) -> JobState:
        """Take a job. One of this id that is known already stays as it is; its state is returned.

        `done`: finished episodes of it, when it is submitted again after a restart. Raises `ConfigError` that names the
        field for a job that cannot work.
        """
        known = self._jobs.get(request.id)
        if known is not None:
            return self._state(known)
        check_request(request)
        job = JobRecord(request, self._submitted, now_ns)
        self._submitted += 1
        self._jobs[request.id] = job
        for episode in done:
            if job.alive and job.work.claim(episode.task, episode.seed) and job.count(episode.success):
                self._finish(job, "done", now_ns)
        if job.alive:
            self._dispatch.enter(job)
        return self._state(job)

    def cancel(self, id: str, now_ns: int) -> JobState:
        """End a job; its robots go on to others after their running episode. Raises `RejectedError` if unknown."""
        job = self._jobs.get(id)
        if job is None:
            raise RejectedError(f"there is no job '{id}'.{suggest(id, self._jobs)} `jobs` lists them.")
        if job.alive:
            self._finish(job, "cancelled", now_ns)
        return self._state(job)

    def states(self) -> tuple[JobState, ...]:
        """All jobs that wait or run, and the newest of those that ended, in the order they were submitted."""
        return tuple(self._state(job) for job in sorted(self._jobs.values(), key=lambda job: job.number))

    def job(self, id: str) -> JobState | None:
        """The state of one job."""
        job = self._jobs.get(id)
        return self._state(job) if job is not None else None

    def assigned(self) -> Iterator[tuple[str, str]]:
        """(job, robot) for every robot that works on a job."""
        for robot in self._robots.values():
            if robot.assignment is not None:
                yield robot.assignment.job.id, robot.name

    # --- robots ---------------------------------------------------------------------------------------------------

    def join(
        self, name: str, capabilities: Capabilities, now_ns: int, identity: str = "", seeds_spent: int = 0
    ) -> None:
        """A robot is there; `RobotRegistry.join` says the rest. `seeds_spent`: training episodes it ever began."""
        self._roster.join(name, capabilities, now_ns, identity)
        robot = self._robot(name)
        robot.spent = max(robot.spent, seeds_spent)

    def heartbeat(self, name: str, job: str, episodes: int, now_ns: int) -> None:
        """The robot lives: `job` is the id of the job it says it works on, `episodes` how many it has finished of it.

        Renews its lease if it works on what it was told, or has not had the time to take it up.
        """
        robot = self._robots.get(name)
        assignment = robot.assignment if robot is not None else None
        if assignment is None:
            return
        if job == assignment.wire.id:
            assignment.taken_up = True
            if assignment.finished_ns is None and 0 < assignment.wire.episodes <= episodes:
                assignment.finished_ns = now_ns
                self._check[name] = assignment
        elif assignment.taken_up or now_ns - assignment.since_ns > self._config.take_up_s * 1e9:
            return
        lease = self._leases.of(name, now_ns)
        if lease is not None and lease.number == assignment.wire.lease:
            self._leases.renew(name, lease.number, now_ns)

    def episode_done(
        self,
        name: str,
        task: str,
        success: bool | None,
        now_ns: int,
        seed: int = -1,
        source: str = "online",
        job: str = "",
    ) -> str:
        """An episode of the robot is stored; returns the id of the job it counts for, '' for none.

        `success` None: it was aborted, which uses a seed and counts for nothing. `seed` -1: not known. `source` as in
        `Episode.source`; demonstrations count for nothing. `job`: the one it is known to be of, as the robot was told
        it or by its own id; '': not known.
        """
        examined = source == "evaluation"
        if source == "demonstration":
            return ""
        robot = self._robot(name)
        if not examined:
            robot.spent += 1
            if success is not None:
                self.spread.add(task, success)
        if success is None:
            return ""
        for assignment in likely(robot):
            if assignment is None or (assignment.job.request.kind == "evaluation") != examined:
                continue
            if job and job not in (assignment.wire.id, assignment.job.id):
                continue
            if not belongs(assignment, task, seed):
                # After an aborted episode an evaluation runs past the seeds of its part; those left go out again.
                assignment.stored += examined and task == assignment.slice.task and seed >= assignment.slice.seeds.stop
                continue
            if assignment is robot.assignment:
                return self._count(assignment, seed, success, now_ns)
            # It ended after the robot had been given something else; perhaps nobody has taken that part up yet.
            late = assignment.job
            if late.alive and late.work.claim(task, seed):
                if late.count(success):
                    self._finish(late, "done", now_ns)
                return late.id
        return ""

    # --- people and other holders ---------------------------------------------------------------------------------

    def take(
        self, name: str, holder: str, purpose: str, priority: int, ttl_ns: int, now_ns: int, rest: bool = True
    ) -> tuple[Lease, Lease | None]:
        """Lease a robot to somebody who is not a job: the lease, and the one that ended for it.

        `rest`: it is told to rest, so that nothing moves but what the holder moves; an operator who only corrects the
        running job leaves it its job. Raises `RejectedError` for a robot that is not there or is held by as high a
        priority.
        """
        robot = self._robots.get(name)
        if robot is None or name not in self._roster:
            raise RejectedError(f"there is no robot '{name}'.{suggest(name, self._robots)} `robots` lists them.")
        lease, preempted = self._leases.acquire(name, holder, purpose, priority, ttl_ns, now_ns)
        self._stop(robot, f"held by {holder}", now_ns, rest)
        robot.taken = lease
        self._place(robot)
        return lease, preempted

    def renew(self, name: str, number: int, now_ns: int) -> Lease:
        """Raises `RejectedError` when the lease has ended."""
        lease = self._leases.renew(name, number, now_ns)
        robot = self._robot(name)
        if robot.taken is not None:
            robot.taken = lease
        return lease

    def give_back(self, name: str, number: int, now_ns: int) -> Lease:
        """The robot is free again; `number` 0: whoever holds it. Raises `RejectedError` when that lease has ended."""
        lease = self._leases.release(name, number, now_ns)
        self._lease_ended(lease, "given back", now_ns)
        return lease

    # --- deciding -------------------------------------------------------------------------------------------------

    def turn(self, now_ns: int, changes: Sequence[Change] | None = None) -> list[Decision]:
        """What robots are to be told now, at most one thing each. `changes`: what `RobotRegistry.turn` has just
        returned; None: it is asked here."""
        for change in self._roster.turn(now_ns) if changes is None else changes:
            self._changed(change, now_ns)
        for lease in self._leases.expire(now_ns):
            self._lease_ended(lease, "its lease ran out", now_ns)
        for name, assignment in list(self._check.items()):
            self._settle(name, assignment, now_ns)
        self._dispatch.fill(now_ns)
        if self._looked_ns is None or now_ns - self._looked_ns >= self._config.look_every_s * 1e9:
            self._looked_ns = now_ns
            self._dispatch.look(now_ns)
            self._dispatch.fill(now_ns, again=True)
        for name, robot in self._came.items():
            # It may still be on a job of an earlier time, which nobody counts any more.
            if robot.assignment is None and robot.wire is None and name in self._roster:
                robot.wire = Job(REST, (), 0)
                self._tell[name] = Decision(name, robot.wire, "no job for it now")
        self._came.clear()
        decisions, self._tell = list(self._tell.values()), {}
        return decisions

    # --- inside ---------------------------------------------------------------------------------------------------

    def _robot(self, name: str) -> SchedulableRobot:
        robot = self._robots.get(name)
        if robot is None:
            robot = self._robots[name] = SchedulableRobot(name, len(self._robots))
        return robot

    def _changed(self, change: Change, now_ns: int) -> None:
        """A robot came, left, or is better or worse."""
        robot = self._robot(change.robot)
        if change.joined and robot.assignment is not None:
            # A new process, or other capabilities: what it had begun is over.
            self._stop(robot, "it started anew", now_ns, rest=False)
        if change.health is None and robot.assignment is not None:
            self._stop(robot, change.reason or "it left", now_ns, rest=False)
        self._dispatch.kin(robot, self._roster.capabilities(change.robot))
        if change.joined or change.health is None:
            robot.wire = None
            self._tell.pop(robot.name, None)
        if change.joined:
            self._came[robot.name] = robot
            lease = self._leases.of(change.robot, now_ns)
            robot.taken = lease
            if lease is not None and lease.holder in self._jobs:
                # From before a restart: the job goes on from what is known to be done of it.
                self._leases.release(robot.name, lease.number, now_ns)
                robot.taken = None
        if change.health in (RobotHealth.draining, RobotHealth.stopped) and robot.assignment is not None:
            self._stop(robot, f"{change.health}: {change.reason}", now_ns, rest=change.health is RobotHealth.draining)
        self._place(robot)

    def _place(self, robot: SchedulableRobot) -> None:
        """Among those that wait for work, or not."""
        health = self._roster.health(robot.name)
        self._dispatch.place(robot, health is not None and health.works and robot.taken is None)

    def _begin(self, robot: SchedulableRobot, job: JobRecord, reason: str, now_ns: int) -> Assignment:
        """The robot works on the job from now on."""
        assert robot.group is not None
        tasks = robot.group.tasks_for(job.demand)
        slice_ = job.work.take(tasks, job.request.robots or job.demand.robots)
        wire = self._wire(robot, job, slice_, tasks, now_ns)
        assignment = Assignment(job, robot.name, self._exact(slice_, wire, job), wire, now_ns)
        if job.phase == "waiting":
            job.phase, job.started_ns = "running", job.started_ns or now_ns
        job.assignments[robot.name] = robot.assignment = assignment
        assignment.taken_up = robot.wire is not None and robot.wire.id == wire.id
        if not assignment.taken_up:
            robot.spent_before = robot.spent
        robot.wire = wire
        self._tell[robot.name] = Decision(robot.name, wire, reason)
        return assignment

    def _wire(
        self, robot: SchedulableRobot, job: JobRecord, slice_: WorkUnit, tasks: Sequence[str], now_ns: int
    ) -> Job:
        """The job as the robot is told it, under a new lease."""
        ttl_ns = round(self._config.ttl_s * 1e9)
        lease, _ = self._leases.acquire(robot.name, job.id, job.request.kind, job.priority, ttl_ns, now_ns)
        cycle = (slice_.task,) if slice_.task else self._cycle(robot, tasks)
        return wire_job(robot, job, slice_, cycle, lease.number)

    def _cycle(self, robot: SchedulableRobot, tasks: Sequence[str]) -> tuple[str, ...]:
        return self.spread.cycle(tasks, robot.index)

    def _exact(self, slice_: WorkUnit, wire: Job, job: JobRecord) -> WorkUnit:
        """A lane's end cuts a slice short; the rest goes back at once."""
        if slice_.episodes and wire.episodes < slice_.episodes:
            job.work.put_back(slice_, range(wire.episodes))
        return WorkUnit(wire.episodes, slice_.task, wire.first_seed)

    def _end(self, assignment: Assignment, reason: str, now_ns: int, rest: bool = True) -> None:
        """The robot does not work on its job any more; what it has not done goes back."""
        robot, job = self._robots[assignment.robot], assignment.job
        self._check.pop(robot.name, None)
        if not job.standing:
            job.work.put_back(assignment.slice, assignment.done)
        del job.assignments[robot.name]
        robot.assignment, robot.before = None, assignment
        if not job.assignments:
            job.waits_since_ns = now_ns
            job.phase = "waiting" if job.phase == "running" else job.phase
        lease = self._leases.of(robot.name)
        if lease is not None and lease.number == assignment.wire.lease and lease.expires_ns > now_ns:
            self._leases.release(robot.name, lease.number, now_ns)
        self._dispatch.ended(robot, assignment)
        if rest:
            # Replaced in the same turn if there is other work.
            robot_rest = Job(REST, (), 0)
            self._tell[robot.name] = Decision(robot.name, robot_rest, reason)
            robot.wire = robot_rest

    def _stop(self, robot: SchedulableRobot, reason: str, now_ns: int, rest: bool) -> None:
        if robot.assignment is not None:
            self._end(robot.assignment, reason, now_ns, rest)
        elif rest and robot.wire is not None and robot.wire.tasks:
            robot.wire = Job(REST, (), 0)
            self._tell[robot.name] = Decision(robot.name, robot.wire, reason)

    def _count(self, assignment: Assignment, seed: int, success: bool, now_ns: int) -> str:
        job = assignment.job
        assignment.stored += 1
        assignment.taken_up = True
        if job.request.kind == "evaluation" and seed < 0:
            seed = assignment.slice.first_seed + len(assignment.done)
        assignment.done.append(seed)
        if job.count(success):
            self._finish(job, "done", now_ns)
        elif len(assignment.done) >= assignment.slice.episodes:
            self._end(assignment, "its part is done", now_ns)
        elif assignment.stored >= assignment.spread_after and not assignment.slice.task:
            self._spread_anew(assignment)
        return job.id

    def _spread_anew(self, assignment: Assignment) -> None:
        """The robot went through its tasks once: what they need has changed."""
        robot = self._robots[assignment.robot]
        if robot.kin is None:
            return
        tasks = self._cycle(robot, robot.kin.tasks_for(assignment.job.demand))
        assignment.spread_after = assignment.stored + len(tasks)
        if tasks != assignment.wire.tasks:
            assignment.wire = robot.wire = msgspec.structs.replace(assignment.wire, tasks=tasks)
            self._tell[robot.name] = Decision(robot.name, assignment.wire, "the tasks need other shares")

    def _settle(self, name: str, assignment: Assignment, now_ns: int) -> None:
        """The robot says it has finished: wait for its last episodes to be stored, but not for ever."""
        assert assignment.finished_ns is not None
        if not assignment.live:
            self._check.pop(name, None)
        elif assignment.stored >= assignment.wire.episodes or (
            now_ns - assignment.finished_ns > self._config.settle_s * 1e9
        ):
            self._end(assignment, "some of its episodes were not stored", now_ns)

    def _finish(self, job: JobRecord, phase: str, now_ns: int) -> None:
        job.phase, job.ended_ns = phase, now_ns
        for assignment in list(job.assignments.values()):
            self._end(assignment, f"job '{job.id}' is {phase}", now_ns)
        self._dispatch.leave(job)
        self._ended.append(job.id)
        if len(self._ended) > self._config.kept:
            del self._jobs[self._ended.pop(0)]

    def _lease_ended(self, lease: Lease, reason: str, now_ns: int) -> None:
        robot = self._robots.get(lease.robot)
        if robot is None:
            return
        if robot.taken is not None and robot.taken.number == lease.number:
            robot.taken = None
        elif robot.assignment is not None and robot.assignment.wire.lease == lease.number:
            self._end(robot.assignment, reason, now_ns, rest=False)
        self._place(robot)

    def _state(self, job: JobRecord) -> JobState:
        return job.state(why_it_waits(job, self._robots.values()) if job.phase == "waiting" else "")
