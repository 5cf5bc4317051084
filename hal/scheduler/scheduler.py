"""Which robot works on which job. Pure: the time is passed in, nothing is drawn, same calls give same decisions.

An assignment of a robot to a job is a lease that the robot's reports renew. Work comes in units; what a robot did not
do of its unit, because it failed, was taken or was needed elsewhere, goes back to the job and on to the next robot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

import msgspec

from hal.resource.capabilities import missing_requirements
from hal.resource.health import HealthConfig, HealthWatch, RobotHealth
from hal.resource.lease import ESTOP, Leases
from hal.scheduler.episodes import TaskBalancer
from hal.scheduler.matching import Matcher
from hal.scheduler.records import REST, Assignment, Decision, JobRecord, RobotRecord, SchedulerConfig, job_of
from wire.errors import RejectedError, suggest
from wire.messages.fleet import Capabilities, JobPhase, JobRequest, JobState, RobotState
from wire.messages.gateway import EdgeStatus, Job
from wire.types import EpisodeSource, Lease

_LOOK_NS = 200_000_000
"""silence is looked for so often; reports are judged as they come"""


class Scheduler:
    """Times are of one clock that does not go back. Every robot, job and lease goes through here."""

    def __init__(
        self,
        leases: Leases,
        robots: Sequence[str] = (),
        counts: Mapping[str, tuple[int, int]] | None = None,
        config: SchedulerConfig | None = None,
        health: HealthConfig | None = None,
        on_health: Callable[[str, str], None] = lambda robot, text: None,
    ) -> None:
        """`robots` named here keep their training seeds whatever the order they come in; others get the next free ones.
        `counts`: (episodes, successes) of what was practised before, by task. `on_health(robot, text)`: a robot is
        better or worse."""
        self._leases = leases
        self._config = config or SchedulerConfig()
        self._health = health or HealthConfig()
        self._on_health = on_health
        self._look_ns = 0  # when silence is looked for next
        self.balancer = TaskBalancer(counts)
        self._matcher = Matcher(leases, self.balancer, self._config)
        self._jobs, self._robots = self._matcher.jobs, self._matcher.robots
        self._numbers = count()  # of jobs
        self._indices = {name: index for index, name in enumerate(robots)}  # of seed partitions

    # --- jobs -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: JobRequest,
        now_ns: int,
        done: Iterable[tuple[str, int, bool | None]] = (),
        counted: tuple[int, int] = (0, 0),
    ) -> JobState:
        """Take a job. One of this id that is known already stays as it is; its state is returned.

        After a restart: `done` are (task, seed, success, None if unjudged) of its finished episodes; for a job without
        an end `counted` are (episodes, successes) of all that were judged.
        """
        if request.id not in self._jobs:
            job = JobRecord(request, next(self._numbers), now_ns)
            job.episodes, job.successes = counted
            self._matcher.add(job)
            for task, seed, success in done:
                if job.alive and job.work.claim(task, seed):
                    self._count(job, success, now_ns)
        return self._state(self._jobs[request.id])

    def cancel(self, id: str, now_ns: int) -> JobState:
        """End a job; its robots go on to others after their running episode. Raises `RejectedError` if unknown."""
        job = self._jobs.get(id)
        if job is None:
            raise RejectedError(f"there is no job '{id}'.{suggest(id, self._jobs)} `jobs` lists them.")
        if job.alive:
            self._matcher.finish(job, JobPhase.cancelled, now_ns)
        return self._state(job)

    def states(self) -> tuple[JobState, ...]:
        """All jobs that wait or run, and the newest of those that ended, in the order they were submitted."""
        return tuple(map(self._state, self._jobs.values()))

    def job(self, id: str) -> JobState | None:
        """The state of one job."""
        return self._state(self._jobs[id]) if id in self._jobs else None

    def is_job(self, holder: str) -> bool:
        """Whether the holder of a lease is a job."""
        return holder in self._jobs

    # --- robots ---------------------------------------------------------------------------------------------------

    def join(
        self, name: str, capabilities: Capabilities, now_ns: int, identity: str = "", seeds_spent: int = 0
    ) -> bool:
        """A robot is there; saying it again changes nothing. `seeds_spent`: training episodes it ever began.

        `identity` tells its processes apart: a new one knows nothing of what the old one was told. Returns whether one
        took the place of another.
        """
        known, watch = name in self._robots, HealthWatch(now_ns, self._health)
        if not known:
            index, group = self._indices.setdefault(name, len(self._indices)), self._matcher.group(name, capabilities)
            self._robots[name] = RobotRecord(name, index, capabilities, identity, watch, group)
        robot = self._robots[name]
        robot.seeds_spent = max(robot.seeds_spent, seeds_spent)
        anew = robot.identity != identity
        if anew:
            robot.watch, robot.job = watch, ""
        elif known and robot.capabilities == capabilities:
            return False
        robot.capabilities, robot.identity = capabilities, identity
        if robot.assignment is not None:
            what = "its control process is a new one" if anew else "other capabilities"
            self._matcher.end(robot.assignment, what, now_ns, rest=False)
        # It may still be on a job of an earlier time, which nobody counts any more.
        self._matcher.notify(robot, Job(REST, (), 0), "no job for it now")
        self._update_availability(robot, now_ns)
        return anew

    def report(self, status: EdgeStatus, now_ns: int) -> None:
        """A robot says how it is, which job it works on and how many episodes of it it has finished.

        Renews its lease if it works on what it was told, or has not had the time to take it up. One that has not joined
        is not heard.
        """
        if (robot := self._robots.get(status.robot)) is None:
            return
        robot.job = status.job
        if robot.watch.report(status, now_ns):
            self._health_changed(robot, now_ns)
        if (run := robot.assignment) is None:
            return
        if status.job == run.wire.id:
            run.taken_up = True
            if run.finished_ns is None and status.job_episodes >= run.wire.episodes:
                run.finished_ns = now_ns
        elif run.taken_up or now_ns - run.since_ns > self._config.take_up_s * 1e9:
            return
        if self._leases.of(robot.name, now_ns) is not None:
            self._leases.renew(robot.name, run.wire.lease, now_ns)
        if run.finished_ns is not None:
            late = now_ns - run.finished_ns > self._config.settle_s * 1e9
            if late or run.stored >= run.wire.episodes:
                self._matcher.end(run, "some of its episodes were not stored", now_ns)

    def robots(self, now_ns: int) -> tuple[RobotState, ...]:
        """Every robot that has joined as it is now, by name."""
        return tuple(
            RobotState(
                name=name,
                capabilities=robot.capabilities,
                health=robot.watch.health,
                reason=robot.watch.reason,
                load=round(robot.watch.load(now_ns), 3),
                lease=self._leases.of(name, now_ns),
                job=job_of(robot.job),
            )
            for name, robot in sorted(self._robots.items())
        )

    def episode_done(
        self,
        name: str,
        task: str,
        success: bool | None,
        now_ns: int,
        seed: int,
        source: str = EpisodeSource.online,
        *,
        unjudged: bool = False,
    ) -> str:
        """An episode of the robot is stored; returns the id of the job it counts for, '' for none.

        `success` None: it was aborted or discarded, which uses a seed and counts for nothing; if it is `unjudged`, it
        counts as practised. `source` is an `EpisodeSource`; demonstrations count for nothing.
        """
        if source == EpisodeSource.demonstration:
            return ""
        robot, examined = self._robots.get(name), source == EpisodeSource.evaluation
        if not examined and robot is not None:
            robot.seeds_spent += 1
        if not examined and success is not None:
            self.balancer.add(task, success)
        if robot is None or (success is None and (examined or not unjudged)):
            return ""
        current, runs = robot.assignment, [robot.assignment, robot.before]
        if current is not None and current.task and not current.taken_up:
            runs.reverse()
        for run in runs:
            if run is None or run.job.examines != examined:
                continue
            if not run.owns(task, seed):
                # After an aborted episode an evaluation runs past the seeds of its unit; those left go out again.
                run.stored += examined and task == run.task and seed >= run.seeds.stop
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
        robot = self._robots.get(name)
        if robot is None and purpose != ESTOP:
            raise RejectedError(f"there is no robot '{name}'.{suggest(name, self._robots)} `robots` lists them.")
        lease, preempted = self._leases.acquire(name, holder, purpose, priority, ttl_ns, now_ns)
        if robot is None:
            # One that is not back since the gateway was started again comes back stopped.
            return lease, preempted
        if robot.assignment is not None:
            self._matcher.end(robot.assignment, f"held by {holder}", now_ns, rest=False)
        if rest:
            self._matcher.notify(robot, Job(REST, (), 0), f"held by {holder}")
        self._update_availability(robot, now_ns)
        return lease, preempted

    def release(self, name: str, number: int, now_ns: int) -> Lease:
        """The robot is free again; `number` 0: whoever holds it. Raises `RejectedError` when that lease has ended."""
        lease = self._leases.release(name, number, now_ns)
        self._lease_ended(lease, now_ns)
        return lease

    def step(self, now_ns: int) -> list[Decision]:
        """What robots are to be told now, at most one thing each."""
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            for robot in self._robots.values():
                if robot.watch.check_silence(now_ns):
                    self._health_changed(robot, now_ns)
        for lease in self._leases.expire(now_ns):
            self._lease_ended(lease, now_ns)
        return self._matcher.step(now_ns)

    # --- what follows ---------------------------------------------------------------------------------------------

    def _advance(self, run: Assignment, seed: int, success: bool | None, now_ns: int) -> None:
        """An episode counts for what its robot works on."""
        run.stored += 1
        run.taken_up = True
        run.done.append(seed)
        self._count(run.job, success, now_ns)
        if not run.job.alive:
            return
        if len(run.done) >= len(run.seeds):
            self._matcher.end(run, "its part is done", now_ns)
        elif run.stored % len(run.wire.tasks) == 0 and not run.task:
            # It went through its tasks once: what they need has changed.
            tasks = self.balancer.cycle(run.job.groups[run.robot.group], run.robot.index)
            if tasks != run.wire.tasks:
                run.wire = msgspec.structs.replace(run.wire, tasks=tasks)
                self._matcher.notify(run.robot, run.wire, "the tasks need other shares")

    def _count(self, job: JobRecord, success: bool | None, now_ns: int) -> None:
        if job.count(success):
            self._matcher.finish(job, JobPhase.done, now_ns)

    def _health_changed(self, robot: RobotRecord, now_ns: int) -> None:
        health, reason = robot.watch.health, robot.watch.reason
        if health in (RobotHealth.draining, RobotHealth.stopped) and robot.assignment is not None:
            self._matcher.end(robot.assignment, f"{health}: {reason}", now_ns, rest=health is RobotHealth.draining)
        self._update_availability(robot, now_ns)
        if reason:
            self._on_health(robot.name, f"{health}: {reason}")

    def _lease_ended(self, lease: Lease, now_ns: int) -> None:
        if (robot := self._robots.get(lease.robot)) is None:
            return
        if robot.assignment is not None and robot.assignment.wire.lease == lease.number:
            self._matcher.end(robot.assignment, "its lease has ended", now_ns, rest=False)
        self._update_availability(robot, now_ns)

    def _update_availability(self, robot: RobotRecord, now_ns: int) -> None:
        """It may be given work while it is well and nobody but a job holds it."""
        lease, run = self._leases.of(robot.name, now_ns), robot.assignment
        held = lease is not None and (run is None or lease.number != run.wire.lease)
        self._matcher.regroup(robot, robot.watch.health.works and not held)

    def _state(self, job: JobRecord) -> JobState:
        note = self._why_it_waits(job) if job.phase is JobPhase.waiting else ""
        robots, counts = tuple(sorted(job.assignments)), (job.episodes, job.successes, job.unjudged)
        return JobState(job.request, job.phase, robots, *counts, note)

    def _why_it_waits(self, job: JobRecord) -> str:
        """A sentence for people."""
        fit = [robot for robot in self._robots.values() if robot.group in job.groups]
        if not fit:
            need, here = job.request.requirement, self._robots.values()
            reasons = (missing_requirements(need, robot.name, robot.capabilities) for robot in here)
            return next(reasons, "there is no robot yet") or "tasks: no robot that fits can do any of them"
        if not any(robot.available for robot in fit):
            return "no robot that fits is well and free of people"
        return "all robots that fit work on jobs that come first"
