"""What holds whatever robots and jobs do: random fleets, looked at after each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hal.resource.capabilities import able, unmet
from hal.scheduler.decision import SchedulerConfig
from hal.scheduler.seeds import HELD_OUT_SEEDS, TRAINING_SEEDS
from hal.scheduler.simulator import SECOND, SimulatedRobot
from tests.hal.scheduler.fleets import Watcher, random_scenario
from wire.fleet_messages import JobRequest

usual = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@usual
@given(st.integers(0, 100_000))
def test_no_robot_is_idle_while_a_job_waits_and_none_has_two_holders(seed: int) -> None:
    watcher = Watcher(random_scenario(seed))
    watcher.run(300)
    assert watcher.looks > 300


@usual
@given(st.integers(0, 100_000))
def test_no_seed_is_both_practised_and_examined_and_jobs_end_exactly(seed: int) -> None:
    scenario = random_scenario(seed)
    watcher = Watcher(scenario)
    watcher.run(300)
    practised = {one.seed for one in watcher.simulator.finished if one.kind != "evaluation"}
    examined = {one.seed for one in watcher.simulator.finished if one.kind == "evaluation"}
    assert practised <= set(TRAINING_SEEDS)
    assert all(seed in HELD_OUT_SEEDS for seed in examined)
    counted: dict[str, list[tuple[str, int]]] = {}
    for one in watcher.simulator.finished:
        counted.setdefault(one.counted_for, []).append((one.task, one.seed))
    for state in watcher.scheduler.states():
        request, found = state.request, counted.get(state.request.id, [])
        assert state.episodes == len(found)
        if request.kind != "evaluation":
            assert not request.episodes or (len(found) <= request.episodes)
            assert (state.phase == "done") == (request.episodes > 0 and len(found) == request.episodes)
            continue
        first = request.first_seed or HELD_OUT_SEEDS.start
        wanted = {(task, first + n) for task in request.tasks for n in range(request.episodes)}
        assert len(set(found)) == len(found), "an examined pair counted twice"
        assert set(found) <= wanted
        assert (state.phase == "done") == (set(found) == wanted)


@usual
@given(st.integers(0, 100_000))
def test_the_same_events_give_the_same_decisions(seed: int) -> None:
    one, other = Watcher(random_scenario(seed, 120)), Watcher(random_scenario(seed, 120))
    one.run(120)
    other.run(120)
    as_text = [[(at, robot, repr(job)) for at, robot, job in watcher.decider.told] for watcher in (one, other)]
    assert as_text[0] == as_text[1]


@settings(usual, max_examples=15)
@given(st.integers(0, 100_000))
@example(1)
def test_nothing_that_can_be_done_starves(seed: int) -> None:
    """With all robots well in the end, every job with an end is done, if robots that fit can do its tasks."""
    scenario = replace(random_scenario(seed, 120), turn_s=1.0, report_s=1.0)
    watcher = Watcher(scenario, config=SchedulerConfig(aging_s=2.0))
    last_ns = max((outage.end_ns for robot in scenario.robots for outage in robot.outages), default=0)
    watcher.run(last_ns / SECOND + 1000)
    for state in watcher.scheduler.states():
        if state.request.episodes and _possible(state.request, scenario.robots):
            assert state.phase == "done", state


def _possible(request: JobRequest, robots: Sequence[SimulatedRobot]) -> bool:
    fit = [robot.capabilities for robot in robots if not unmet(request.requirement, robot.name, robot.capabilities)]
    if request.kind == "evaluation":
        return all(any(able((task,), found) for found in fit) for task in request.tasks)
    return any(able(request.tasks, found) for found in fit)
