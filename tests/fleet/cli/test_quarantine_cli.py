"""`vla-fleet quarantine` beside a gateway that runs on the same buffer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.store.quarantine import QuarantineReason
from cloud_learner.buffer.store.store import SegmentStore
from cloud_learner.gateway.storage.ingest import Ingest
from tests.cloud_learner.buffer.synthetic import fake_episode, fake_spec, same_segment
from tests.command_line import vla_fleet
from wire.transport.keys import Teaching, make_keys

SPEC = fake_spec(1, size=16)
HUMAN = 1


class Fleet:
    """The storing side of a gateway that runs, with two robots of which nobody knows who had them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ledger: Ledger
        self.store: SegmentStore
        self.ledger, self.store = BufferLocation(root).open_writer()
        self.ingest = Ingest(self.ledger, self.store)
        self.ingest.open()
        for robot in ("r1", "r2"):
            self.ledger.see_robot(robot, SPEC, "clock", 1)

    def quarantine(self, *words: str, status: int = 0) -> str:
        done = vla_fleet("quarantine", *words, "--data", str(self.root))
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def ids(self, *words: str) -> list[str]:
        return [one["id"] for one in json.loads(self.quarantine("list", "--json", *words))]

    def kept_apart(self, name: str, robot: str = "r1", spec=SPEC) -> list:
        segments = fake_episode(spec, name, robot=robot, actor=[HUMAN] * 160, steps=160)
        for segment in segments:
            assert self.ingest.accept(robot, segment, time.monotonic_ns()).outcome == "quarantined"
        return list(segments)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path / "data")
    yield made
    made.store.close()
    made.ledger.close()


def test_what_is_kept_apart_is_listed_by_robot_and_reason_and_shown(fleet: Fleet) -> None:
    assert fleet.quarantine("list") == ""
    fleet.kept_apart("a")
    fleet.kept_apart("b", "r2")
    other = fake_spec(1, size=16, state_dim=3)
    fleet.kept_apart("c", spec=other)
    copy = fleet.store.quarantine.put("q/0", b"damaged bytes", "its hash is another one", reasons=("damaged",))
    assert len(fleet.ids()) == 7
    assert {one.partition("-")[0] for one in fleet.ids("--robot", "r1")} == {"a", "c"}
    assert {one.partition("-")[0] for one in fleet.ids("--reason", "unconfirmed")} == {"a", "b"}
    assert fleet.ids("--reason", "damaged") == [copy]
    assert {one.partition("-")[0] for one in fleet.ids("--reason", "is unknown")} == {"c"}
    first = json.loads(fleet.quarantine("list", "--json"))[0]
    assert first["robot"] == "r1" and first["reasons"] == ["unconfirmed"] and first["bytes"] > 1000
    listed = fleet.quarantine("list", "--robot", "r2")
    assert "unconfirmed: it says that 80 steps, ticks 0 to 79, are a human's" in listed
    shown = fleet.quarantine("show", fleet.ids("--robot", "r2")[0])
    assert "state: float32[80, 4] from" in shown and "frames: {'camera0': " in shown
    assert "no message" in fleet.quarantine("show", copy)
    assert "there is no 'a-9'" in fleet.quarantine("show", "a-9", status=1)


def test_a_person_admits_what_is_right_and_the_ledger_keeps_who(fleet: Fleet) -> None:
    segments = fleet.kept_apart("a")
    names = fleet.ids()
    said = fleet.quarantine("admit", *reversed(names), "--author", "anna")
    assert said.splitlines() == [f"{name}: stored; it is no longer in quarantine." for name in names]
    assert fleet.ids() == []
    row = fleet.ledger.episode("a")
    assert row is not None and (row.segments, row.human_steps, row.outcome) == (2, 160, "success")
    at = fleet.ledger.segment("a/1")
    assert at is not None and same_segment(fleet.store.read([at.row]).segments[at.row], segments[1])
    assert [event.detail.partition(":")[0] for event in fleet.ledger.events()] == [
        "a/0 was admitted by anna",
        "a/1 was admitted by anna",
    ]
    # The gateway that runs knows them, and goes on.
    assert fleet.ingest.accept("r1", segments[0], 1).outcome == "duplicate"
    # All of a robot, or of a reason; never simply all.
    fleet.kept_apart("b", "r2")
    assert "say which" in fleet.quarantine("admit", status=1) and "say which" in fleet.quarantine("drop", status=1)
    assert fleet.quarantine("admit", "--robot", "r1") == ""
    assert fleet.quarantine("admit", "--robot", "r2", "--reason", "unconfirmed").count(": stored") == 2


def test_what_cannot_be_stored_stays_and_says_why(fleet: Fleet) -> None:
    spec = fake_spec(1, size=16, state_dim=3)
    fleet.kept_apart("c", spec=spec)
    copy = fleet.store.quarantine.put("q/0", b"damaged bytes", "its hash is another one")
    said = fleet.quarantine("admit", *fleet.ids(), status=1)
    assert said.count("stays in quarantine: robot spec") == 2 and "no segment that can be stored" in said
    assert len(fleet.ids()) == 3
    # Its robot says hello. It lay there as invalid; that it was a human's is another question, answered by the key.
    fleet.ledger.see_robot("r1", spec, "clock", 1)
    first, second = fleet.ids("--robot", "r1")
    assert "stays in quarantine: unconfirmed" in fleet.quarantine("admit", first, status=1)
    assert "stored" in fleet.quarantine("admit", first)
    make_keys(fleet.root / "keys", ["r1"], teaches=[Teaching.beside])
    assert "stored" in fleet.quarantine("admit", second)
    assert fleet.ids() == [copy]


def test_what_is_dropped_is_named_and_gone(fleet: Fleet) -> None:
    fleet.kept_apart("a")
    fleet.kept_apart("b", "r2")
    first = fleet.ids()[0]
    said = fleet.quarantine("drop", first)
    assert f"{first} of r1 (" in said and "is deleted, which was kept apart as unconfirmed: it says" in said
    assert fleet.quarantine("drop", "--robot", "r2", "--reason", QuarantineReason.unconfirmed).count("is deleted") == 2
    assert len(fleet.ids()) == 1
    assert f"there is no {first!r}" in fleet.quarantine("drop", first, status=1)
