"""Versions that come as deltas: the gateway rebuilds them, and offers robots what is smaller."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloud_learner.buffer.ledger.ledger import Ledger
from cloud_learner.gateway.storage.weight_store import WeightStore
from tests.wire.weights.files import applied, delta_of, floats, frame_of, pack, version_of, walk
from wire.errors import DiskFullError, RejectedError
from wire.messages.gateway import FetchDeltas, FetchWeights, Publish, WeightBytes
from wire.types import PolicyVersion
from wire.weights.manifest import DeltaForm, Signer, chunk_hashes, hash_bytes, read_manifest

replace = msgspec.structs.replace
SIGNER = Signer(b"x" * 32)


class Trainer:
    """Publishes a random walk into a store that may be opened anew."""

    def __init__(self, root: Path, count: int = 2000) -> None:
        self.root, self.ledger = root / "weights", Ledger.open(root / "ledger.sqlite")
        self.store = self.open()
        self.files: dict[int, bytes] = {}
        self.deltas: dict[int, bytes] = {}
        self._values = iter(walk(count, 50))

    def open(self) -> WeightStore:
        self.store = WeightStore.open(self.root, self.ledger, signer=SIGNER)
        return self.store

    def train(self) -> int:
        """The number of a version that is not published yet."""
        number, trained = len(self.files) + 1, floats(w=next(self._values))
        if number == 1:
            self.files[1] = trained
        else:
            self.deltas[number], self.files[number] = delta_of(self.files[number - 1], trained)
        return number

    def version(self, number: int) -> PolicyVersion:
        return version_of(number, self.files[number])

    def offer(self, number: int, delta: bytes | None = None, size: int = 0, **changes: object) -> Publish:
        delta = self.deltas.get(number, b"") if delta is None else delta
        version = replace(self.version(number), **changes)
        return Publish(version, (), version.parent if delta else 0, size or len(delta))

    def send(self, number: int, data: bytes, part: int = 700) -> PolicyVersion | None:
        done = None
        for at in range(0, len(data), part):
            done = self.store.receive(WeightBytes(number, at, data[at : at + part]))
        return done

    def publish(self, versions: int = 1, whole: Sequence[int] = (1,)) -> int:
        for _ in range(versions):
            number = self.train()
            data = self.files[number] if number in whole else self.deltas[number]
            assert self.store.begin(self.offer(number, b"" if number in whole else None)) is None
            assert self.send(number, data) == self.version(number)
        return number

    def path(self, number: int, suffix: str = ".safetensors") -> Path:
        (found,) = self.root.glob(f"{number}-*{suffix}")
        return found

    def names(self) -> list[str]:
        return sorted(path.name.partition("-")[0] + path.suffix for path in self.root.iterdir())

    def rejected(self, number: int, delta: bytes, says: str, **changes: object) -> None:
        """Wherever it is noticed; then nothing of it is left."""
        before = self.names()
        with pytest.raises(RejectedError, match=says):
            self.store.begin(self.offer(number, delta, **changes))
            self.send(number, delta)
        assert self.names() == before
        assert self.ledger.version(number) is None

    def chain(self, number: int, **held: int) -> list[int]:
        versions = {at: self.version(at).sha256[:12] for at in held.values()}
        return [one.number for one in self.store.deltas(FetchDeltas(number, versions)).deltas]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_a_delta_makes_the_version_and_is_kept_beside_it(trainer: Trainer) -> None:
    trainer.publish(2)
    assert trainer.path(2).read_bytes() == trainer.files[2]
    assert trainer.path(2, ".delta").read_bytes() == trainer.deltas[2]
    assert trainer.names() == ["1.manifest", "1.safetensors", "2.delta", "2.manifest", "2.safetensors"]
    parts = [trainer.store.serve(FetchWeights(2, at, 100, True)) for at in range(0, len(trainer.deltas[2]), 100)]
    assert b"".join(part.data for part in parts if part is not None) == trainer.deltas[2]
    assert all(part is not None and part.delta for part in parts)


def test_robots_are_told_all_of_it_and_whose_it_is(trainer: Trainer) -> None:
    trainer.publish(3)
    for _ in range(2):
        offer = trainer.store.offer(3)
        assert offer is not None
        manifest = read_manifest(offer.manifest, offer.signature, trainer.store.signing_key)
        assert manifest.version == offer.version == trainer.version(3)
        assert manifest.chunks == hash_bytes(trainer.files[3]) == chunk_hashes(trainer.path(3))
        assert (manifest.parent_sha256, manifest.lineage) == (trainer.version(2).sha256, (2, 1))
        base, delta = trainer.version(2).sha256, trainer.deltas[3]
        assert offer.delta == DeltaForm(3, 2, base, len(delta), hash_bytes(delta))
        trainer.open()


def test_what_was_published_does_not_drift_from_what_was_trained(trainer: Trainer) -> None:
    trainer.publish(20)
    trained = floats(w=walk(2000, 20)[-1])
    error = np.abs(np.frombuffer(trained[-8000:], "<f4") - np.frombuffer(trainer.path(20).read_bytes()[-8000:], "<f4"))
    assert error.max() < 0.6 * 1.5 * 1.2e-3


def test_another_hash_than_was_offered_is_refused(trainer: Trainer) -> None:
    trainer.publish()
    trainer.train()
    delta = trainer.deltas[2]
    trainer.rejected(2, delta, "sha256", sha256="0" * 64)
    other, _ = delta_of(trainer.files[1], floats(w=np.zeros(2000, np.float32)))
    trainer.rejected(2, other, "sha256")


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:2], lambda d: d + b"xy", lambda d: b"\xff" * 50])
def test_a_delta_that_is_torn_is_refused(trainer: Trainer, damage) -> None:
    trainer.publish()
    trainer.train()
    trainer.rejected(2, damage(trainer.deltas[2]), "version 2: a delta that")


def test_a_base_that_cannot_be_used_asks_for_the_whole(trainer: Trainer) -> None:
    trainer.publish(2)
    number = trainer.train()
    delta = trainer.deltas[number]
    trainer.rejected(3, delta, "Publish the whole", parent=1, size_bytes=len(trainer.files[3]) + 1)
    with pytest.raises(RejectedError, match=r"a delta of 1, which is not its like. Publish the whole"):
        trainer.store.begin(Publish(trainer.version(3), (), 1, len(delta)))
    for size in (len(trainer.files[3]), len(trainer.files[3]) * 2, -1):
        with pytest.raises(RejectedError, match=r"a delta of -?\d+ bytes. Publish the whole"):
            trainer.store.begin(trainer.offer(3, delta, size))
    trainer.path(2).unlink()
    trainer.rejected(3, delta, "version 2, which it is a delta of, is gone. Publish the whole")
    # which it does
    trainer.store.begin(trainer.offer(3, b""))
    assert trainer.send(3, trainer.files[3]) == trainer.version(3)


@pytest.mark.parametrize("damaged", [b"", b"short", b"x" * 20_000])
def test_a_delta_of_a_base_that_is_damaged_here_is_refused(trainer: Trainer, damaged: bytes) -> None:
    trainer.publish()
    trainer.train()
    trainer.path(1).write_bytes(damaged)
    trainer.rejected(2, trainer.deltas[2], "version 2")


@pytest.mark.parametrize("parent", [2, 3, -1])
def test_a_version_that_is_older_than_its_parent_is_refused(trainer: Trainer, parent: int) -> None:
    trainer.publish()
    trainer.train()
    trainer.rejected(2, b"", "parent", parent=parent)


def test_more_than_was_offered_is_refused(trainer: Trainer) -> None:
    trainer.publish()
    trainer.train()
    trainer.store.begin(trainer.offer(2))
    with pytest.raises(RejectedError, match="longer"):
        trainer.send(2, trainer.deltas[2] + b"x", 10**6)
    assert trainer.names() == ["1.manifest", "1.safetensors"]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_version_that_is_not_finite_is_refused_whole_and_as_a_delta(trainer: Trainer, wrong: float) -> None:
    trainer.publish()
    values = np.frombuffer(trainer.files[1][-8000:], "<f4").copy()
    values[1000] = wrong
    # by other means than `encode`, which refuses it
    before = np.frombuffer(trainer.files[1], np.uint8)
    trainer.files[2] = trainer.files[1][:-8000] + values.tobytes()
    step = np.flatnonzero(before != np.frombuffer(trainer.files[2], np.uint8))
    place = int(step[0]) - int(step[0]) % 4
    piece = (place, 4, "raw", trainer.files[2][place : place + 4])
    delta = frame_of(piece)
    assert applied(trainer.files[1], delta) == trainer.files[2]
    trainer.rejected(2, delta, "'w' is not finite")
    trainer.store.begin(trainer.offer(2, b""))
    with pytest.raises(RejectedError, match="'w' is not finite"):
        trainer.send(2, trainer.files[2])
    assert trainer.names() == ["1.manifest", "1.safetensors"]


def test_other_tensors_than_its_parents_are_refused(trainer: Trainer) -> None:
    trainer.publish(2)
    values = np.frombuffer(trainer.files[2][-8000:], "<f4")
    for other in (
        floats(v=values),
        floats(w=values[:-1]),
        floats(w=values.reshape(40, 50)),
        floats(w=values, b=values[:1]),
        pack({"w": ("F64", values)}),
    ):
        trainer.files[3] = other
        trainer.store.begin(trainer.offer(3, b""))
        with pytest.raises(RejectedError, match=r"policy version 3: '[wvb]' is .*fresh --data"):
            trainer.send(3, other)
        assert trainer.ledger.version(3) is None
    assert not [name for name in trainer.names() if name.startswith("3")]


def test_a_full_disk_leaves_nothing_wherever_it_fills(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.publish()
    trainer.train()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def copy_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1000])
        full()

    before = trainer.names()
    for module, name, fails in ((shutil, "copyfile", copy_half), (os, "fdatasync", full), (os, "fsync", full)):
        with monkeypatch.context() as patch:
            trainer.store.begin(trainer.offer(2))
            patch.setattr(module, name, fails)
            with pytest.raises(DiskFullError, match="version 2"):
                trainer.send(2, trainer.deltas[2])
        assert trainer.names() == before
    # as it does while the manifest is written
    synced = os.fsync
    for good in range(1, 5):
        left = iter(range(good))
        with monkeypatch.context() as patch:
            trainer.store.begin(trainer.offer(2))
            patch.setattr(os, "fsync", lambda file: synced(file) if next(left, None) is not None else full())
            with pytest.raises(DiskFullError):
                trainer.send(2, trainer.deltas[2])
        assert trainer.names() == before
    trainer.store.begin(trainer.offer(2))
    assert trainer.send(2, trainer.deltas[2]) == trainer.version(2)


def test_a_restart_forgets_a_delta_that_was_half_sent(trainer: Trainer) -> None:
    trainer.publish()
    trainer.train()
    trainer.store.begin(trainer.offer(2))
    trainer.send(2, trainer.deltas[2][:-5])
    assert "2.part" in trainer.names()
    trainer.open()
    assert trainer.names() == ["1.manifest", "1.safetensors"]
    with pytest.raises(RejectedError, match="not offered"):
        trainer.store.receive(WeightBytes(2, 0, b"x"))
    trainer.store.begin(trainer.offer(2))
    assert trainer.send(2, trainer.deltas[2]) == trainer.version(2)
    # the trainer did not hear of it
    assert trainer.open().begin(trainer.offer(2)) == trainer.version(2)


def test_whoever_lost_a_race_for_a_number_leaves_nothing(trainer: Trainer) -> None:
    trainer.publish()
    trainer.train()
    trainer.store.begin(trainer.offer(2))
    other = version_of(2, b"of a trainer at another gateway")
    trainer.ledger.commit_version(other, "2-other.safetensors", ())
    with pytest.raises(RejectedError):
        trainer.send(2, trainer.deltas[2])
    assert trainer.names() == ["1.manifest", "1.safetensors"]
