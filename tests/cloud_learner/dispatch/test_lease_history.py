"""Who had which robot, noted with the times it had, whatever becomes of gateway and disk meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from cloud_learner.buffer.ledger import tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.lease_history import CRASH_SLACK_NS, LeaseHistory
from hal.resource.lease import Priority
from wire.errors import DiskFullError
from wire.types import Lease

S = 1_000_000_000
Row = tuple[str, int, str, str, int, int]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger.open(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def rows(ledger: Ledger) -> list[Row]:
    """(robot, number, holder, kind, from, to) in seconds, -1 while it stands."""
    c = tables.lease_history.c
    with ledger.reading() as connection:
        found = connection.execute(sa.select(c.robot, c.number, c.holder, c.kind, c.from_ns, c.to_ns).order_by(c.id))
        return [(*row[:4], row[4] // S, row[5] // S if row[5] >= 0 else -1) for row in found]  # type: ignore[misc]


def lease(number: int, holder: str = "web-1", purpose: str = "operator", priority: int = Priority.operator) -> Lease:
    return Lease("r1", holder, purpose, priority, 10**15, number, S)


def history(ledger: Ledger, now_s: int = 0) -> LeaseHistory:
    return LeaseHistory(ledger, {"lesson", "canary", "main"}.__contains__, now_s * S)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (lease(1), "person"),
        (lease(1, "teleoperator", "teleoperation"), "person"),
        (lease(1, "lesson", "teleoperation", Priority.teleoperation), "person"),
        (lease(1, "canary", "evaluation", Priority.evaluation), "evaluation"),
        (lease(1, "main", "rollout", Priority.rollout), ""),
        (lease(1, "console", "repair", 50), ""),
        (lease(1, "web-1", "estop", Priority.estop), ""),
        (lease(1, "dropped:web-1"), ""),
        (lease(1, "beside the robot"), ""),
    ],
)
def test_only_what_says_something_of_steps_is_noted(ledger: Ledger, one: Lease, kind: str) -> None:
    noted = history(ledger)
    noted.note([one], 5 * S)
    noted.note([one], 6 * S)
    noted.note([], 7 * S)
    assert rows(ledger) == ([("r1", 1, one.holder, kind, 5, 7)] if kind else [])


def test_one_person_follows_the_other(ledger: Ledger) -> None:
    noted = history(ledger)
    noted.note([lease(1)], 5 * S)
    noted.note([lease(2, "web-2")], 9 * S)
    assert rows(ledger) == [("r1", 1, "web-1", "person", 5, 9), ("r1", 2, "web-2", "person", 9, -1)]


def test_what_cannot_be_noted_now_is_noted_later_with_the_times_it_had(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = history(ledger)

    def full(*arguments: object) -> None:
        raise DiskFullError("no space left")

    monkeypatch.setattr(ledger, "note_leases", full)
    noted.note([lease(1)], 5 * S)
    noted.note([], 6 * S)
    noted.note([lease(2)], 7 * S)
    assert rows(ledger) == []
    monkeypatch.undo()
    noted.note([lease(2)], 60 * S)
    assert rows(ledger) == [("r1", 1, "web-1", "person", 5, 6), ("r1", 2, "web-1", "person", 7, -1)]


def test_what_a_killed_gateway_left_open_ends_with_it(ledger: Ledger) -> None:
    history(ledger).note([lease(1)], 100 * S)
    # It stored nothing since: a little after the lease began is all that is sure.
    again = history(ledger, 3600)
    assert rows(ledger) == [("r1", 1, "web-1", "person", 100, 100 + CRASH_SLACK_NS // S)]
    # One that outlives the gateway begins anew, under its number.
    again.note([lease(1)], 3601 * S)
    assert rows(ledger)[1:] == [("r1", 1, "web-1", "person", 3601, -1)]
    # Started again at once, it ended no later than now.
    history(ledger, 3602)
    assert rows(ledger)[1:] == [("r1", 1, "web-1", "person", 3601, 3602)]
