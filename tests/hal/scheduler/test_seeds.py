from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.scheduler.seeds import (
    HELD_OUT_SEEDS,
    LANES,
    TRAINING_SEEDS,
    held_out,
    lane,
    training_stretch,
)
from wire.errors import ConfigError


def test_lanes_never_meet_each_other_demonstrations_or_held_out_seeds() -> None:
    used: set[int] = set()
    for index in range(LANES):
        seeds = lane(index)
        assert used.isdisjoint(seeds)
        used.update(seeds)
    assert len(used) == len(TRAINING_SEEDS)
    assert (min(used), max(used)) == (500_000, 999_999)
    assert HELD_OUT_SEEDS.start == 1_000_000
    with pytest.raises(ConfigError, match="numbers begin at 0"):
        lane(-1)


def test_more_robots_than_lanes_share_them_from_other_places() -> None:
    starts = [training_stretch(7 + LANES * n, 0).first_seed - lane(7).start for n in range(4)]
    assert starts == [0, 2250, 1125, 3375]
    assert len({training_stretch(index, 0).first_seed for index in range(1000)}) == 1000


def test_a_robot_goes_on_where_it_was() -> None:
    assert training_stretch(3, 0).first_seed == 515_000
    assert training_stretch(3, 10).first_seed == 515_010
    assert training_stretch(3, 0, 7).episodes == 7
    assert training_stretch(3, 4495, 7).episodes == 5, "the lane starts over"
    assert training_stretch(3, 4500).first_seed == 515_000


@given(st.integers(0, 100_000), st.integers(0, 10**9), st.integers(0, 10**6))
@pytest.mark.slow
def test_no_training_seed_is_ever_held_out(index: int, spent: int, episodes: int) -> None:
    stretch = training_stretch(index, spent, episodes)
    assert stretch.episodes >= 1
    assert stretch.first_seed in lane(index)
    # with room for aborted ones
    assert stretch.seeds[-1] + 500 <= lane(index)[-1]
    assert stretch.seeds[-1] not in HELD_OUT_SEEDS


@given(st.integers(-(10**6), 2**32), st.integers(1, 10**6))
def test_no_evaluation_seed_is_ever_practised(first: int, episodes: int) -> None:
    try:
        stretch = held_out(first, episodes)
    except ConfigError as error:
        assert "first_seed" in str(error)
        assert first != 0
        assert first < 1_000_000 or first + episodes > 2**31
        return
    assert stretch.first_seed == (first or 1_000_000)
    assert stretch.seeds[0] not in TRAINING_SEEDS
    assert stretch.seeds[0] in HELD_OUT_SEEDS
    assert stretch.seeds[-1] in HELD_OUT_SEEDS
