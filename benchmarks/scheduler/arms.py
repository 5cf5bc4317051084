"""Two simple ways to hand out work, as deciders of the simulator."""

from __future__ import annotations

from collections import deque

from benchmarks.scheduler.simulator import SECOND, SimulatedRobot
from benchmarks.scheduler.world import work_s
from hal.resource.capabilities import missing_requirements
from hal.resource.health import HealthConfig, HealthWatch
from hal.scheduler.episodes import TRAINING_SEEDS
from hal.scheduler.records import JobRecord, job_of
from wire.messages.fleet import Capabilities, JobPhase, JobRequest, Requirement
from wire.messages.gateway import EdgeStatus, Job


class _PlainArm:
    """What the two simple arms share: the same watch over robots' health, work handed out in the same parts."""

    def __init__(self, health: HealthConfig) -> None:
        self._health = health
        self._watches: dict[str, HealthWatch] = {}
        self._changed: dict[str, bool] = {}
        """robots whose health has changed, and whether they came anew"""
        self._look_ns = 0
        self.jobs: dict[str, JobRecord] = {}
        self.robots: dict[str, Capabilities] = {}
        self.busy: dict[str, tuple[JobRecord, tuple[str, range], list[int]]] = {}
        """what each robot works on: the job, (task, seeds) of its part, the seeds that are done"""
        self.well: set[str] = set()
        self.told: list[tuple[str, Job]] = []
        self._parts = 0

    def joined(self, robot: SimulatedRobot, process: int, now_ns: int) -> None:
        self.robots[robot.name] = robot.capabilities
        self._watches[robot.name] = HealthWatch(now_ns, self._health)
        self._changed[robot.name] = True

    def reported(self, status: EdgeStatus, now_ns: int) -> None:
        if self._watches[status.robot].report(status, now_ns):
            self._changed.setdefault(status.robot, False)

    def stored(self, robot: str, job: str, task: str, seed: int, success: bool, now_ns: int) -> str:
        if robot not in self.busy:
            return ""
        record, (_, seeds), done = self.busy[robot]
        if record.id != job_of(job) or not record.alive:
            return ""
        done.append(seed)
        if record.count(success):
            record.phase = JobPhase.done
        if len(done) == len(seeds):
            del self.busy[robot]
            self.part_done(robot, record)
        return record.id

    def watch(self, now_ns: int) -> None:
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + SECOND // 5
            for robot, watch in self._watches.items():
                if watch.check_silence(now_ns):
                    self._changed.setdefault(robot, False)
        for robot, joined in self._changed.items():
            well = self._watches[robot].health.works
            if robot in self.busy and (joined or not well):
                record, part, done = self.busy.pop(robot)
                record.work.put_back(*part, done)
                self.failed(robot, record)
            (self.well.add if well else self.well.discard)(robot)
        self._changed.clear()

    def give(self, robot: str, record: JobRecord) -> None:
        task, seeds = part = record.work.pop(record.request.tasks, record.request.robots, TRAINING_SEEDS)
        self._parts += 1
        record.phase, self.busy[robot] = JobPhase.running, (record, part, [])
        kind = record.request.kind
        self.told.append(
            (
                robot,
                Job(f"{record.id}/{self._parts}", (task or record.request.tasks[0],), seeds.start, kind, len(seeds)),
            )
        )

    def part_done(self, robot: str, record: JobRecord) -> None: ...

    def failed(self, robot: str, record: JobRecord) -> None: ...

    def fits(self, request: JobRequest, robot: str) -> bool:
        able = self.robots[robot]
        return not missing_requirements(request.requirement, robot, able) and bool(set(request.tasks) & set(able.tasks))


