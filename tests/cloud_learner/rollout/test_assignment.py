"""Which robots try a version: so many, always the same ones, and few others when the fleet changes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.rollout.assignment import split_fleet

FLEETS = st.sets(st.text("abc0123456789", min_size=1, max_size=6), max_size=30)
SHARES = st.floats(0, 1)


@given(FLEETS, st.integers(0, 9), st.integers(0, 9), SHARES, SHARES)
def test_the_split_is_whole_and_small_enough(
    robots: set[str], canary: int, reference: int, share: float, control: float
) -> None:
    split = split_fleet(robots, canary, reference, share, control)
    groups = (split.canaries, split.controls, split.others)
    assert set().union(*groups) == robots
    assert sum(map(len, groups)) == len(robots)
    assert len(split.canaries) <= math.ceil(share * len(robots))
    if len(robots) > 1:
        assert split.others
    if share > 1e-6 and canary and robots:
        assert split.canaries
    assert split == split_fleet(sorted(robots), canary, reference, share, control)


@given(FLEETS, st.text("xyz", min_size=1, max_size=3))
def test_a_robot_that_joins_displaces_few(robots: set[str], joins: str) -> None:
    before = split_fleet(robots, 3, 0, 0.2, 0.0).canaries
    after = split_fleet({*robots, joins}, 3, 0, 0.2, 0.0).canaries
    assert len(before - after) <= 1


def test_the_chosen_differ_by_version() -> None:
    robots = [f"arm{number}" for number in range(10)]
    chosen = [split_fleet(robots, version, 0, 0.2, 0.0).canaries for version in range(1, 40)]
    assert all(len(one) == 2 for one in chosen)
    assert set().union(*chosen) == set(robots)
