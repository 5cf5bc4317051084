"""What holds whatever robots and jobs do: random fleets, looked at after each event."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.scheduler.episodes import HELD_OUT_SEEDS, TRAINING_SEEDS
from tests.hal.scheduler.fleets import Watcher, random_scenario

usual = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@usual
@given(st.integers(0, 100_000))
@pytest.mark.slow
def test_nobody_is_idle_or_held_twice_seeds_stay_apart_and_jobs_end_exactly(seed: int) -> None:
    """The watcher looks at robots, leases and jobs after each event; seeds and counts are looked at in the end."""
    watcher = Watcher(random_scenario(seed))
    watcher.run(300)
    assert watcher.looks > 300
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
@pytest.mark.slow
def test_the_same_events_give_the_same_decisions(seed: int) -> None:
    one, other = Watcher(random_scenario(seed, 120)), Watcher(random_scenario(seed, 120))
    one.run(120)
    other.run(120)
    as_text = [[(at, robot, repr(job)) for at, robot, job in watcher.decider.told] for watcher in (one, other)]
    assert as_text[0] == as_text[1]
