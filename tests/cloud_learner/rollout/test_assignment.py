"""Which robots try a version: so many, always the same ones, and few others when the fleet changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.rollout.assignment import split_by_shape, split_fleet

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
    assert len(split.canaries) <= max(share * len(robots) + 1e-9, 1)
    assert len(split.controls) <= max(control * len(robots) + 1e-9, 1)
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


@given(st.dictionaries(st.text("ab0123", min_size=1, max_size=4), st.sampled_from("xyz")), SHARES, SHARES)
def test_robots_are_compared_with_robots_of_their_shape(robots: dict[str, str], share: float, control: float) -> None:
    split = split_by_shape(robots, 2, 1, share, control)
    assert split.canaries | split.controls | split.others == robots.keys()
    assert len(split.canaries) + len(split.controls) + len(split.others) == len(robots)
    of = {shape: {one for one in robots if robots[one] == shape} for shape in robots.values()}
    for shape, alike in of.items():
        if len(alike) > 1:
            assert split.others & alike, f"all of {shape} try it, and none is left to compare with"
            assert bool(split.canaries & alike) == (share > 0)
        elif any(len(others) > 1 for others in of.values()):
            assert alike <= split.others
        else:
            assert alike <= (split.canaries if share else split.others)


@pytest.mark.parametrize(
    ("robots", "share", "count"),
    [(1, 0.2, 1), (3, 0.2, 1), (9, 0.2, 1), (10, 0.2, 2), (14, 0.2, 2), (10, 0.3, 3), (5, 1.0, 4)],
)
def test_a_share_is_rounded_down_to_one_robot_at_least(robots: int, share: float, count: int) -> None:
    names = [f"arm{number}" for number in range(robots)]
    assert len(split_fleet(names, 2, 1, share, 0.0).canaries) == count
    assert len(split_fleet(names, 0, 1, 0.0, share).controls) == min(count, robots - 1)
