"""A few observations of the buffer, as robots had them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.buffer.loading.observations import choose_rows, read_observations
from cloud_learner.buffer.store.store import ReadResult
from fleet.config.recipes import fake
from policies.interface.policy import check_observation


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
    found = read_observations(rows, source._store.read, recipe.spec, recipe.instructions)
    assert len(found) == len(rows)
    for observation in found:
        check_observation(recipe.spec, observation)
        assert observation.task in recipe.instructions.values()
        assert all(frame.time_ns <= observation.time_ns for frame in observation.images.values())
    assert len({observation.state.tobytes() for observation in found}) > 1


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

    assert read_observations(rows, damaged, recipe.spec, recipe.instructions) == []
    assert read_observations(rows, source._store.read, recipe.spec, {}) == []
