"""What robots are offered of a version: a row of deltas where that is less than the whole, and what is here at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.gateway.storage import weight_pruning
from tests.cloud_learner.gateway.storage.test_weight_deltas import Trainer
from tests.wire.weights.files import floats, version_of
from wire.errors import RejectedError, StorageError
from wire.messages.gateway import FetchDeltas, FetchWeights, Publish
from wire.weights.manifest import Manifest


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_a_robot_is_told_all_deltas_since_the_nearest_version_that_it_has(trainer: Trainer) -> None:
    trainer.publish(6)
    assert trainer.chain(6, held=1) == [2, 3, 4, 5, 6]
    assert trainer.chain(6, held=5) == [6]
    assert trainer.chain(6, held=2, more=4) == [5, 6]
    assert trainer.chain(3, held=6, more=2) == [3]
    assert trainer.chain(6) == trainer.chain(6, held=6) == trainer.chain(1, held=1) == []
    trainer.open()
    assert trainer.chain(6, held=1) == [2, 3, 4, 5, 6]


def test_a_version_of_the_same_number_and_another_hash_is_not_built_upon(trainer: Trainer) -> None:
    trainer.publish(3)
    for sha256 in ("0" * 12, "", trainer.version(2).sha256[:11], "x" * 64):
        assert trainer.store.deltas(FetchDeltas(3, {2: sha256})).deltas == ()
    assert len(trainer.store.deltas(FetchDeltas(3, {2: trainer.version(2).sha256})).deltas) == 1


def test_a_row_of_deltas_that_is_no_smaller_than_the_whole_is_not_offered(trainer: Trainer) -> None:
    trainer.publish(40)
    whole = len(trainer.files[1])
    for first in range(1, 40):
        size = sum(len(trainer.deltas[number]) for number in range(first + 1, 41))
        assert trainer.chain(40, held=first) == (list(range(first + 1, 41)) if size < whole else [])
    assert trainer.chain(40, held=1) == []
    assert trainer.chain(40, held=35) != []


def test_a_version_that_was_published_whole_ends_the_row(trainer: Trainer) -> None:
    trainer.publish(5, whole=(1, 3))
    assert trainer.chain(5, held=2) == trainer.chain(5, held=1) == []
    assert trainer.chain(5, held=3) == [4, 5]


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_delta_that_is_gone_breaks_the_row_and_the_whole_is_to_be_had(trainer: Trainer, asked_before: bool) -> None:
    trainer.publish(5)
    if asked_before:
        assert trainer.chain(5, held=2) == [3, 4, 5]
    else:
        trainer.open()
    trainer.path(4, ".delta").unlink()
    with pytest.raises(RejectedError, match="version 4 has no delta here: fetch the whole"):
        trainer.store.serve(FetchWeights(4, 0, 10, True))
    assert trainer.chain(5, held=2) == trainer.chain(4, held=3) == []
    assert trainer.chain(5, held=4) == [5]
    offer, part = trainer.store.offer(4), trainer.store.serve(FetchWeights(4, 0, 10))
    assert offer is not None and offer.delta is None
    assert part is not None and part.data == trainer.files[4][:10]


def test_a_range_outside_a_delta_is_refused(trainer: Trainer) -> None:
    trainer.publish(2)
    size = len(trainer.deltas[2])
    for offset, wanted in ((size, 1), (-1, 5), (0, 0)):
        with pytest.raises(RejectedError, match="no bytes"):
            trainer.store.serve(FetchWeights(2, offset, wanted, True))
    with pytest.raises(RejectedError, match="has no delta"):
        trainer.store.serve(FetchWeights(1, 0, 1, True))


def test_unknown_versions_have_no_row(trainer: Trainer) -> None:
    assert trainer.chain(7) == []
    assert trainer.store.offer(7) is None


@pytest.mark.parametrize("damaged", [None, b"", b"no manifest", b"of 1"])
def test_a_manifest_that_is_lost_or_damaged_is_made_again(trainer: Trainer, damaged: bytes | None) -> None:
    trainer.publish(3)
    before = [trainer.store.offer(number) for number in (1, 2, 3)]
    for number in (2, 3):
        path = trainer.path(number, ".manifest")
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(trainer.path(1, ".manifest").read_bytes() if damaged == b"of 1" else damaged)
    trainer.open()
    assert [trainer.store.offer(number) for number in (1, 2, 3)] == before
    assert trainer.open().newest() == before[2]
    # a child is compared with it
    trainer.publish()


def test_a_version_that_was_never_described_is_described_without_its_ancestors(trainer: Trainer) -> None:
    data = floats(w=np.zeros(3, np.float32))
    for number in range(1, 6):
        (trainer.root / f"{number}-x.safetensors").write_bytes(data)
        trainer.ledger.commit_version(version_of(number, data), f"{number}-x.safetensors", ())
    newest = trainer.store.newest()
    assert newest is not None
    assert msgspec.msgpack.decode(newest.manifest, type=Manifest).lineage == (4, 3, 2, 1)
    assert [name for name in trainer.names() if "manifest" in name] == ["5.manifest"]


def test_a_version_that_is_committed_is_offered_whatever_its_parent_has(trainer: Trainer) -> None:
    """A gateway starts on what an earlier one took."""
    trainer.publish()
    other = floats(other=np.zeros(3, np.float32))
    path = trainer.root / "2-other.safetensors"
    path.write_bytes(other)
    trainer.ledger.commit_version(version_of(2, other), path.name, ())
    newest = trainer.open().newest()
    assert newest is not None and newest.version.number == 2


def test_a_first_version_has_no_parent(trainer: Trainer) -> None:
    trainer.train()
    data = trainer.files[1]
    trainer.store.begin(Publish(version_of(1, data)))
    assert trainer.send(1, data) is not None
    offer = trainer.store.offer(1)
    assert offer is not None and offer.delta is None
    found = msgspec.msgpack.decode(offer.manifest, type=Manifest)
    assert (found.parent_sha256, found.lineage) == ("", ())


def test_a_version_that_is_pruned_is_gone_with_all_that_belongs_to_it(trainer: Trainer) -> None:
    trainer.publish(4)
    (trainer.root / "somebodys-own.safetensors").write_bytes(b"x")
    assert trainer.chain(4, held=1) == [2, 3, 4]
    asked: list[dict[int, int]] = []

    def removable(parents: Mapping[int, int]) -> list[int]:
        asked.append(dict(parents))
        return [2]

    assert trainer.store.prune(removable) == [2]
    assert asked == [{1: 0, 2: 1, 3: 2, 4: 3}]
    assert not [name for name in trainer.names() if name.startswith("2")]
    assert trainer.store.sizes(2) == (False, 0) and trainer.store.sizes(3) == (True, len(trainer.deltas[3]))
    for _ in range(2):
        assert trainer.chain(4, held=1) == []
        assert trainer.chain(4, held=2) == [3, 4]
        offer = trainer.store.offer(2)
        assert offer is not None and not offer.whole_here
        trainer.open()
    trainer.publish()


def test_a_parent_that_is_pruned_while_its_child_comes_asks_for_the_whole(trainer: Trainer) -> None:
    trainer.publish(2)
    trainer.train()
    trainer.store.begin(trainer.offer(3))
    trainer.store.prune(lambda parents: [2])
    with pytest.raises(StorageError):
        trainer.send(3, trainer.deltas[3])
    assert not [name for name in trainer.names() if name.startswith("3")]
    with pytest.raises(RejectedError, match=r"is gone\. Publish the whole"):
        trainer.store.begin(trainer.offer(3))


def test_what_somebody_fetches_stays_and_what_is_gone_is_refused(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish(4)
    assert trainer.store.serve(FetchWeights(2, 0, 10)) is not None
    assert trainer.store.prune(lambda parents: [1, 2, 3]) == [1, 3]
    with pytest.raises(RejectedError, match="version 1: its file is gone, as only the newest are kept"):
        trainer.store.serve(FetchWeights(1, 0, 10))
    monkeypatch.setattr(weight_pruning, "FETCHED_S", 0.0)
    assert trainer.store.prune(lambda parents: [2]) == [2]
