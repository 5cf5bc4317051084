"""What is known of jobs, of the work that is left of them, and of robots: it is handed out in units, and taken back."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from hal.resource.health import HealthWatch
from hal.resource.lease import Priority
from hal.scheduler.episodes import PARTITION_EPISODES, held_out_seeds
from wire.messages.fleet import Capabilities, JobKind, JobPhase, JobRequest
from wire.messages.gateway import Job

REST = "rest"
"""id of the job that is none"""
MOST_EPISODES = 16
"""in a work unit of a job that ends; a robot that has done them is open to others again"""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How patient the scheduler is."""

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
    most_a_step: int = 200
    """assignments; the rest follows in the next step, so that no step is long"""
    kept: int = 1000
    """ended jobs whose state is still told"""


class Decision(msgspec.Struct, frozen=True):
    """What a robot is to be told now."""

    robot: str
    job: Job
    """without tasks: rest"""
    reason: str


class CountedWork:
    """So many episodes, whichever."""

    def __init__(self, episodes: int) -> None:
        """`episodes` 0: there is always more."""
        self._left = episodes or math.inf

    def open(self, tasks: Sequence[str]) -> bool:
        """Whether a robot that can do `tasks` can do some of what is left."""
        return self._left > 0

    def pop(self, tasks: Sequence[str], robots: int, seeds: range) -> tuple[str, range]:
        """(task, '' for all of them in proportion to their need; seeds, one an episode) for one of `robots` that share
        what is left. `seeds` are the robot's next ones for training. Only when it is open."""
        if self._left < math.inf:
            seeds = seeds[: _share(int(self._left), robots)]
        self._left -= len(seeds)
        return "", seeds

    def put_back(self, task: str, seeds: range, done: Collection[int]) -> None:
        """What was not done of a unit; `done` are the finished episodes' seeds."""
        self._left += len(seeds) - len(done)

    def claim(self, task: str, seed: int) -> bool:
        """An episode is done that no robot is meant to do now: whether it is one of those left. It is not any more."""
        claimed = self._left > 0
        self._left -= claimed
        return claimed


class ExaminedWork:
    """The same seeds of every task, each once. Its methods are those of `CountedWork`."""

    def __init__(self, tasks: Sequence[str], seeds: range) -> None:
        self._left = {task: [seeds] for task in tasks}

    def open(self, tasks: Sequence[str]) -> bool:
        return any(self._left[task] for task in tasks)

    def pop(self, tasks: Sequence[str], robots: int, seeds: range) -> tuple[str, range]:
        # The first of the tasks with most left: none is finished long before the others.
        size, task = max(((sum(map(len, self._left[task])), task) for task in tasks), key=lambda pair: pair[0])
        episodes, first = _share(size, robots), self._left[task].pop(0)
        if rest := first[episodes:]:
            self._left[task].insert(0, rest)
        return task, first[:episodes]

    def put_back(self, task: str, seeds: range, done: Collection[int]) -> None:
        left = self._left[task]
        for seed in sorted(set(seeds) - set(done)):
            if left and left[-1].stop == seed:
                left[-1] = range(left[-1].start, seed + 1)
            else:
                left.append(range(seed, seed + 1))
        left.sort(key=lambda part: part.start)

    def claim(self, task: str, seed: int) -> bool:
        left = self._left.get(task, [])
        for index, seeds in enumerate(left):
            if seed in seeds:
                at = seeds.index(seed)
                left[index : index + 1] = [part for part in (seeds[:at], seeds[at + 1 :]) if part]
                return True
        return False


def job_of(wire_id: str) -> str:
    """The id of the job that a robot was told as `wire_id`."""
    return wire_id.rpartition("/")[0] or wire_id


def _share(left: int, robots: int) -> int:
    """Half of an equal share (guided self-scheduling, Polychronopoulos and Kuck, 1987): all robots end together."""
    share = left if robots <= 1 else math.ceil(left / (2 * robots))
    return max(1, min(share, MOST_EPISODES))


