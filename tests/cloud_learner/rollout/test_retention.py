"""Which files may go: none that anybody needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloud_learner.rollout.retention import removable

NUMBERS = st.sets(st.integers(1, 60))


def test_the_newest_stay_and_what_is_needed() -> None:
    versions, parents = range(1, 31), {number: number - 1 for number in range(1, 31)}
    assert removable(versions, parents, needed=(), promoted=(), keep=20) == list(range(1, 10))
    assert removable(versions, parents, needed=(5,), promoted=(7,), keep=20) == [1, 2, 3, 8, 9]


@given(NUMBERS, NUMBERS, NUMBERS, st.integers(0, 30), st.dictionaries(st.integers(1, 60), st.integers(0, 60)))
def test_nothing_goes_that_anybody_needs(
    versions: set[int], needed: set[int], promoted: set[int], keep: int, parents: dict[int, int]
) -> None:
    gone = set(removable(versions, parents, needed, promoted, keep))
    left = versions - gone
    assert gone <= versions
    assert not gone & needed
    assert not gone & {parents.get(number) for number in needed}
    assert not versions or max(versions) in left
    assert not versions & promoted or max(versions & promoted) in left
    assert len(left) >= min(keep, len(versions))
