"""Jobs, and the work that is left of them: handed out in units, taken back when a robot fails."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from hal.resource.lease import Priority
from hal.scheduler.seeds import HELD_OUT_SEEDS, PARTITION_EPISODES, held_out_seeds
from wire.errors import ConfigError, suggest
from wire.messages.all import Job
from wire.messages.fleet import JobRequest, JobState

if TYPE_CHECKING:
    from hal.scheduler.groups import JobClass, SchedulableRobot

KINDS = ("rollout", "evaluation", "teleoperation")
MOST_EPISODES = 16
"""in a work unit of a job that ends; a robot that has done them is open to others again"""


class JobPhase(StrEnum):
    """Where a job is in its life."""

    waiting = "waiting"
    running = "running"
    done = "done"
    cancelled = "cancelled"


class Done(msgspec.Struct, frozen=True):
    """A finished episode of a job."""

    task: str
    seed: int
    success: bool


class WorkUnit(msgspec.Struct, frozen=True):
    """What one robot is to do of a job."""

    task: str
    """'': the job's tasks in proportion to their need"""
    seeds: range
    """one an episode"""


class CountedWork:
    """So many episodes, whichever."""

    def __init__(self, episodes: int) -> None:
        """`episodes` 0: there is always more."""
        self._left = episodes or math.inf

    def open(self, tasks: Sequence[str]) -> bool:
        """Whether a robot that can do `tasks` can do some of what is left."""
        return self._left > 0

    def pop(self, tasks: Sequence[str], robots: int, seeds: range) -> WorkUnit:
        """Some of what is left, for one of `robots` that share it; `seeds` are the robot's next ones for training. Only
        when it is open."""
        if self._left < math.inf:
            seeds = seeds[: _share(int(self._left), robots)]
        self._left -= len(seeds)
        return WorkUnit("", seeds)

    def put_back(self, unit: WorkUnit, done: Collection[int]) -> None:
        """What was not done of a unit; `done` are the finished episodes' seeds."""
        self._left += len(unit.seeds) - len(done)

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

    def pop(self, tasks: Sequence[str], robots: int, seeds: range) -> WorkUnit:
        # The first of the tasks with most left: none is finished long before the others.
        size, task = max(((sum(map(len, self._left[task])), task) for task in tasks), key=lambda pair: pair[0])
        episodes, first = _share(size, robots), self._left[task].pop(0)
        if rest := first[episodes:]:
            self._left[task].insert(0, rest)
        return WorkUnit(task, first[:episodes])

    def put_back(self, unit: WorkUnit, done: Collection[int]) -> None:
        left = self._left[unit.task]
        for seed in sorted(set(unit.seeds) - set(done)):
            if left and left[-1].stop == seed:
                left[-1] = range(left[-1].start, seed + 1)
            else:
                left.append(range(seed, seed + 1))
        left.sort(key=lambda seeds: seeds.start)

    def claim(self, task: str, seed: int) -> bool:
        left = self._left.get(task, [])
        for index, seeds in enumerate(left):
            if seed in seeds:
                at = seeds.index(seed)
                left[index : index + 1] = [part for part in (seeds[:at], seeds[at + 1 :]) if part]
                return True
        return False


def _share(left: int, robots: int) -> int:
    """Half of an equal share (guided self-scheduling, Polychronopoulos and Kuck, 1987): all robots end together."""
    share = left if robots <= 1 else math.ceil(left / (2 * robots))
    return max(1, min(share, MOST_EPISODES))


class JobRecord:
    """A job and everything known about it."""

    def __init__(self, request: JobRequest, number: int, now_ns: int) -> None:
        self.request = request
        self.number = number
        self.id = request.id
        self.priority = request.priority or int(Priority[request.kind])
        self.standing = request.episodes == 0  # has no end
        self.examines = request.kind == "evaluation"
        self.target = request.episodes  # episodes after which it is done; 0: it goes on
        self.work: CountedWork | ExaminedWork = CountedWork(request.episodes)
        if self.examines:
            tasks = tuple(dict.fromkeys(request.tasks))
            self.target *= len(tasks)
            self.work = ExaminedWork(tasks, held_out_seeds(request.first_seed, request.episodes))
        self.phase = JobPhase.waiting
        self.episodes = self.successes = 0
        self.submitted_ns = self.waits_since_ns = now_ns  # waits since: when it last had no robot
        self.started_ns = self.ended_ns = 0
        self.assignments: dict[str, Assignment] = {}  # by robot
        self.job_class: JobClass
        self.ahead_ns = 0
        """head start for its priority, and because few robots fit"""
        self.urgency_ns = 0
        """when it was last given a unit, less its head start: whoever waits grows older alike"""

    @property
    def alive(self) -> bool:
        return self.phase in (JobPhase.waiting, JobPhase.running)

    def rank(self, now_ns: int) -> tuple[int, int, int]:
        """Order among those that want a robot, lowest first. A job without an end grows older only while it has none,
        and comes after its equals."""
        if not self.standing:
            return self.urgency_ns, 0, self.number
        since_ns = now_ns if self.assignments else self.waits_since_ns
        return since_ns - self.ahead_ns, 1 + len(self.assignments), self.number

    def wants(self, tasks: Sequence[str]) -> bool:
        """Whether it could use one more robot, one that can do `tasks` of it."""
        limit = self.request.robots
        return self.alive and not 0 < limit <= len(self.assignments) and self.work.open(tasks)

    def count(self, success: bool) -> bool:
        """One more episode is finished; whether the job is."""
        self.episodes += 1
        self.successes += success
        return 0 < self.target <= self.episodes

    def state(self, note: str) -> JobState:
        return JobState(
            request=self.request,
            phase=self.phase,
            robots=tuple(sorted(self.assignments)),
            episodes=self.episodes,
            successes=self.successes,
            note=note,
            submitted_ns=self.submitted_ns,
            started_ns=self.started_ns,
            ended_ns=self.ended_ns,
        )


