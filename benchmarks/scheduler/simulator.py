"""A fleet that is not there: robots that work, fail and return, and jobs that come, by events on a simulated clock.

What decides is given robots' greetings, reports and finished episodes as a gateway would be, and nothing else; it does
not see a failure, only silence or trouble. The same scenario gives every decider the same robots, jobs, failures and
lengths of episodes.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from hal.scheduler.records import job_of
from hal.scheduler.scheduler import Scheduler
from wire.messages.fleet import Capabilities, JobRequest
from wire.messages.gateway import EdgeStatus, Job
from wire.types import EpisodeSource, Mode

SECOND = 1_000_000_000


class Outage(msgspec.Struct, frozen=True):
    """A time in which a robot does not work."""

    begin_ns: int
    end_ns: int
    silent: bool
    """unplugged; otherwise it reports trouble"""


class SimulatedRobot(msgspec.Struct, frozen=True):
    """A robot of a scenario."""

    name: str
    capabilities: Capabilities
    outages: tuple[Outage, ...] = ()
    """in order, apart from each other"""
    speed: float = 1.0
    """its episodes take so many times as long"""
    joins_ns: int = 0


class Arrival(msgspec.Struct, frozen=True):
    """A job and when it comes."""

    time_ns: int
    request: JobRequest


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that happens to a fleet."""

    robots: tuple[SimulatedRobot, ...]
    arrivals: tuple[Arrival, ...]
    episode_s: Mapping[str, float]
    """usual length of an episode, by task"""
    vary: float = 0.0
    """share by which a length is more or less, a fixed function of task and seed"""
    success: float = 0.7
    report_s: float = 0.5
    step_s: float = 0.25
    """what decides is asked so often, and after each event but a report"""
    seed: int = 0


class SchedulerInterface(Protocol):
    """What hands out work: the scheduler, or what it is compared with."""

    def submit(self, request: JobRequest, now_ns: int) -> None: ...

    def joined(self, robot: SimulatedRobot, process: int, now_ns: int) -> None: ...

    def reported(self, status: EdgeStatus, now_ns: int) -> None: ...

    def stored(self, robot: str, job: str, task: str, seed: int, success: bool, now_ns: int) -> str:
        """An episode is stored; the id of the job it counts for, '' for none."""

    def step(self, now_ns: int) -> list[tuple[str, Job]]:
        """What robots are told now."""


