from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.scheduler.simulator import (
    SECOND,
    Arrival,
    Outage,
    Scenario,
    Scheduled,
    SimulatedRobot,
    Simulator,
    available_ns,
    outages,
)
from hal.resource.health import RobotHealth
from hal.scheduler.records import JobRecord
from tests.hal.scheduler.fleets import LENGTHS_S, capabilities, health, scheduler
from wire.messages.fleet import JobRequest

JOB = JobRequest("job", "evaluation", ("a",), 1, 8)


def simulated(*robots: SimulatedRobot, jobs: tuple[JobRequest, ...] = (JOB,)) -> tuple[Simulator, Scheduled]:
    found, _ = scheduler()
    decider = Scheduled(found)
    arrivals = tuple(Arrival(0, job) for job in jobs)
    return Simulator(Scenario(robots, arrivals, LENGTHS_S), decider), decider


def test_episodes_take_their_time_and_count() -> None:
    simulator, decider = simulated(SimulatedRobot("r0", capabilities(), speed=2.0))
    simulator.run(30 * SECOND)
    assert [one.time_ns / SECOND for one in simulator.finished] == [8.0, 16.0, 24.0]
    assert list(simulator.idle()) == []
    simulator.run(70 * SECOND)
    state = decider.scheduler.job("job")
    assert state is not None
    assert (state.phase, state.episodes) == ("done", 8)
    assert [one.seed for one in simulator.finished] == list(range(1_000_000, 1_000_008))
    assert list(simulator.idle()) == ["r0"]
    assert simulator.first_begun_ns == {"job": 0}


def test_an_unplugged_robot_is_only_found_by_its_silence_and_the_work_goes_to_another() -> None:
    gone = SimulatedRobot("r0", capabilities(), (Outage(10 * SECOND, 1000 * SECOND, True),))
    late = SimulatedRobot("r1", capabilities(), joins_ns=SECOND)
    simulator, decider = simulated(gone, late)
    simulator.run(14 * SECOND)
    assert health(decider.scheduler, "r0") != "lost"
    simulator.run(24 * SECOND)
    assert health(decider.scheduler, "r0") == "lost"
    assert [one.robot for one in simulator.finished] == ["r0", "r0"]
    simulator.run(70 * SECOND)
    assert [one.counted_for for one in simulator.finished] == ["job"] * 8
    assert {one.robot for one in simulator.finished[2:]} == {"r1"}


def test_a_robot_in_trouble_drains_and_returns() -> None:
    sick = SimulatedRobot("r0", capabilities(), (Outage(2 * SECOND, 40 * SECOND, False),))
    simulator, decider = simulated(sick)
    seen = []
    for second in range(60):
        simulator.run(second * SECOND)
        found = health(decider.scheduler, "r0")
        if not seen or seen[-1] != found:
            seen.append(found)
    assert seen == [
        RobotHealth.starting,
        RobotHealth.ready,
        RobotHealth.degraded,
        RobotHealth.draining,
        RobotHealth.ready,
    ] or seen == [
        RobotHealth.ready,
        RobotHealth.degraded,
        RobotHealth.draining,
        RobotHealth.ready,
    ]
    simulator.run(100 * SECOND)
    state = decider.scheduler.job("job")
    assert state is not None
    assert state.phase == "done"


def test_outages_are_apart_and_what_is_left_is_available() -> None:
    found = outages(random.Random(1), 3600 * SECOND, 100.0, 20.0, 0.5)
    assert 15 < len(found) < 60
    assert all(one.begin_ns < one.end_ns < two.begin_ns for one, two in pairwise(found))
    assert {one.silent for one in found} == {True, False}
    robot = SimulatedRobot("r", capabilities(), (Outage(10, 20, True), Outage(30, 50, False)), joins_ns=5)
    assert [available_ns(robot, *span) for span in ((0, 100), (0, 15), (12, 18), (15, 35))] == [65, 5, 0, 10]


@pytest.mark.slow
def test_a_decision_looks_at_few_jobs_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rescans: a robot that comes free, and a job that comes, cost the same with ten or thousands waiting."""
    looked: list[int] = []
    wants = JobRecord.wants

    def counting(job: JobRecord, group: object) -> bool:
        looked[-1] += 1
        return wants(job, group)  # type: ignore[arg-type]

    monkeypatch.setattr(JobRecord, "wants", counting)
    for waiting in (30, 3000):
        looked.append(0)
        found, _ = scheduler()
        decider = Scheduled(found)
        for n in range(20):
            decider.joined(SimulatedRobot(f"r{n}", capabilities(site=f"s{n % 4}")), 1, 0)
        for n in range(waiting):
            found.submit(JobRequest(f"j{n}", "rollout", ("a",), 1, 1), 0)
        wires = dict(decider.step(0))
        looked[-1] = 0
        for n in range(5):
            found.episode_done(f"r{n}", "a", True, n, wires[f"r{n}"].first_seed)
            decider.step(n)
            found.submit(JobRequest(f"new-{n}", "rollout", ("a",), 1, 1), n)
            decider.step(n)
    few, many = looked
    assert 0 < many <= 2 * few + 20