@dataclass(slots=True, eq=False)
class Assignment:
    """A robot that works on a unit of a job, and holds a lease for it."""

    job: JobRecord
    robot: SchedulableRobot
    unit: WorkUnit
    wire: Job
    """the job as the robot was told it"""
    since_ns: int
    urgency_ns: int
    """the job's when it was given the unit, which keeps that rank"""
    taken_up: bool
    """the robot has said that it works on it"""
    kept_until_ns: int
    """not taken for another job before"""
    done: list[int] = field(default_factory=list)
    """seeds of the finished episodes that count"""
    stored: int = 0
    """finished episodes that came, counted or not"""
    finished_ns: int | None = None
    """when the robot said that it has done all of it"""
    cycle_ends: int = 0
    """finished episodes after which the tasks are balanced anew"""

    def owns(self, task: str, seed: int) -> bool:
        """Whether an episode is one of it that is not done yet. `seed` -1: not known."""
        if task not in ((self.unit.task,) if self.unit.task else self.job.request.tasks):
            return False
        if seed < 0:
            return self.taken_up
        # In training an aborted episode makes a unit run on to later seeds of the partition.
        first = self.unit.seeds.start
        seeds = self.unit.seeds if self.unit.task else range(first, first + PARTITION_EPISODES)
        return seed in seeds and seed not in self.done

    def yields_to(self, job: JobRecord, now_ns: int, aging_ns: int) -> bool:
        """Whether the robot is to go over to a job that waits."""
        mine, urgency_ns = self.job, job.rank(now_ns)[0]
        if mine is job or now_ns < self.kept_until_ns:
            return False
        if mine.priority < job.priority:
            # Who has waited for it does not lose it to who has waited less.
            return urgency_ns < (now_ns - mine.ahead_ns if mine.standing else self.urgency_ns)
        if not mine.standing:
            return False
        if job.standing and job.priority == mine.priority and len(mine.assignments) > len(job.assignments) + 1:
            return True  # jobs without an end share robots evenly with their equals
        waits = not (job.standing and job.assignments)
        return waits and now_ns - urgency_ns >= (mine.priority + 1) * aging_ns

    def strength(self) -> tuple[int, int, int, int]:
        """Order in which robots go over to other jobs, lowest first."""
        job = self.job
        if job.standing:
            return job.priority, 0, -len(job.assignments), -job.number
        return job.priority, 1, -self.urgency_ns, -job.number


def check_request(request: JobRequest) -> None:
    """Raises `ConfigError` that names the field for a job that cannot work."""
    where = f"job '{request.id}'"
    if request.kind not in KINDS:
        raise ConfigError(
            f"{where}: kind: there is no '{request.kind}'.{suggest(request.kind, KINDS)} Known: {', '.join(KINDS)}."
        )
    if not request.tasks or not all(request.tasks):
        raise ConfigError(f"{where}: tasks: name at least one.")
    for name in ("robots", "episodes", "priority", "version", "first_seed"):
        if getattr(request, name) < 0:
            raise ConfigError(f"{where}: {name} is {getattr(request, name)}; give 0 or more.")
    if request.priority >= Priority.operator:
        raise ConfigError(
            f"{where}: priority is {request.priority}; {int(Priority.operator)} and above are people's. Give less."
        )
    if request.kind == "evaluation":
        if not request.episodes:
            raise ConfigError(f"{where}: episodes: an evaluation needs a number of episodes for each task.")
        held_out_seeds(request.first_seed, request.episodes)
    elif request.first_seed:
        raise ConfigError(
            f"{where}: first_seed: only an evaluation chooses its seeds, {HELD_OUT_SEEDS.start} or later; "
            "others go on in each robot's training seeds. Leave it 0."
        )
