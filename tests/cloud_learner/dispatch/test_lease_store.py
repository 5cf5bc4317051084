"""What the ledger knows of leases while notes of them wait, overtake each other and fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.dispatch.lease_store import LeaseStore
from cloud_learner.dispatch.notes import Note
from hal.resource.lease import Leases
from wire.errors import StorageError


class Notes:
    """Those that wait; the test says when they are done."""

    fault = ""

    def __init__(self) -> None:
        self.waiting: dict[str, Note] = {}

    def submit(self, note: Note) -> None:
        self.waiting[note.key or "reserve"] = note

    def pop(self) -> Note:
        return self.waiting.pop("leases")


class Desk:
    def __init__(self, root: Path) -> None:
        self.ledger = Ledger.open(root / "ledger.sqlite")
        self.notes = Notes()
        self.store = LeaseStore(self.ledger, self.notes, lambda: 5)

    def hold(self, robot: str, who: str) -> int:
        lease, _ = self.store.leases.acquire(robot, who, "operator", 80, 10**12, 0)
        self.note()
        return lease.number

    def give_back(self, robot: str) -> None:
        self.store.leases.release(robot, 0, 0)
        self.note()

    def note(self) -> None:
        self.store.note(self.store.leases.all())

    def known(self) -> dict[str, str]:
        return {lease.robot: lease.holder for lease in self.ledger.kept_leases()}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.ledger.close()


def test_a_note_that_was_replaced_while_the_one_before_was_under_way_leaves_nothing_behind(desk: Desk) -> None:
    desk.hold("robot-0", "web-1")
    first = desk.notes.pop()
    first.run()
    # it is on the device, and nobody has heard of that
    desk.give_back("robot-0")
    desk.hold("robot-1", "web-1")
    desk.give_back("robot-1")
    desk.hold("robot-2", "web-2")
    first.done(None)
    second = desk.notes.pop()
    second.done(second.run())
    assert desk.known() == {"robot-2": "web-2"}
    desk.note()
    assert desk.notes.waiting == {}, "a heartbeat changes nothing"


def test_who_waits_for_the_ledger_hears_of_its_own_lease_and_of_a_failure(desk: Desk) -> None:
    heard: list[str] = []
    desk.store.when_noted(lambda: heard.append("nothing to wait for"), lambda _: None)
    desk.hold("robot-0", "console")
    desk.store.when_noted(lambda: heard.append("first"), lambda error: heard.append(str(error)))
    first = desk.notes.pop()
    desk.hold("robot-1", "console")
    desk.store.when_noted(lambda: heard.append("second"), lambda error: heard.append(str(error)))
    first.done(first.run())
    assert heard == ["nothing to wait for", "first"]
    desk.notes.waiting["leases"].failed(StorageError("away"))
    assert heard[2:] == ["away"]
    second = desk.notes.pop()
    second.done(second.run())
    assert heard[3:] == [] and desk.known() == {"robot-0": "console", "robot-1": "console"}


def test_numbers_are_reserved_ahead_and_go_on_after_a_crash(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_learner.dispatch.lease_store.RESERVED", 10)
    numbers = []
    for _ in range(3):
        # nothing of it is ever noted
        desk.store = LeaseStore(desk.ledger, desk.notes, lambda: 5)
        numbers += [desk.hold(f"robot-{n}", "web-1") for n in range(4)]
    assert numbers == sorted(set(numbers))
    # the next ones are reserved before these are used up, by several gateways in turn
    other = LeaseStore(desk.ledger, Notes(), lambda: 5)
    desk.notes.waiting.clear()
    for n in range(4, 8):
        numbers.append(desk.hold(f"robot-{n}", "web-1"))
    reserve = desk.notes.waiting.pop("reserve")
    reserve.done(reserve.run())
    assert isinstance(other.leases, Leases)
    taken = {other.leases.acquire(f"robot-{n}", "web-2", "operator", 80, 10**12, 0)[0].number for n in range(9)}
    numbers += [desk.hold(f"robot-{n}", "web-1") for n in range(8, 12)]
    assert numbers == sorted(set(numbers)) and not taken & set(numbers)
