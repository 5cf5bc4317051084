"""Versions that were published at another gateway of the same ledger: offered once they are here and signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.buffer.location import BufferLocation
from cloud_learner.buffer.store.objects import open_objects
from cloud_learner.gateway.storage.weight_exchange import WeightExchange
from cloud_learner.gateway.storage.weight_store import WeightStore
from tests import samples
from tests.cloud_learner.dispatch.hall import Hall
from tests.wire.weights.files import version_of
from wire.messages import Message
from wire.messages.fleet import ChangeVersions, VersionAction
from wire.messages.gateway import Publish, ShadowRequest, VersionAvailable, WeightBytes
from wire.weights.manifest import Signer, read_manifest

SIGNER = Signer(b"x" * 32)


class Elsewhere:
    """The versions of a gateway whose robots are none of ours."""

    def __init__(self, hall: Hall, root: Path) -> None:
        ledger = Ledger.open(BufferLocation(hall.root).ledger_location)
        self.weights = WeightStore.open(root / "weights", ledger, signer=SIGNER)
        self.exchange = WeightExchange(root / "weights", ledger, open_objects(f"file://{root / 'objects'}"), 0)

    def publish(self, number: int) -> None:
        data = samples.weights(number, 300)
        self.weights.begin(Publish(version_of(number, data, parent=number - 1)))
        assert self.weights.receive(WeightBytes(number, 0, data)) is not None

    def share(self) -> None:
        """What it published last."""
        self.exchange.step()


@pytest.fixture
def hall(tmp_path: Path) -> Hall:
    (tmp_path / "objects").mkdir()
    return Hall(tmp_path / "here", signer=SIGNER, objects=tmp_path / "objects")


def offers(messages: list[Message]) -> list[VersionAvailable]:
    """Those as well that are to be computed alone."""
    found = []
    for message in messages:
        offer = message.offer if isinstance(message, ShadowRequest) else message
        if isinstance(offer, VersionAvailable):
            read_manifest(offer.manifest, offer.signature, SIGNER.public)  # robots run nothing that is not signed
            found.append(offer)
    return found


def test_a_robot_is_offered_a_version_when_it_is_here_and_signed(tmp_path: Path, hall: Hall) -> None:
    elsewhere = Elsewhere(hall, tmp_path)
    elsewhere.publish(1)
    elsewhere.publish(2)
    # started while it is not here yet
    hall = hall.killed()
    edge = hall.edge("robot-0")
    hall.pass_time(3)
    assert offers(edge.received) == []
    elsewhere.share()
    hall.pass_time(1)
    assert [offer.version.number for offer in offers(edge.received)] == [2]


def test_an_older_version_is_fetched_and_offered_when_a_robot_is_to_have_it(tmp_path: Path, hall: Hall) -> None:
    elsewhere = Elsewhere(hall, tmp_path)
    edge, other, console = hall.edge("robot-0"), hall.edge("robot-1"), hall.peer()
    for number in (1, 2):
        elsewhere.publish(number)
        elsewhere.share()
        if number == 1:
            hall.pass_time(1)
    hall.pass_time(1)
    # as on a gateway that was set up later
    for path in (tmp_path / "here" / "weights").iterdir():
        if path.name.startswith("1"):
            path.unlink()
    hall = hall.killed()
    hall.pass_time(1)
    edge.received.clear()
    other.received.clear()
    console = hall.peer("console@1")
    assert hall.ask(console, ChangeVersions(1, VersionAction.pin, 1, "robot-0")).refused == ""
    assert hall.ask(console, ChangeVersions(2, VersionAction.shadow, 1, "robot-1")).refused == ""
    hall.pass_time(1)
    for robot in (edge, other):
        assert [offer.version.number for offer in offers(robot.received)] == [1]
    newcomer = hall.edge("robot-2")
    assert [offer.version.number for offer in offers(newcomer.received)] == [2], "the newest stays the newest"


def test_what_a_robot_is_to_have_no_longer_is_not_offered_when_it_comes(tmp_path: Path, hall: Hall) -> None:
    elsewhere = Elsewhere(hall, tmp_path)
    edge, console = hall.edge("robot-0"), hall.peer()
    elsewhere.publish(1)
    elsewhere.share()
    hall.pass_time(1)
    elsewhere.publish(2)
    hall = hall.killed()
    hall.pass_time(1)
    edge.received.clear()
    console = hall.peer("console@1")
    assert hall.ask(console, ChangeVersions(1, VersionAction.pin, 1, "robot-0")).refused == ""
    elsewhere.share()
    hall.pass_time(1)
    assert {offer.version.number for offer in offers(edge.received)} <= {1}
