"""Who had which robot, noted with the times it had, whatever becomes of gateway and disk meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import sqlalchemy as sa

from cloud_learner.buffer.ledger import jobs, tables
from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.lease_history import CRASH_SLACK_NS, MOST_WAITING, LeaseHistory
from cloud_learner.dispatch.notes import Note
from cloud_learner.dispatch.robot_holds import SILENT_S, RobotHolds
from hal.resource.lease import Priority
from tests.cloud_learner.dispatch.hall import Hall, commands, page
from wire.errors import StorageError
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
    """Notes that are done when `step` is called, as the thread of storage does them: the newest of each key."""

    def __init__(self) -> None:
        self.waiting: dict[str, Note] = {}
        self.taken: list[Note] = []
        self.fault = ""

    def submit(self, note: Note) -> None:
        assert note.ordered and note.lasting and note.key
        self.waiting[note.key] = note

    def run(self) -> None:
        """Put into the ledger what waits; nobody hears of it yet."""
        self.taken += self.waiting.values()
        for note in self.waiting.values():
            note.run()
        self.waiting.clear()

    def hear(self) -> None:
        for note in self.taken:
            note.done(None)
        self.taken.clear()

    def fail(self, error: Exception) -> None:
        for note in self.waiting.values():
            note.failed(error)

    def step(self) -> None:
        self.run()
        self.hear()


class Reserved:
    """Numbers of leases, which nobody asks for."""

    def skip_to(self, number: int) -> None: ...


class Noted:
    """A history whose notes are done at once, unless they are to `wait`."""

    def __init__(self, ledger: Ledger, now_s: int) -> None:
        self.queue, self.wait = Queue(), False
        self.told: list[str] = []
        is_job = {"lesson", "canary", "main"}.__contains__
        self.history = LeaseHistory(ledger, self.queue, is_job, lambda _, text: self.told.append(text), now_s * S)

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
    history = LeaseHistory(ledger, queue, lambda holder: False, lambda robot, text: None, 0)
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


def test_one_note_of_each_robot_waits_however_often_it_changes_hands(ledger: Ledger) -> None:
    noted = history(ledger)
    noted.wait = True
    for number in range(1, 300):
        both = [lease(2 * number), msgspec.structs.replace(lease(2 * number + 1), robot="r2")]
        noted.note(both, 10 * number * S)
        noted.note(both[:1], (10 * number + 4) * S)
        noted.note([], (10 * number + 5) * S)
        noted.queue.fail(StorageError("away"))
        assert list(noted.queue.waiting) == ["lease history r1", "lease history r2"]
    noted.queue.step()
    found = rows(ledger)
    assert [row[:2] + row[4:] for row in found if row[0] == "r1"] == [
        ("r1", 2 * n, 10 * n, 10 * n + 5) for n in range(1, 300)
    ]
    assert [row[:2] + row[4:] for row in found if row[0] == "r2"] == [
        ("r2", 2 * n + 1, 10 * n, 10 * n + 4) for n in range(1, 300)
    ]
    assert noted.history._waiting == {} and noted.told == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_runs_before_it_is_heard_of_each_lease_is_there_once_with_its_times(ledger: Ledger, seed: int) -> None:
    noted, dice = history(ledger), random.Random(seed)
    noted.wait = True
    wanted: list[list[int]] = []
    for now in range(1, 80):
        held = bool(wanted) and wanted[-1][2] < 0
        if dice.random() < 0.6:
            if held:
                wanted[-1][2] = now
            if not held or dice.random() < 0.5:
                wanted.append([len(wanted) + 1, now, -1])
            held = wanted[-1][2] < 0
            noted.note([lease(wanted[-1][0])] if held else [], now * S)
        for step, share in ((noted.queue.run, 0.5), (noted.queue.hear, 0.4)):
            if dice.random() < share:
                step()
    noted.queue.step()
    assert [[row[1], *row[4:]] for row in rows(ledger)] == wanted
    assert noted.history._waiting == {}


def test_too_much_that_waits_is_told_once_and_begins_again_when_there_is_room(ledger: Ledger) -> None:
    noted = history(ledger)
    noted.wait = True
    for number in range(1, 3000):
        noted.note([lease(number)], 2 * number * S)
        noted.note([], (2 * number + 1) * S)
    assert len(noted.history._waiting["r1"]) == MOST_WAITING
    (text,) = noted.told
    assert f"more than {MOST_WAITING // 2} times" in text
    noted.note([lease(3000), msgspec.structs.replace(lease(3001), robot="r2")], 9000 * S)
    noted.wait = False
    noted.note([lease(3000)], 9001 * S)
    noted.note([lease(3000)], 9002 * S)
    found = rows(ledger)
    assert [row[1] for row in found if row[0] == "r1"] == [*range(1, MOST_WAITING // 2 + 1), 3000]
    assert found[-1] == ("r1", 3000, "web-1", "person", 9002, -1)
    assert [row for row in found if row[0] == "r2"] == [("r2", 3001, "web-1", "person", 9000, 9001)]
    assert len(noted.told) == 1


def test_what_can_never_be_noted_is_in_the_way_of_nothing(ledger: Ledger) -> None:
    noted = history(ledger)
    noted.wait = True
    noted.note([lease(1)], 5 * S)
    noted.queue.fail(ValueError("no such number"))
    noted.queue.waiting.clear()
    noted.note([], 6 * S)
    noted.note([lease(2)], 7 * S)
    noted.queue.step()
    assert rows(ledger) == [("r1", 2, "web-1", "person", 7, -1)]


def test_what_waits_while_the_ledger_is_away_is_bounded_whatever_a_page_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = Hall(tmp_path)
    edge = hall.edge("robot-0")
    hall.gateway.poll()
    storage = hall.gateway._storage
    with monkeypatch.context() as away:

        def fail() -> NoReturn:
            raise StorageError("away")

        away.setattr(Ledger, "together", lambda self: fail())
        for number in range(120):
            page(hall, 1, "hand_back" if number % 2 else "take_over")
            hall.clock.advance(S // 10)
            edge.status()
        lasting = [one.note for one in storage._notes.values() if not one.note.droppable]
        assert len(lasting) <= 5, "of the robot, the leases, the probe"
    hall.gateway.poll()
    found = rows(hall.ledger)
    assert len(found) == len({row[1] for row in found}) == commands(edge).count("take_over") > 20
    assert found == sorted(found, key=lambda row: row[4]) and all(row[5] >= row[4] for row in found)
    hall.ledger.close()
