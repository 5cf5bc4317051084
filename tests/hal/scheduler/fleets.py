"""Small fleets that are not there, and what must be true of them at every moment."""

from __future__ import annotations

import random

import msgspec

from benchmarks.scheduler.audit import assigned
from benchmarks.scheduler.simulator import (
    SECOND,
    Arrival,
    Scenario,
    Scheduled,
    SimulatedRobot,
    Simulator,
    outages,
    robot_status,
)
from hal.resource.capabilities import missing_requirements, satisfies
from hal.resource.lease import Leases
from hal.scheduler.scheduler import Scheduler
from wire.messages.fleet import Capabilities, JobRequest, Requirement
from wire.messages.gateway import EdgeStatus

LENGTHS_S = {"a": 4.0, "b": 9.0, "c": 15.0}


def capabilities(**rest: object) -> Capabilities:
    usual = {
        "embodiment": "arm",
        "spec_hash": "0" * 16,
        "state_dim": 7,
        "action_dim": 7,
        "meanings": ("absolute",),
        "control_hz": 30.0,
    }
    return Capabilities(**{**usual, **rest})  # type: ignore[arg-type]


def scheduler(**rest: object) -> tuple[Scheduler, Leases]:
    leases = Leases()
    return Scheduler(leases, **rest), leases  # type: ignore[arg-type]


def status(robot: str = "r", **changes: object) -> EdgeStatus:
    """A robot that runs its policy, with `changes`."""
    return msgspec.structs.replace(robot_status(robot), **changes)


def health(scheduler: Scheduler, robot: str, now_ns: int = 0) -> str:
    return next((state.health for state in scheduler.robots(now_ns) if state.name == robot), "")


def random_scenario(seed: int, until_s: int = 300) -> Scenario:
    """A few robots of a few kinds that fail and return, a few jobs of all kinds."""
    drawn = random.Random(seed)
    robots = []
    for index in range(drawn.randint(1, 7)):
        found = capabilities(
            embodiment=drawn.choice(("arm", "arm", "humanoid")),
            cameras=drawn.choice(((), ("wrist",))),
            tasks=drawn.choice(((), ("a", "b"), ("b", "c"), ("c",))),
        )
        fails = outages(drawn, until_s * SECOND, drawn.choice((40.0, 200.0)), 15.0, 0.6)
        joins_ns = drawn.choice((0, 0, drawn.randrange(60 * SECOND)))
        kept = tuple(one for one in fails if one.begin_ns > joins_ns)
        robots.append(SimulatedRobot(f"robot-{index}", found, kept, drawn.uniform(0.7, 1.5), joins_ns))
    arrivals = []
    for index in range(drawn.randint(1, 12)):
        kind = drawn.choice(("rollout", "rollout", "evaluation", "teleoperation"))
        request = JobRequest(
            id=f"job-{index}",
            kind=kind,
            tasks=tuple(drawn.sample(("a", "b", "c"), drawn.randint(1, 3))),
            robots=drawn.choice((0, 1, 1, 2, 3)),
            episodes=drawn.randint(1, 9) if kind == "evaluation" or drawn.random() < 0.7 else 0,
            requirement=Requirement(
                embodiment=drawn.choice(("", "", "arm", "humanoid")),
                cameras=drawn.choice(((), (), ("wrist",))),
                robots=drawn.choice(((), (), (), ("robot-0",), ("robot-1", "robot-2"))),
            ),
            priority=drawn.choice((0, 0, 5, 25)),
            first_seed=drawn.choice((0, 1_500_000)) if kind == "evaluation" else 0,
        )
        arrivals.append(Arrival(drawn.randrange(until_s * SECOND * 2 // 3), request))
    return Scenario(tuple(robots), tuple(arrivals), LENGTHS_S, vary=0.3, seed=seed)


class Watcher:
    """Runs a scenario; after each event it looks whether everything is as it must be."""

    def __init__(self, scenario: Scenario, **rest: object) -> None:
        self.scheduler, self.leases = scheduler(**rest)
        self.decider = _Recorded(self.scheduler)
        self.simulator = Simulator(scenario, self.decider, self._look)
        self.looks = 0

    def run(self, until_s: float) -> None:
        self.simulator.run(round(until_s * SECOND))

    def _look(self, now_ns: int) -> None:
        self.looks += 1
        jobs = [job for job in self.scheduler._jobs.values() if job.alive]
        holders = {robot: job.id for job in jobs for robot in job.assignments}
        assert len(holders) == sum(len(job.assignments) for job in jobs), "a robot works on two jobs"
        assert assigned(self.scheduler) == holders
        for robot, job in holders.items():
            lease = self.leases.of(robot)
            assert lease is not None, f"{robot} works on {job} without a lease"
            assert lease.holder == job, f"{robot} works on {job}, {lease.holder} holds it"
        assert {lease.robot for lease in self.leases.all()} == set(holders)
        for job in jobs:
            assert not job.target or job.episodes < job.target
            assert not job.request.robots or len(job.assignments) <= job.request.robots
            assert (job.phase == "running") == bool(job.assignments)
        for name, robot in self.scheduler._robots.items():
            found = robot.capabilities
            if not robot.watch.health.works or robot.assignment is not None:
                continue
            for job in jobs:
                fits = not missing_requirements(job.request.requirement, name, found) and satisfies(
                    job.request.tasks, found
                )
                waits = not job.request.robots or len(job.assignments) < job.request.robots
                work = job.work.open(satisfies(job.request.tasks, found))
                assert not (fits and waits and work), f"{name} is idle while {job.id} waits"


class _Recorded(Scheduled):
    """Keeps what robots were told."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.told: list[tuple[int, str, object]] = []

    def step(self, now_ns: int) -> list:
        found = super().step(now_ns)
        self.told += [(now_ns, robot, job) for robot, job in found]
        return found
