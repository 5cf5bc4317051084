from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.scheduler.episodes import (
    HELD_OUT_SEEDS,
    PARTITIONS,
    TRAINING_SEEDS,
    held_out_seeds,
    seed_partition,
    training_seeds,
)
from wire.errors import ConfigError


def test_lanes_never_meet_each_other_demonstrations_or_held_out_seeds() -> None:
    used: set[int] = set()
    for index in range(PARTITIONS):
        seeds = seed_partition(index)
        assert used.isdisjoint(seeds)
        used.update(seeds)
    assert len(used) == len(TRAINING_SEEDS)
    assert (min(used), max(used)) == (500_000, 999_999)
    assert HELD_OUT_SEEDS.start == 1_000_000


def test_more_robots_than_lanes_share_them_from_other_places() -> None:
    starts = [training_seeds(7 + PARTITIONS * n, 0).start - seed_partition(7).start for n in range(4)]
    assert starts == [0, 2250, 1125, 3375]
    assert len({training_seeds(index, 0).start for index in range(1000)}) == 1000


def test_a_robot_goes_on_where_it_was() -> None:
    assert training_seeds(3, 0).start == 515_000
    assert training_seeds(3, 10).start == 515_010
    assert len(training_seeds(3, 4495)) == 5, "the partition starts over"
    assert training_seeds(3, 4500).start == 515_000


@given(st.integers(0, 100_000), st.integers(0, 10**9))
@pytest.mark.slow
def test_no_training_seed_is_ever_held_out(index: int, spent: int) -> None:
    seeds = training_seeds(index, spent)
    assert len(seeds) >= 1
    assert seeds.start in seed_partition(index)
    # with room for aborted ones
    assert seeds[-1] + 500 <= seed_partition(index)[-1]
    assert seeds[-1] not in HELD_OUT_SEEDS


@given(st.integers(-(10**6), 2**32), st.integers(1, 10**6))
def test_no_evaluation_seed_is_ever_practised(first: int, episodes: int) -> None:
    try:
        seeds = held_out_seeds(first, episodes)
    except ConfigError as error:
        assert "first_seed" in str(error)
        assert first != 0
        assert first < 1_000_000 or first + episodes > 2**31
        return
    assert seeds.start == (first or 1_000_000)
    assert seeds[0] not in TRAINING_SEEDS
    assert seeds[0] in HELD_OUT_SEEDS
    assert seeds[-1] in HELD_OUT_SEEDS
