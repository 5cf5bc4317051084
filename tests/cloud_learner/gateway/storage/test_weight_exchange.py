"""Versions between gateways: put once, fetched whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.ledger.rows import VersionRow
from cloud_learner.buffer.store.objects import WEIGHTS, open_objects
from cloud_learner.gateway.storage.weight_exchange import WeightExchange
from wire.types import PolicyVersion


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.open(tmp_path / "ledger.sqlite")


@pytest.fixture
def make(tmp_path: Path, ledger: Ledger) -> Callable[[str], WeightExchange]:
    """The exchange of a gateway of that name; a test has it look."""
    (tmp_path / "objects").mkdir()

    def made(name: str) -> WeightExchange:
        (tmp_path / name).mkdir()
        return WeightExchange(tmp_path / name, ledger, open_objects(f"file://{tmp_path / 'objects'}"), look_s=0)

    return made


def look(exchange: WeightExchange) -> None:
    """As the gateway's loop does where there are no threads."""
    exchange.step()
    while (result := exchange.pop_result()) is not None:
        result()


def publish(ledger: Ledger, root: Path, number: int) -> VersionRow:
    data = bytes([number]) * 100_000
    row = VersionRow(PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), 0, 1, 1, 1), f"{number}.st")
    (root / row.path).write_bytes(data)
    ledger.commit_version(row.version, row.path)
    return row


def test_a_version_comes_once_it_was_put(make, ledger: Ledger, tmp_path: Path) -> None:
    here, there, came = make("a"), make("b"), list[PolicyVersion]()
    there.on_arrived = came.append
    row = publish(ledger, tmp_path / "a", 1)
    look(there)
    assert came == []
    assert list((tmp_path / "b").iterdir()) == []
    look(here)
    look(there)
    look(there)
    assert came == [row.version]
    assert (tmp_path / "b" / row.path).read_bytes() == (tmp_path / "a" / row.path).read_bytes()


def test_an_older_one_comes_when_a_robot_asks(make, ledger: Ledger, tmp_path: Path) -> None:
    here, there = make("a"), make("b")
    old = publish(ledger, tmp_path / "a", 1)
    look(here)
    publish(ledger, tmp_path / "a", 2)
    look(here)
    look(there)
    assert not (tmp_path / "b" / old.path).exists()
    there.fetch(old)
    look(there)
    assert (tmp_path / "b" / old.path).exists()


def test_what_was_asked_for_is_looked_for_until_it_was_put(make, ledger: Ledger, tmp_path: Path) -> None:
    here, there, came = make("a"), make("b"), list[PolicyVersion]()
    there.on_arrived = came.append
    old = publish(ledger, tmp_path / "a", 1)
    there.fetch(old)
    look(there)
    assert came == []
    look(here)
    publish(ledger, tmp_path / "a", 2)
    look(there)
    look(there)
    assert came == [old.version]


def test_what_is_damaged_does_not_come(make, ledger: Ledger, tmp_path: Path) -> None:
    here, there, came = make("a"), make("b"), list[PolicyVersion]()
    there.on_arrived = came.append
    row = publish(ledger, tmp_path / "a", 1)
    look(here)
    path = tmp_path / "objects" / WEIGHTS / row.path
    path.write_bytes(b"x" + path.read_bytes()[1:])
    look(there)
    assert came == []
    assert list((tmp_path / "b").iterdir()) == []
