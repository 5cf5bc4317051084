"""Jobs, and the work that is left of them: handed out in slices, taken back when a robot fails."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Protocol

import msgspec

from hal.resource.lease import Priority
from hal.scheduler.seeds import HELD_OUT_SEEDS, Stretch, held_out
from wire.errors import ConfigError, suggest
from wire.messages.fleet import JobRequest, JobState
from wire.messages.gateway import Job

if TYPE_CHECKING:
    from hal.scheduler.groups import Group, JobClass, Queue

KINDS = ("rollout", "evaluation", "teleoperation")
MOST_SLICE = 16
"""episodes; a robot that has done so many of a job that ends is open to others again"""


LONGEST_NAME = 100
"""characters of a name in a request"""
MOST_NAMES = 256
"""in one list of a request"""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("console", "teleoperator", "web-", "dropped", "operator")
_TAKEN = ("gateway", "estop", "rest")


class Done(msgspec.Struct, frozen=True):
    """A finished episode of a job."""

    task: str
    seed: int
    success: bool


class WorkUnit(msgspec.Struct, frozen=True):
    """What one robot is to do of a job."""

    episodes: int
    """0: as many as it can"""
    task: str = ""
    """'': the job's tasks in proportion to their need"""
    first_seed: int = 0
    """0: from the robot's training lane"""

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.episodes)


class Work(Protocol):
    """What is left to hand out of a job."""

    def open(self, tasks: Sequence[str]) -> bool:
        """Whether a robot that can do `tasks` can do some of it."""

    def take(self, tasks: Sequence[str], robots: int) -> WorkUnit:
        """Some of it, for one of `robots` that share it. Only when it is open."""

    def put_back(self, slice_: WorkUnit, done: Iterable[int]) -> None:
        """What was not done of a slice; `done` are the finished episodes' seeds."""

    def claim(self, task: str, seed: int) -> bool:
        """An episode is done that nobody is meant to do now; whether it is one of those left. It is not any more."""


class EndlessWork:
    """There is always more."""

    def open(self, tasks: Sequence[str]) -> bool:
        return True

    def take(self, tasks: Sequence[str], robots: int) -> WorkUnit:
        return WorkUnit(0)

    def put_back(self, slice_: WorkUnit, done: Iterable[int]) -> None:
        pass

    def claim(self, task: str, seed: int) -> bool:
        return True


class CountedWork:
    """So many episodes, whichever."""

    def __init__(self, episodes: int) -> None:
        self._left = episodes

    def open(self, tasks: Sequence[str]) -> bool:
        return self._left > 0

    def take(self, tasks: Sequence[str], robots: int) -> WorkUnit:
        episodes = _share(self._left, robots)
        self._left -= episodes
        return WorkUnit(episodes)

    def put_back(self, slice_: WorkUnit, done: Iterable[int]) -> None:
        self._left += slice_.episodes - len(list(done))

    def claim(self, task: str, seed: int) -> bool:
        claimed = self._left > 0
        self._left -= claimed
        return claimed


class ExaminedWork:
    """The same seeds of every task, each once."""

    def __init__(self, tasks: Sequence[str], seeds: Stretch) -> None:
        self._left: dict[str, list[Stretch]] = {task: [seeds] for task in tasks}
        self._size = dict.fromkeys(tasks, seeds.episodes)

    def open(self, tasks: Sequence[str]) -> bool:
        return any(self._size[task] for task in tasks)

    def take(self, tasks: Sequence[str], robots: int) -> WorkUnit:
        # The first of the tasks with most left: none is finished long before the others.
        task = max(tasks, key=lambda task: self._size[task])
        stretch = self._left[task].pop(0)
        episodes = min(stretch.episodes, _share(self._size[task], robots))
        if episodes < stretch.episodes:
            self._left[task].insert(0, Stretch(stretch.first_seed + episodes, stretch.episodes - episodes))
        self._size[task] -= episodes
        return WorkUnit(episodes, task, stretch.first_seed)

    def put_back(self, slice_: WorkUnit, done: Iterable[int]) -> None:
        self._add(slice_.task, sorted(set(slice_.seeds) - set(done)))

    def claim(self, task: str, seed: int) -> bool:
        for index, stretch in enumerate(self._left.get(task, ())):
            if seed in stretch.seeds:
                del self._left[task][index]
                self._size[task] -= stretch.episodes
                self._add(task, [other for other in stretch.seeds if other != seed])
                return True
        return False

    def _add(self, task: str, seeds: Sequence[int]) -> None:
        self._size[task] += len(seeds)
        for seed in seeds:
            last = self._left[task][-1] if self._left[task] else None
            if last is not None and seed == last.first_seed + last.episodes:
                self._left[task][-1] = Stretch(last.first_seed, last.episodes + 1)
            else:
                self._left[task].append(Stretch(seed, 1))
        self._left[task].sort(key=lambda stretch: stretch.first_seed)


def _share(left: int, robots: int) -> int:
    """Half of an equal share (guided self-scheduling, Polychronopoulos and Kuck, 1987): all robots end together."""
    share = left if robots <= 1 else ceil(left / (2 * robots))
    return max(1, min(share, MOST_SLICE))