class FirstFit(_PlainArm):
    """The oldest job first; a job keeps its robots until nothing is left for them."""

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(health)
        self._open: dict[tuple[Requirement, tuple[str, ...]], list[JobRecord]] = {}
        self._has: dict[str, int] = {}
        self._fits: dict[str, dict[int, bool]] = {}
        """by robot and kind of job (the place in `_open`)"""
        self._idle: set[str] = set()
        """robots for which nothing was found; forgotten when a job comes that they fit"""

    def submit(self, request: JobRequest, now_ns: int) -> None:
        record = self.jobs[request.id] = JobRecord(request, len(self.jobs), now_ns)
        self._offer(record)

    def _offer(self, record: JobRecord) -> None:
        key = (record.request.requirement, record.request.tasks)
        jobs = self._open.setdefault(key, [])
        if record not in jobs:
            jobs.append(record)
            jobs.sort(key=lambda one: one.number)
        kind = list(self._open).index(key)
        self._idle -= {robot for robot in self._idle if self._fit(robot, kind, record.request)}

    def _fit(self, robot: str, kind: int, request: JobRequest) -> bool:
        known = self._fits.setdefault(robot, {})
        if kind not in known:
            known[kind] = self.fits(request, robot)
        return known[kind]

    def part_done(self, robot: str, record: JobRecord) -> None:
        if record.alive and record.work.open(record.request.tasks):
            self.give(robot, record)
        else:
            self._has[record.id] -= 1

    def failed(self, robot: str, record: JobRecord) -> None:
        self._has[record.id] -= 1
        self._offer(record)

    def step(self, now_ns: int) -> list[tuple[str, Job]]:
        self.watch(now_ns)
        for robot in sorted(self.well - self.busy.keys() - self._idle):
            found = []
            for kind, jobs in enumerate(self._open.values()):
                # The robots that had the oldest one may have done all of it.
                while jobs and not jobs[0].work.open(jobs[0].request.tasks):
                    del jobs[0]
                if jobs and self._fit(robot, kind, jobs[0].request):
                    found.append(jobs[0])
            if not found:
                self._idle.add(robot)
                continue
            record = min(found, key=lambda one: one.number)
            self._has[record.id] = self._has.get(record.id, 0) + 1
            self.give(robot, record)
            if self._has[record.id] >= record.request.robots or not record.work.open(record.request.tasks):
                self._open[record.request.requirement, record.request.tasks].remove(record)
        told, self.told = self.told, []
        return told


class StaticRanks(_PlainArm):
    """Robots are chosen when the job comes, those with the least work placed on them; it runs when all of them are
    free, and stops with the first that fails."""

    def __init__(self, health: HealthConfig) -> None:
        super().__init__(health)
        self._work_s: dict[str, float] = {}
        self._lines: dict[str, deque[JobRecord]] = {}
        self._placed: dict[str, tuple[str, ...]] = {}
        self._look: dict[str, None] = {}
        self._unplaced: list[JobRecord] = []

    def submit(self, request: JobRequest, now_ns: int) -> None:
        record = self.jobs[request.id] = JobRecord(request, len(self.jobs), now_ns)
        self._unplaced.append(record)

    def _place(self, record: JobRecord) -> None:
        request = record.request
        fit = [robot for robot in self.robots if self.fits(request, robot)]
        chosen = sorted(fit, key=lambda robot: (self._work_s.get(robot, 0.0), robot))[: request.robots]
        for robot in chosen:
            self._work_s[robot] = self._work_s.get(robot, 0.0) + work_s(request) / len(chosen)
        self._placed[record.id] = tuple(sorted(chosen))
        for robot in chosen:
            self._lines.setdefault(robot, deque()).append(record)
            self._look[robot] = None

    def part_done(self, robot: str, record: JobRecord) -> None:
        if record.alive and record.work.open(record.request.tasks):
            self.give(robot, record)
        elif not record.alive:
            for one in self._placed[record.id]:
                self._lines[one].remove(record)
                self._look[one] = None

    def failed(self, robot: str, record: JobRecord) -> None:
        for one in self._placed[record.id]:
            self._look[one] = None
            if one in self.busy and self.busy[one][0] is record:
                _, part, done = self.busy.pop(one)
                record.work.put_back(*part, done)
                self.told.append((one, Job("rest", (), 0)))

    def step(self, now_ns: int) -> list[tuple[str, Job]]:
        before = set(self.well)
        self.watch(now_ns)
        self._look.update(dict.fromkeys(sorted(self.well - before)))
        unplaced, self._unplaced = self._unplaced, []
        for record in unplaced:
            self._place(record)
        for robot in list(self._look):
            line = self._lines.get(robot)
            if not line or robot in self.busy:
                continue
            record = line[0]
            mine = self._placed[record.id]
            if all(one in self.well and one not in self.busy and self._lines[one][0] is record for one in mine):
                for one in mine:
                    if record.work.open(record.request.tasks):
                        self.give(one, record)
        self._look.clear()
        told, self.told = self.told, []
        return told
