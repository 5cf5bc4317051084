"""How long a job waits at most, whatever the size and the priority of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.scheduler.audit import assigned
from benchmarks.scheduler.bound import overtaken_s
from benchmarks.scheduler.simulator import SECOND, Arrival, Scenario, SimulatedRobot
from hal.resource.capabilities import missing_requirements, satisfies
from hal.resource.lease import Priority
from hal.scheduler.records import MOST_EPISODES, SchedulerConfig
from tests.hal.scheduler.fleets import LENGTHS_S, Watcher, capabilities, random_scenario
from wire.messages.fleet import JobRequest, Requirement

MAIN = JobRequest("main", "rollout", ("a",))
EXAM = JobRequest("exam", "evaluation", ("a",), robots=0, episodes=100_000)
PRACTICE = JobRequest("practice", "rollout", ("a",), robots=1, episodes=5)
CONFIG = SchedulerConfig(aging_s=10.0, scarce_s=10.0)


def rank(request: JobRequest) -> int:
    return request.priority or int(Priority[request.kind])


def part_s(request: JobRequest, config: SchedulerConfig) -> float:
    """How long a robot of speed 1 has at most for a part of a job and the episode before it."""
    longest_s = max(LENGTHS_S[task] for task in request.tasks)
    if not request.episodes:
        return config.aging_s + 2 * longest_s + config.look_every_s
    return (min(request.episodes, MOST_EPISODES) + 1) * longest_s


def bound_s(request: JobRequest, others: Sequence[JobRequest], config: SchedulerConfig) -> float:
    """After `overtaken_s` a part is at work, and each of the others is given one more before it at most."""
    highest, parts_s = max(rank(other) for other in others), [part_s(other, config) for other in others]
    return overtaken_s(rank(request), highest, config) + max(parts_s) + sum(parts_s)


def fleet(robots: int, *jobs: JobRequest, config: SchedulerConfig = CONFIG) -> Watcher:
    """All jobs come a second after each other."""
    bodies = tuple(SimulatedRobot(f"r{n}", capabilities()) for n in range(robots))
    arrivals = tuple(Arrival(n * SECOND, job) for n, job in enumerate(jobs))
    return Watcher(Scenario(bodies, arrivals, LENGTHS_S, report_s=1.0, step_s=1.0), config=config)


@pytest.mark.parametrize("config", [CONFIG, SchedulerConfig()], ids=["impatient", "usual"])
@pytest.mark.parametrize(
    ("robots", "jobs"),
    [
        (2, (MAIN, EXAM, PRACTICE)),
        (1, (EXAM, PRACTICE)),
        (1, (JobRequest("long", "rollout", ("a",), robots=0, episodes=100_000), PRACTICE)),
        (2, (EXAM, JobRequest("drive", "teleoperation", ("a",), robots=0, episodes=100_000), PRACTICE)),
        (2, (EXAM, JobRequest("named", "rollout", ("a",), 1, 5, Requirement(robots=("r1",))))),
        (1, (MAIN, JobRequest("low", "rollout", ("a",), 1, 5, priority=8))),
    ],
    ids=["main and exam", "exam", "equals", "two long ones", "by name", "lower than main"],
)
def test_a_job_that_comes_later_waits_for_a_bounded_time(
    robots: int, jobs: tuple[JobRequest, ...], config: SchedulerConfig
) -> None:
    watcher = fleet(robots, *jobs, config=config)
    *others, late = jobs
    came_s = len(others)
    limit_s = came_s + bound_s(late, others, config) + (config.aging_s if MAIN in others else 0)
    watcher.run(limit_s)
    begun_ns = watcher.simulator.first_begun_ns.get(late.id)
    assert begun_ns is not None, f"it has waited for {limit_s - came_s} s"
    watcher.run(limit_s + part_s(late, config))
    state = watcher.scheduler.job(late.id)
    assert state is not None
    assert state.phase == "done"


def test_a_stream_of_more_urgent_jobs_does_not_hold_one_up_for_ever() -> None:
    stream = tuple(JobRequest(f"exam-{n}", "evaluation", ("a",), 1, 5) for n in range(100))
    bodies = (SimulatedRobot("r0", capabilities()),)
    arrivals = (Arrival(0, stream[0]), Arrival(SECOND, PRACTICE))
    arrivals += tuple(Arrival(n * 15 * SECOND, job) for n, job in enumerate(stream) if n)
    watcher = Watcher(Scenario(bodies, arrivals, LENGTHS_S, report_s=1.0, step_s=1.0), config=CONFIG)
    # 20 s of work come every 15 s: those before it when nothing passes it any more are at most so many
    before = [one.request for one in arrivals if one.time_ns <= (1 + overtaken_s(10, 20, CONFIG)) * SECOND]
    limit_s = 1 + overtaken_s(10, 20, CONFIG) + sum(part_s(job, CONFIG) for job in before)
    assert limit_s < 15 * len(stream) / 2
    watcher.run(limit_s)
    assert "practice" in watcher.simulator.first_begun_ns
    assert any(one.phase == "waiting" for one in watcher.scheduler.states()), "there was always something more urgent"


def test_a_job_without_an_end_has_its_turn_again_and_again() -> None:
    watcher = fleet(2, MAIN, EXAM)
    turn_s = overtaken_s(10, 20, CONFIG) + part_s(EXAM, CONFIG) + part_s(MAIN, CONFIG)
    done = []
    for n in range(1, 9):
        watcher.run(n * turn_s)
        state = watcher.scheduler.job("main")
        assert state is not None
        done.append(state.episodes)
    # two episodes fit into the time for which it keeps its robot
    assert all(later - earlier >= 2 for earlier, later in pairwise(done)), done


def test_one_long_job_takes_turns_with_its_equals() -> None:
    long, other = (JobRequest(name, "rollout", ("a",), robots=0, episodes=100_000) for name in ("long", "other"))
    watcher = fleet(2, long, other)
    watcher.run(2000)
    first, second = (state.episodes for state in watcher.scheduler.states())
    assert first + second >= 2 * 2000 / 4 - 20
    assert abs(first - second) <= 2 * MOST_EPISODES


def test_a_part_that_was_waited_for_is_not_taken_by_a_job_that_has_waited_less() -> None:
    watcher = fleet(1, EXAM, PRACTICE)
    while "practice" not in watcher.simulator.first_begun_ns and watcher.simulator.now_ns < 500 * SECOND:
        watcher.run(watcher.simulator.now_ns / SECOND + 1)
    now_ns = watcher.simulator.now_ns
    watcher.scheduler.submit(JobRequest("urgent", "evaluation", ("a",), 1, 2), now_ns)
    watcher.run(now_ns / SECOND + 20)
    assert [one.counted_for for one in watcher.simulator.finished[-5:]] == ["practice"] * 5


def test_a_job_whose_robot_is_taken_before_it_did_anything_keeps_its_place() -> None:
    first = JobRequest("first", "rollout", ("a",), 1, 1)
    one, two = (JobRequest(name, "rollout", ("a",), 1, 5) for name in ("one", "two"))
    watcher = fleet(1, first, one, two)
    watcher.run(5)
    assert assigned(watcher.scheduler) == {"r0": "one"}
    watcher.scheduler.submit(JobRequest("urgent", "evaluation", ("a",), 1, 1), 5 * SECOND)
    watcher.run(13)
    assert [one.counted_for for one in watcher.simulator.finished] == ["first", "one", "urgent"]
    assert assigned(watcher.scheduler) == {"r0": "one"}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 100_000))
@example(1)
def test_nothing_that_can_be_done_starves(seed: int) -> None:
    """Beside a job of high priority that is never done and wants all robots, and one without an end, every job with an
    end has its first robot after a bounded time in which robots are well."""
    base = random_scenario(seed, 120)
    hog = JobRequest("hog", "teleoperation", ("a", "b", "c"), robots=0, episodes=1_000_000, priority=30)
    main = JobRequest("main", "rollout", ("a", "b", "c"))
    arrivals = (Arrival(0, main), Arrival(0, hog), *base.arrivals)
    scenario = replace(base, arrivals=arrivals, step_s=1.0, report_s=1.0)
    slowest = max(robot.speed for robot in scenario.robots) * (1 + scenario.vary)
    watcher = Watcher(scenario, config=CONFIG)
    requests = [one.request for one in arrivals]
    well_s = max((one.end_ns for robot in scenario.robots for one in robot.outages), default=0) / SECOND
    limits = {}
    for request in requests:
        if request.episodes and _possible(request, scenario.robots):
            others = [other for other in requests if other is not request]
            limits[request.id] = max(well_s + 300, 120) + slowest * bound_s(request, others, CONFIG)
    while watcher.simulator.now_ns < max(limits.values()) * SECOND and limits.keys() - watcher.simulator.first_begun_ns:
        watcher.run(watcher.simulator.now_ns / SECOND + 20)
    for job, limit_s in limits.items():
        assert watcher.simulator.first_begun_ns.get(job, limit_s * SECOND) < limit_s * SECOND, job


def _possible(request: JobRequest, robots: Sequence[SimulatedRobot]) -> bool:
    fit = [
        robot
        for robot in robots
        if not missing_requirements(request.requirement, robot.name, robot.capabilities)
        and satisfies(request.tasks, robot.capabilities)
    ]
    return bool(fit)