class Scheduled:
    """The scheduler of `hal.scheduler` as a `SchedulerInterface`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def submit(self, request: JobRequest, now_ns: int) -> None:
        self.scheduler.submit(request, now_ns)

    def joined(self, robot: SimulatedRobot, process: int, now_ns: int) -> None:
        self.scheduler.join(robot.name, robot.capabilities, now_ns, str(process))

    def reported(self, status: EdgeStatus, now_ns: int) -> None:
        self.scheduler.report(status, now_ns)

    def stored(self, robot: str, job: str, task: str, seed: int, success: bool, now_ns: int) -> str:
        source = EpisodeSource.evaluation if seed >= 1_000_000 else EpisodeSource.online
        return self.scheduler.episode_done(robot, task, success, now_ns, seed, source)

    def step(self, now_ns: int) -> list[tuple[str, Job]]:
        return [(decision.robot, decision.job) for decision in self.scheduler.step(now_ns)]


class Finished(msgspec.Struct, frozen=True):
    """An episode that was stored."""

    time_ns: int
    robot: str
    counted_for: str
    """job, '' when it counts for none"""
    task: str
    seed: int
    kind: str
    took_ns: int


class _Body:
    """What a simulated robot is doing."""

    def __init__(self, robot: SimulatedRobot) -> None:
        self.robot = robot
        self.process = 0
        self.here = False
        self.trouble = False
        self.job: Job | None = None
        self.next: Job | None = None
        self.done = 0
        self.begun = 0
        """episodes begun of the job"""
        self.ends_ns = 0
        """of the running episode; 0: none runs"""
        self.number = 0
        """of the running episode: what was planned for an earlier one is void"""


class Simulator:
    """Runs a scenario. `now_ns`, `bodies` and `finished` may be read at any time."""

    def __init__(
        self, scenario: Scenario, decider: SchedulerInterface, watch: Callable[[int], None] | None = None
    ) -> None:
        """`watch` is called with the time after each event that is not a mere report."""
        self.scenario = scenario
        self.decider = decider
        self.now_ns = 0
        self.finished: list[Finished] = []
        self.first_begun_ns: dict[str, int] = {}
        """by job, when a robot first began an episode of it"""
        self._watch = watch
        self._bodies = {robot.name: _Body(robot) for robot in scenario.robots}
        self._events: list[tuple[int, int, Callable[[], bool]]] = []
        self._serial = 0
        for index, robot in enumerate(scenario.robots):
            body = self._bodies[robot.name]
            # Not all at the same moment, as in life.
            lag_ns = round(scenario.report_s * SECOND * index / len(scenario.robots))
            self._at(robot.joins_ns, self._joining(body))
            self._at(robot.joins_ns + lag_ns, self._reporting(body))
            for outage in robot.outages:
                self._at(outage.begin_ns, self._failing(body, outage))
                self._at(outage.end_ns, self._returning(body, outage))
        for arrival in scenario.arrivals:
            self._at(arrival.time_ns, self._arriving(arrival))
        self._at(0, self._stepping())

    def run(self, until_ns: int) -> None:
        """Go on to a time."""
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, event = heapq.heappop(self._events)
            if event():
                self._step()
        self.now_ns = until_ns

    def idle(self) -> Iterator[str]:
        """Robots that are here, well, and do nothing."""
        return (name for name, body in self._bodies.items() if body.here and not body.trouble and not body.ends_ns)

    # --- events: each says whether what decides must be asked -----------------------------------------------------

    def _at(self, time_ns: int, event: Callable[[], bool]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time_ns, self._serial, event))

    def _step(self) -> None:
        for name, job in self.decider.step(self.now_ns):
            body = self._bodies[name]
            if body.here:
                self._told(body, job)
        if self._watch is not None:
            self._watch(self.now_ns)

    def _stepping(self) -> Callable[[], bool]:
        def event() -> bool:
            self._at(self.now_ns + round(self.scenario.step_s * SECOND), event)
            return True

        return event

    def _arriving(self, arrival: Arrival) -> Callable[[], bool]:
        def event() -> bool:
            self.decider.submit(arrival.request, self.now_ns)
            return True

        return event

    def _joining(self, body: _Body) -> Callable[[], bool]:
        def event() -> bool:
            self.decider.joined(body.robot, body.process + 1, self.now_ns)
            body.here = True
            body.process += 1
            return True

        return event

    def _reporting(self, body: _Body) -> Callable[[], bool]:
        period_ns = round(self.scenario.report_s * SECOND)

        def event() -> bool:
            self._at(self.now_ns + period_ns, event)
            if body.here:
                self._report(body)
            return False

        return event

    def _report(self, body: _Body) -> None:
        fault = "the driver raises" if body.trouble else ""
        reason = "the robot does not take commands" if body.trouble else "" if body.ends_ns else "no job yet"
        job = body.job.id if body.job else ""
        self.decider.reported(robot_status(body.robot.name, reason, fault, job, body.done), self.now_ns)

    def _failing(self, body: _Body, outage: Outage) -> Callable[[], bool]:
        def event() -> bool:
            body.ends_ns = 0
            body.number += 1
            if outage.silent:
                body.here, body.job, body.next = False, None, None
            else:
                body.trouble = True
            return False

        return event

    def _returning(self, body: _Body, outage: Outage) -> Callable[[], bool]:
        join = self._joining(body)

        def event() -> bool:
            if outage.silent:
                return join()
            body.trouble = False
            self._go_on(body)
            return False

        return event

    # --- a robot's work -------------------------------------------------------------------------------------------

    def _told(self, body: _Body, job: Job) -> None:
        if body.job is not None and body.job.id == job.id:
            body.job = job
            body.next = None
        else:
            body.next = job
        if not body.ends_ns and not body.trouble:
            self._go_on(body)

    def _go_on(self, body: _Body) -> None:
        """Between two episodes."""
        if body.next is not None:
            body.job, body.next, body.done, body.begun = body.next, None, 0, 0
        job = body.job
        if job is None or not job.tasks or (job.episodes and body.done >= job.episodes):
            return
        task, seed = job.tasks[body.begun % len(job.tasks)], job.first_seed + body.begun
        body.begun += 1
        body.number += 1
        took_ns, success = self._outcome(body.robot, task, seed)
        body.ends_ns = self.now_ns + took_ns
        self.first_begun_ns.setdefault(job_of(job.id), self.now_ns)
        self._at(body.ends_ns, self._ending(body, body.number, job, task, seed, success, took_ns))

    def _outcome(self, robot: SimulatedRobot, task: str, seed: int) -> tuple[int, bool]:
        drawn = random.Random(f"{self.scenario.seed}/{task}/{seed}")
        took_s = self.scenario.episode_s[task] * robot.speed * (1 + self.scenario.vary * (2 * drawn.random() - 1))
        return round(took_s * SECOND), drawn.random() < self.scenario.success

    def _ending(
        self, body: _Body, number: int, job: Job, task: str, seed: int, success: bool, took_ns: int
    ) -> Callable[[], bool]:
        def event() -> bool:
            if body.number != number:
                return False
            body.ends_ns = 0
            body.done += 1
            name = body.robot.name
            counted = self.decider.stored(name, job.id, task, seed, success, self.now_ns)
            self.finished.append(Finished(self.now_ns, name, counted, task, seed, job.kind, took_ns))
            # What decides may tell it something else in this moment, before it goes on.
            self._step()
            if not body.ends_ns:
                self._go_on(body)
            return False

        return event


_STATE = np.zeros(0, np.float32)


def robot_status(robot: str, reason: str = "", fault: str = "", job: str = "", episodes: int = 0) -> EdgeStatus:
    """What a robot reports that works, or holds for a `reason`."""
    return EdgeStatus(
        robot=robot,
        time_ns=0,
        mode=Mode.hold if reason else Mode.policy,
        reason=reason,
        task="",
        episode="",
        tick=0,
        state=_STATE,
        version=0,
        ticks=0,
        missed_ticks=0,
        late_p99_s=0.0,
        starved_ticks=0,
        episodes=0,
        interventions=0,
        steps_recorded=0,
        spooled=0,
        job=job,
        job_episodes=episodes,
        fault=fault,
    )


def outages(
    drawn: random.Random, until_ns: int, mean_up_s: float, mean_down_s: float, silent: float
) -> tuple[Outage, ...]:
    """Times to failure and to repair, both exponential; a share `silent` of the failures are unplugged robots."""
    found: list[Outage] = []
    time_ns = round(drawn.expovariate(1 / mean_up_s) * SECOND)
    while time_ns < until_ns:
        end_ns = time_ns + round(max(1.0, drawn.expovariate(1 / mean_down_s)) * SECOND)
        found.append(Outage(time_ns, end_ns, drawn.random() < silent))
        time_ns = end_ns + round(max(1.0, drawn.expovariate(1 / mean_up_s)) * SECOND)
    return tuple(found)


def available_ns(robot: SimulatedRobot, begin_ns: int, end_ns: int) -> int:
    """How long of a time the robot is there and well."""
    begin_ns = max(begin_ns, robot.joins_ns)
    gone = sum(max(0, min(end_ns, outage.end_ns) - max(begin_ns, outage.begin_ns)) for outage in robot.outages)
    return max(0, end_ns - begin_ns - gone)
