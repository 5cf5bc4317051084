"""A few observations of the buffer, as robots had them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.loading.observations import choose_rows, read_shown_steps
from cloud_learner.buffer.store.store import ReadResult
from fleet.config.recipes import fake
from policies.interface.policy import check_observation
from wire.messages.gateway import ACTORS
from wire.types import Actor


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessFleet]:
    made = InProcessFleet(tmp_path_factory.mktemp("fleet"), fake(), robots=0)
    made.clock.advance(10**9)
    made.trainer.step()
    yield made
    made.close()


def test_they_are_spread_over_the_demonstrations_and_fit_the_robot(fleet: InProcessFleet) -> None:
    source, recipe = fleet.trainer._source, fleet.recipe
    rows = choose_rows(source.universe, 4)
    assert 1 < len(rows) <= 4
    assert rows == choose_rows(source.universe, 4)
    steps = read_shown_steps(rows, source._store.read, recipe.spec, recipe.instructions)
    assert len(steps) == len(rows)
    found = [step.observation for step in steps]
    for observation in found:
        check_observation(recipe.spec, observation)
        assert observation.task in recipe.instructions.values()
        assert all(frame.time_ns <= observation.time_ns for frame in observation.images.values())
    assert len({observation.state.tobytes() for observation in found}) > 1


def test_another_draw_has_others(fleet: InProcessFleet) -> None:
    universe = fleet.trainer._source.universe
    drawn = [set(choose_rows(universe, 3, draw)) for draw in range(8)]
    assert all(len(rows) == 3 for rows in drawn)
    assert len(set.union(*drawn)) > 6


@pytest.mark.parametrize("actors", ["script", "policy", "policy, then human", "policy, human, then policy"])
def test_what_was_shown_goes_as_far_as_somebody_taught(fleet: InProcessFleet, actors: str) -> None:
    source, recipe = fleet.trainer._source, fleet.recipe
    (row,) = choose_rows(source.universe, 1)
    segment = source._store.read([row]).segments[row]
    # one picture for all steps, so that each has it
    times = {
        name: np.full_like(seen, frames.times_ns[0])
        for name, seen in segment.frame_times_ns.items()
        if (frames := segment.frames[name])
    }
    acted = np.full(segment.steps, ACTORS.index(Actor.script if actors == "script" else Actor.policy), np.uint8)
    first, last = {"script": (0, segment.steps), "policy": (0, 0), "policy, then human": (3, segment.steps)}.get(
        actors, (2, 5)
    )
    if actors != "script":
        acted[first:last] = ACTORS.index(Actor.human)
    changed = msgspec.structs.replace(segment, actor=acted, frame_times_ns=times)
    (step,) = read_shown_steps([row], lambda rows: ReadResult({row: changed}, {}), recipe.spec, recipe.instructions)
    assert step.observation.time_ns == segment.times_ns[first]
    assert np.array_equal(step.shown, segment.executed[first:last])


def test_there_are_no_more_than_segments_and_none_of_what_is_gone(fleet: InProcessFleet) -> None:
    universe = fleet.trainer._source.universe
    assert len(choose_rows(universe, 1000)) == int((universe.demonstration & ~universe.gone).sum())
    universe._segment["gone"].all[:1] = True
    try:
        assert int(universe.row[0]) not in choose_rows(universe, 1000)
    finally:
        universe._segment["gone"].all[:1] = False


def test_what_cannot_be_read_is_left_out(fleet: InProcessFleet) -> None:
    source, recipe = fleet.trainer._source, fleet.recipe
    rows = choose_rows(source.universe, 3)

    def damaged(asked: object) -> ReadResult:
        return ReadResult({}, {rows[0]: "torn"})

    assert read_shown_steps(rows, damaged, recipe.spec, recipe.instructions) == []
    assert read_shown_steps(rows, source._store.read, recipe.spec, {}) == []