class JobRecord:
    """A job and everything known about it."""

    def __init__(self, request: JobRequest, number: int, now_ns: int) -> None:
        self.request = request
        self.id = request.id
        self.number = number
        self.tasks = tuple(dict.fromkeys(request.tasks))
        self.priority = request.priority or int(Priority[request.kind])
        self.standing = request.episodes == 0  # has no end
        self.examines = request.kind == JobKind.evaluation
        self.target = request.episodes * (len(self.tasks) if self.examines else 1)  # done after so many; 0: never
        self.work: CountedWork | ExaminedWork = CountedWork(request.episodes)
        if self.examines:
            self.work = ExaminedWork(self.tasks, held_out_seeds(request.first_seed, request.episodes))
        self.phase = JobPhase.waiting
        self.episodes = self.successes = self.unjudged = 0
        self.submitted_ns = now_ns
        self.assignments: dict[str, Assignment] = {}  # by robot
        self.groups: dict[Group, tuple[str, ...]] = {}  # of robots that fit, with the tasks they can do
        self.ahead_ns = 0  # head start for its priority, and because few robots fit
        self.urgency_ns = 0  # when it began to wait, less its head start: all grow older alike

    @property
    def alive(self) -> bool:
        return self.phase in (JobPhase.waiting, JobPhase.running)

    @property
    def fitting(self) -> int:
        """How many robots may be given it now, at most."""
        return sum(len(group.free) + len(group.runs) for group in self.groups)

    def rank(self, now_ns: int) -> tuple[int, int, int]:
        """Order among those that want a robot, lowest first. A job without an end grows older only while it has none,
        and comes after its equals."""
        if not self.standing:
            return self.urgency_ns, 0, self.number
        return now_ns - self.ahead_ns if self.assignments else self.urgency_ns, 1 + len(self.assignments), self.number

    def wants(self, tasks: Sequence[str]) -> bool:
        """Whether it could use one more robot, one that can do `tasks` of it."""
        limit = self.request.robots
        return self.alive and not 0 < limit <= len(self.assignments) and self.work.open(tasks)

    def count(self, success: bool | None) -> bool:
        """One more episode is finished, None: and unjudged; whether the job is."""
        self.episodes += 1
        self.successes += bool(success)
        self.unjudged += success is None
        return 0 < self.target <= self.episodes


@dataclass(slots=True, eq=False)
class Assignment:
    """A robot that works on a unit of a job, and holds a lease for it."""

    job: JobRecord
    robot: RobotRecord
    task: str  # '': all of the job's, in proportion to their need
    seeds: range
    wire: Job  # as the robot was told it
    since_ns: int
    kept_until_ns: int  # not taken for another job before
    taken_up: bool  # the robot has said that it works on it
    urgency_ns: int  # the job's when it was given the unit, which keeps that rank
    done: list[int] = field(default_factory=list)  # seeds of the finished episodes that count
    stored: int = 0  # finished episodes that came, counted or not
    finished_ns: int | None = None  # when the robot said that it has done all of it

    def owns(self, task: str, seed: int) -> bool:
        """Whether an episode is one of it that is not done yet."""
        if task not in ((self.task,) if self.task else self.job.tasks):
            return False
        # In training an aborted episode makes a unit run on to later seeds of the partition.
        seeds = self.seeds if self.task else range(self.seeds.start, self.seeds.start + PARTITION_EPISODES)
        return seed in seeds and seed not in self.done

    def rank(self, now_ns: int) -> tuple[int, int, int]:
        """Order in which robots go over to other jobs, lowest first: the least urgent of the lowest priority."""
        job = self.job
        return job.priority, job.ahead_ns - now_ns if job.standing else -self.urgency_ns, -len(job.assignments)

    def yields_to(self, job: JobRecord, now_ns: int, aging_ns: int) -> bool:
        """Whether the robot is to go over to a job that waits."""
        mine = self.job
        if not mine.standing:
            # Who has waited for it does not lose it to who has waited less.
            return mine.priority < job.priority and job.rank(now_ns)[0] < self.urgency_ns
        if mine is job or now_ns < self.kept_until_ns:
            return False
        equals = job.standing and mine.priority == job.priority
        if equals and len(mine.assignments) > len(job.assignments) + 1:
            return True  # they share robots evenly
        head_start_ns = aging_ns if mine.priority >= job.priority else 0
        return job.rank(now_ns)[0] < now_ns - mine.ahead_ns - head_start_ns


@dataclass(slots=True, eq=False)
class RobotRecord:
    """A robot that has joined, here or not."""

    name: str
    index: int  # of its seed partition
    capabilities: Capabilities
    identity: str  # of its process
    watch: HealthWatch
    group: Group
    seeds_spent: int = 0  # training seeds it has used
    job: str = ""  # what it says that it works on
    available: bool = False  # may be given work
    assignment: Assignment | None = None
    before: Assignment | None = None  # what it did before; episodes of it may still come
    wire: Job | None = None  # the last job it was told


class Group:
    """Robots with equal capabilities that may be given work; one that jobs ask for by `name` is alone."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.name = name
        self.capabilities = capabilities
        self.free: dict[str, RobotRecord] = {}  # the longest idle first
        self.runs: dict[str, Assignment] = {}  # by robot, the newest last

    def update(self, robot: RobotRecord) -> None:
        """A robot of the group came, went, or has begun or ended some work."""
        self.free.pop(robot.name, None)
        self.runs.pop(robot.name, None)
        if robot.available and robot.assignment is None:
            self.free[robot.name] = robot
        elif robot.available and robot.assignment is not None:
            self.runs[robot.name] = robot.assignment