class JobRecord:
    """A job and everything known about it."""

    def __init__(self, request: JobRequest, number: int, now_ns: int) -> None:
        self.request = request
        self.number = number
        self.priority = request.priority or int(Priority[request.kind])
        self.standing = request.episodes == 0
        self.work = work_of(request)
        self.phase = "waiting"
        self.submitted_ns = now_ns
        self.started_ns = self.ended_ns = 0
        self.waits_since_ns = now_ns
        """when it last had no robot; for standing jobs"""
        self.assignments: dict[str, Assignment] = {}
        self.episodes = self.successes = 0
        self.entered: JobClass | None = None
        self.ahead_ns = 0
        """head start over the least of all jobs"""
        self.urgency = 0
        """order among those that wait: lowest first; all grow older alike, and who is given a part waits anew"""
        self.queued: dict[Queue, int] = {}
        """where it waits, and with which urgency it stands there"""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def demand(self) -> JobClass:
        """What it asks for; it must have been entered."""
        assert self.entered is not None
        return self.entered

    @property
    def alive(self) -> bool:
        return self.phase in ("waiting", "running")

    @property
    def target(self) -> int:
        """Episodes after which it is done; 0: it goes on."""
        request = self.request
        return request.episodes * (len(set(request.tasks)) if request.kind == "evaluation" else 1)

    def wants(self, group: Group) -> bool:
        """Whether it could use one more robot, one of `group`."""
        limit = self.request.robots
        if not self.alive or (limit and len(self.assignments) >= limit):
            return False
        return self.demand.fits(group) and self.work.open(group.tasks_for(self.demand))

    def count(self, success: bool) -> bool:
        """One more episode is finished; whether the job is."""
        self.episodes += 1
        self.successes += success
        return bool(self.target) and self.episodes >= self.target

    def state(self, note: str = "") -> JobState:
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


class Assignment:
    """A robot that works on a slice of a job, and holds a lease for it."""

    def __init__(self, job: JobRecord, robot: str, slice_: WorkUnit, wire: Job, now_ns: int) -> None:
        self.job = job
        self.robot = robot
        self.slice = slice_
        self.wire = wire
        """the job as the robot was told it"""
        self.group: Group | None = None
        """the robot's; None: the robot may not be given other work now"""
        self.since_ns = now_ns
        self.urgency = job.urgency
        """the job's when it was given this part; it keeps that rank for it"""
        self.kept_until_ns = 0
        """not taken for another job before; for jobs without an end that had waited for their turn"""
        self.taken_up = False
        """the robot has said that it works on it"""
        self.done: list[int] = []
        """seeds of the finished episodes that count"""
        self.stored = 0
        """finished episodes that came, counted or not"""
        self.finished_ns: int | None = None
        """when the robot said that it has done all of it"""
        self.spread_after = len(wire.tasks)
        """finished episodes after which the tasks are spread anew"""

    @property
    def live(self) -> bool:
        """Whether it is still the robot's."""
        return self.job.assignments.get(self.robot) is self


def work_of(request: JobRequest) -> Work:
    """All the work of a job."""
    if request.episodes == 0:
        return EndlessWork()
    if request.kind == "evaluation":
        return ExaminedWork(tuple(dict.fromkeys(request.tasks)), held_out(request.first_seed, request.episodes))
    return CountedWork(request.episodes)


def check_sizes(request: JobRequest) -> None:
    """Raises `ConfigError` that names the field for a name that is too long, or too many of them."""
    need = request.requirement
    fields: dict[str, str | tuple[str, ...]] = {"id": request.id, "submitter": request.submitter}
    fields |= {"kind": request.kind, "tasks": request.tasks}
    fields |= {f"requirement.{name}": getattr(need, name) for name in need.__struct_fields__}
    for field, value in fields.items():
        names = (value,) if isinstance(value, str) else value
        if len(names) > MOST_NAMES:
            raise ConfigError(f"{field}: {len(names)} names; give up to {MOST_NAMES}.")
        if longest := max((name for name in names if len(name) > LONGEST_NAME), key=len, default=""):
            raise ConfigError(
                f"{field}: '{longest[:64]}' and so on has {len(longest)} characters; give up to {LONGEST_NAME}."
            )


def check_request(request: JobRequest) -> None:
    """Raises `ConfigError` that names the field for a job that cannot work."""
    check_sizes(request)
    where = f"job '{request.id}'"
    if not _ID.fullmatch(request.id):
        raise ConfigError(
            f"id: '{request.id[:64]}' is no name for a job. Give up to 64 letters, digits, '-', '_' or '.', the first "
            "one a letter or a digit."
        )
    if request.id in _TAKEN or request.id.startswith(_RESERVED):
        # A lease shows its holder by name: a job must not look like a person or a program.
        raise ConfigError(
            f"id: '{request.id}' is kept for those who are no job: {', '.join(_TAKEN)}, and whatever begins with "
            f"{', '.join(_RESERVED)}. Choose another name."
        )
    if request.kind not in KINDS:
        raise ConfigError(
            f"{where}: kind: there is no '{request.kind}'.{suggest(request.kind, KINDS)} Known: {', '.join(KINDS)}."
        )
    if not request.tasks or not all(request.tasks):
        raise ConfigError(f"{where}: tasks: name at least one.")
    for field in ("robots", "episodes", "priority", "version", "first_seed"):
        if getattr(request, field) < 0:
            raise ConfigError(f"{where}: {field} is {getattr(request, field)}; give 0 or more.")
    if request.priority >= Priority.operator:
        raise ConfigError(
            f"{where}: priority is {request.priority}; {int(Priority.operator)} and above are people's. Give less."
        )
    if request.kind == "evaluation":
        if not request.episodes:
            raise ConfigError(f"{where}: episodes: an evaluation needs a number of episodes for each task.")
        held_out(request.first_seed, request.episodes)
    elif request.first_seed:
        raise ConfigError(
            f"{where}: first_seed: only an evaluation chooses its seeds, {HELD_OUT_SEEDS.start} or later; "
            "others go on in each robot's training seeds. Leave it 0."
        )
