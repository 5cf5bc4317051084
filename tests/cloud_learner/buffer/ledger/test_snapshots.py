"""A snapshot is a name for a moment: given once, and said to be incomplete when something of it is gone."""

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import Journaled
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec
from wire.errors import InvalidDataError

SPEC = fake_spec()


@pytest.fixture
def ledger(ledger_place):
    ledger = Ledger.open(ledger_place)
    ledger.see_robot("r1", SPEC, "clock", 5)
    yield ledger
    ledger.close()


def commit(ledger, *names):
    for name in names:
        for segment in fake_episode(SPEC, name, steps=4, segment_steps=2):
            ledger.commit_segments([(segment, Journaled(1, 0, 100, "0" * 64), 10)], 11)


def test_it_holds_what_was_there_when_it_was_taken(ledger):
    with pytest.raises(InvalidDataError, match="'none' would be empty: nothing is stored"):
        ledger.take_snapshot("none")
    commit(ledger, "e0", "e1")
    first = ledger.take_snapshot("first")
    assert (first.name, first.row, first.segments, first.steps, first.there) == ("first", 4, 4, 8, 4)
    commit(ledger, "e2")
    ledger.take_snapshot("second")
    assert [(one.name, one.row, one.segments) for one in ledger.snapshots()] == [("first", 4, 4), ("second", 6, 6)]
    assert ledger.snapshots()[0] == first
    assert ledger.snapshot_row("second") == 6


def test_a_name_is_given_once_and_has_to_be_known(ledger):
    with pytest.raises(InvalidDataError, match="no snapshot 'frist': none was taken"):
        ledger.snapshot_row("frist")
    commit(ledger, "e0")
    ledger.take_snapshot("first")
    with pytest.raises(InvalidDataError, match=r"a snapshot 'first' already.*another name"):
        ledger.take_snapshot("first")
    with pytest.raises(InvalidDataError, match="snapshot 'a b' cannot be"):
        ledger.take_snapshot("a b")
    with pytest.raises(InvalidDataError, match=r"there are first.*Did you mean 'first'"):
        ledger.snapshot_row("frist")


def test_what_is_pruned_or_damaged_is_missing_from_it(ledger):
    commit(ledger, "e0", "e1")
    ledger.take_snapshot("first")
    commit(ledger, "e2")
    ledger.take_snapshot("second")
    assert ledger.first_rows(["e1", "e2", "nobody"]) == {"e1": 3, "e2": 5}
    assert ledger.snapshots_of(["e2", "e1"]) == ("first", "second")
    assert ledger.snapshots_of(["e2"]) == ("second",)
    assert ledger.snapshots_of(["nobody"]) == ()
    ledger.prune(["e1"], 9)
    ledger.mark_damaged([1])
    assert [(one.segments, one.there) for one in ledger.snapshots()] == [(4, 1), (6, 3)]
