"""Who had which robot, noted with the times it had, whatever becomes of gateway and disk meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from cloud_learner.buffer.ledger import jobs, tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.lease_history import CRASH_SLACK_NS, LeaseHistory
from cloud_learner.dispatch.notes import Note
from cloud_learner.dispatch.robot_holds import SILENT_S, RobotHolds
from hal.resource.lease import Priority
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


class Queue:
    """Notes that are done when `step` is called."""

    fault = ""

    def __init__(self) -> None:
        self.waiting: list[Note] = []

    def submit(self, note: Note) -> None:
        assert note.ordered and note.lasting
        self.waiting.append(note)

    def step(self) -> None:
        while self.waiting:
            self.waiting.pop(0).run()


class Reserved:
    """Numbers of leases, which nobody asks for."""

    def skip_to(self, number: int) -> None: ...


class Noted:
    """A history whose notes are done at once, unless they are to `wait`."""

    def __init__(self, ledger: Ledger, now_s: int) -> None:
        self.queue, self.wait = Queue(), False
        self.history = LeaseHistory(ledger, self.queue, {"lesson", "canary", "main"}.__contains__, now_s * S)

    def note(self, leases: list[Lease], now_ns: int) -> None:
        self.history.note(leases, now_ns)
        if not self.wait:
            self.queue.step()


def history(ledger: Ledger, now_s: int = 0) -> Noted:
    return Noted(ledger, now_s)


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


def test_what_cannot_be_noted_now_is_noted_later_with_the_times_it_had(ledger: Ledger) -> None:
    noted = history(ledger)
    noted.wait = True
    noted.note([lease(1)], 5 * S)
    noted.note([], 6 * S)
    noted.note([lease(2)], 7 * S)
    assert rows(ledger) == []
    noted.wait = False
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


def test_a_lease_that_stands_begins_anew_when_its_robot_comes_back_from_another_gateway(ledger: Ledger) -> None:
    ledger.gateway = ledger.claim_journal("here", "a", False)
    other = ledger.claim_journal("there", "b", False)
    queue = Queue()
    history = LeaseHistory(ledger, queue, lambda holder: False, 0)
    holds = RobotHolds(ledger, queue, Reserved())
    holds.on_moved = history.forget
    ledger.take_robots(["r1"], SILENT_S, 1)
    history.note([lease(1)], 10 * S)
    queue.step()
    with ledger.writing() as connection:
        jobs.take_robots(connection, other, ["r1"], 0.0, 1)
    history.note([lease(1)], 20 * S)
    assert holds.take("r1", ledger.take_robots(["r1"], 0.0, 1)) == ""
    history.note([lease(1)], 30 * S)
    queue.step()
    history.note([], 40 * S)
    queue.step()
    assert [(begin, end) for *_, begin, end in rows(ledger)] == [(10, 10), (30, 40)]
