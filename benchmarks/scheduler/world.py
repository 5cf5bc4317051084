"""Robots of many kinds, in several places, that fail and return; jobs in bursts, most of which fit some of them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.scheduler.simulator import SECOND, Arrival, Scenario, SimulatedRobot, available_ns, outages
from hal.resource.capabilities import missing_requirements
from wire.messages.fleet import Capabilities, JobRequest, Requirement

LENGTHS_S = {"reach": 8.0, "push": 14.0, "pick": 20.0, "fold": 35.0}
MEAN_UP_S, MEAN_DOWN_S, SILENT = 1500.0, 90.0, 0.7
"""times to failure and to repair; share of the failures that are silence"""

REPORT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorldSize:
    """How much of everything."""

    robots: int
    jobs: int
    hours: float
    """in which jobs come"""
    load: float
    """work that comes, over what the robots can do meanwhile"""
    drain_hours: float
    """after which everything must be done"""
    seeds: tuple[int, ...]
    compared: tuple[int, ...] = (0,)
    """seeds on which the other arms run, too"""


def scenario(size: WorldSize, seed: int) -> Scenario:
    """Robots of many kinds, in several places, that fail twice in an hour or so; jobs in bursts, most of which fit some
    of them only."""
    drawn = random.Random(f"scheduler/{seed}")
    hour_ns = 3600 * SECOND
    end_ns, last_ns = round(size.hours * hour_ns), round((size.hours + size.drain_hours) * hour_ns)
    robots = []
    for index in range(size.robots):
        # Every tenth is the only kind that has a second camera and can fold.
        rare = index % 10 == 0
        capabilities = Capabilities(
            embodiment=("arm", "arm", "arm", "humanoid")[index % 4],
            spec_hash="0" * 16,
            state_dim=7,
            action_dim=7,
            meanings=("absolute",),
            control_hz=30.0,
            cameras=("front", "wrist") if rare or index % 3 == 0 else ("front",),
            site=("north", "south", "west")[index % 7 % 3],
            tasks=tuple(LENGTHS_S) if rare else tuple(LENGTHS_S)[:3],
        )
        joins_ns = 0 if drawn.random() < 0.9 else drawn.randrange(end_ns // 2)
        failures = outages(drawn, last_ns, MEAN_UP_S, MEAN_DOWN_S, SILENT)
        robots.append(
            SimulatedRobot(
                f"robot-{index:04}",
                capabilities,
                tuple(one for one in failures if one.begin_ns > joins_ns),
                drawn.uniform(0.8, 1.25),
                joins_ns,
            )
        )
    # A job that repeats until the load is reached.
    capacity_s = sum(available_ns(robot, 0, end_ns) / robot.speed for robot in robots) / SECOND
    wanted_s = size.load * capacity_s / size.jobs
    kinds = {robot.capabilities: None for robot in robots}
    arrivals = []
    for index in range(size.jobs):
        # Half of them come in bursts of a minute, three in the run.
        burst = end_ns * (index % 3) // 3
        time_ns = burst + drawn.randrange(60 * SECOND) if index % 2 else drawn.randrange(end_ns)
        arrivals.append(Arrival(min(time_ns, end_ns - 1), _request(index, drawn, wanted_s, kinds)))
    return Scenario(tuple(robots), tuple(arrivals), LENGTHS_S, report_s=REPORT_S, step_s=1.0, seed=seed)


def _request(index: int, drawn: random.Random, wanted_s: float, kinds: Collection[Capabilities]) -> JobRequest:
    kind = drawn.choices(("rollout", "evaluation", "teleoperation"), (0.6, 0.3, 0.1))[0]
    tasks: tuple[str, ...] = (drawn.choices(tuple(LENGTHS_S), (0.32, 0.32, 0.3, 0.06))[0],)
    while True:
        requirement = Requirement(
            embodiment=drawn.choices(("", "arm", "humanoid"), (0.5, 0.33, 0.17))[0],
            cameras=drawn.choices(((), ("wrist",)), (0.8, 0.2))[0],
            site=drawn.choices(("", "north", "south", "west"), (0.4, 0.24, 0.18, 0.18))[0],
        )
        # Nobody asks for what there is none of.
        if any(not missing_requirements(requirement, "", able) and tasks[0] in able.tasks for able in kinds):
            break
    work_s = wanted_s * drawn.uniform(0.2, 1.8)
    episodes = max(1, round(work_s / LENGTHS_S[tasks[0]]))
    robots = 1 if kind == "teleoperation" else drawn.choice((1, 1, 2, 4))
    return JobRequest(f"job-{index:05}", kind, tasks, robots, episodes, requirement)


def work_s(request: JobRequest) -> float:
    """Of a job, on a robot of speed 1."""
    each = [LENGTHS_S[task] for task in request.tasks]
    return request.episodes * (sum(each) if request.kind == "evaluation" else each[0])
