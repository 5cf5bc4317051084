"""Two trainers that publish at one gateway: one version comes after the other, and none is lost."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.common.in_process_fleet import InProcessFleet
from cloud_learner.training.publishing import uploader
from fleet.config.data_directory import DataDirectory
from fleet.config.recipes import fake
from fleet.launch import learning
from tests import samples
from tests.cloud_learner.dispatch.hall import Hall
from tests.wire.weights.files import version_of
from wire.messages import Message
from wire.messages.gateway import Nack, Publish, Published, Rejection, WeightBytes
from wire.transport.memory_channel import MemoryClient

S = 1_000_000_000
RECIPE = replace(fake(), checkpoint_every_s=1e9, training=replace(fake().training, publish_every_s=1.0, batch=8))


def said(hall: Hall, peer: MemoryClient) -> list[Message]:
    hall.gateway.poll()
    return [one for one in hall.received(peer) if isinstance(one, Nack | Published | Rejection)]


def offer(peer: MemoryClient, number: int, seed: int) -> bytes:
    """The first half of its weights is sent as well, the second one returned."""
    data = samples.weights(seed, 300)
    peer.send(Publish(version_of(number, data)))
    half = len(data) // 2
    peer.send(WeightBytes(number, 0, data[:half]))
    return data[half:]


def test_who_comes_second_is_told_to_wait_and_ends_nobodys_upload(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    one, other = hall.peer("trainer"), hall.peer("trainer2")
    rest = offer(one, 1, 1)
    hall.gateway.poll()
    more = offer(other, 1, 2)
    other.send(WeightBytes(1, len(more), more))
    (told,) = said(hall, other)
    assert isinstance(told, Nack)
    assert told.reason.startswith("another trainer (trainer) is publishing version 1; ")
    one.send(WeightBytes(1, len(samples.weights(1, 300)) - len(rest), rest))
    assert [type(message) for message in said(hall, one)] == [Published]
    rest = offer(other, 2, 2)
    other.send(WeightBytes(2, len(samples.weights(2, 300)) - len(rest), rest))
    assert [type(message) for message in said(hall, other)] == [Published]


def test_what_is_stored_is_confirmed_while_another_one_publishes(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    one, other = hall.peer("trainer"), hall.peer("trainer2")
    data = samples.weights(1, 300)
    one.send(Publish(version_of(1, data)))
    one.send(WeightBytes(1, 0, data))
    assert [type(message) for message in said(hall, one)] == [Published]
    offer(other, 2, 2)
    hall.gateway.poll()
    one.send(Publish(version_of(1, data)))
    assert [type(message) for message in said(hall, one)] == [Published]


@pytest.mark.parametrize("refused", [False, True])
def test_who_is_silent_or_refused_holds_up_nobody(tmp_path: Path, refused: bool) -> None:
    hall = Hall(tmp_path)
    one, other = hall.peer("trainer"), hall.peer("trainer2")
    offer(one, 1, 1)
    hall.gateway.poll()
    if refused:
        one.send(WeightBytes(1, 7, b"out of order"))
        assert [type(message) for message in said(hall, one)] == [Rejection]
    else:
        hall.clock.advance(29 * S)
        offer(other, 1, 2)
        assert [type(message) for message in said(hall, other)] == [Nack]
        hall.clock.advance(2 * S)
    rest = offer(other, 1, 2)
    hall.gateway.poll()
    # what it still had under way is no part of this one
    one.send(WeightBytes(1, 7, b"late"))
    hall.gateway.poll()
    other.send(WeightBytes(1, len(samples.weights(2, 300)) - len(rest), rest))
    assert [type(message) for message in said(hall, other)] == [Published]
    row = hall.ledger.newest_version()
    assert row is not None and row.version.sha256 == hashlib.sha256(samples.weights(2, 300)).hexdigest()


@dataclass(frozen=True)
class OwnState(DataDirectory):
    """What a second trainer keeps of its own."""

    @property
    def checkpoints(self) -> Path:
        return self.root / "second" / "checkpoints"

    @property
    def published(self) -> Path:
        return self.root / "second" / "published"


def test_versions_of_two_real_trainers_come_one_after_the_other_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "PART_BYTES", 20_000)
    monkeypatch.setattr(uploader, "WINDOW_BYTES", 20_000)
    monkeypatch.setattr(uploader, "MAX_UNANSWERED", 1)
    fleet = InProcessFleet(tmp_path, RECIPE, robots=0)
    line = fleet.server.connect("trainer2")
    second = learning.make_trainer(RECIPE, "trainer2", OwnState(tmp_path), line, 1, clock=fleet.clock)
    trainers, told = (fleet.trainer, second), list[Message]()
    send = fleet.server.send

    def noted(peer: str, message: Message) -> bool:
        told.append(message)
        return send(peer, message)

    monkeypatch.setattr(fleet.server, "send", noted)
    try:
        for _ in range(3000):
            fleet.clock.advance(S // 10)
            for trainer in trainers:
                trainer.step()
            fleet.gateway.poll()
            if min(trainer.counts.published for trainer in trainers) >= 3:
                break
        assert any(isinstance(message, Nack) for message in told)
        assert [message.reason for message in told if isinstance(message, Rejection)] == []
        for trainer in trainers:
            counts = trainer.counts
            assert counts.published >= 3
            assert counts.published + (trainer._versions._prepared is not None) == counts.publishing.made
        rows = fleet.ledger.versions()
        assert [row.version.number for row in rows] == list(range(1, len(rows) + 1))
    finally:
        second.close()
        fleet.close()
