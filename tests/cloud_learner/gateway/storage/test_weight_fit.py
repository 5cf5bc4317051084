"""A version that no robot of the fleet could run is not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloud_learner.gateway.storage.weight_fit import require_fit
from tests.cloud_learner.fake_edge import SPEC
from tests.cloud_learner.gateway.storage.test_weight_deltas import Trainer
from tests.wire.weights.files import version_of
from wire.errors import RejectedError
from wire.weights.manifest import RUNTIME, Manifest, TensorEntry

TENSORS = (TensorEntry("w", "F32", (2, 3)),)
PARENT = Manifest(version_of(1, b"a"), b"", tensors=TENSORS, spec_hash="mine", network="flow")


def child(**changes: object) -> Manifest:
    found = {"tensors": TENSORS, "spec_hash": "mine", "network": "flow"} | changes
    return Manifest(version_of(2, b"b"), b"", **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"tensors": (TensorEntry("w", "F32", (2, 4)),)}, "policy version 2"),
        ({"network": "tokens"}, "is of kind 'tokens', and version 1 before it of 'flow': start the trainer with the"),
        ({"runtime": RUNTIME + 1}, "needs runtime .*: install"),
        ({"spec_hash": "another"}, "is for robot spec another, and no robot of this fleet has that one: start the"),
    ],
)
def test_what_does_not_fit_is_named_with_the_way_out(changes: dict[str, object], says: str) -> None:
    with pytest.raises(RejectedError, match=says):
        require_fit(child(**changes), PARENT, {"mine", "hand"})


def test_what_fits_and_what_nobody_can_judge_is_taken() -> None:
    require_fit(child(), PARENT, {"mine"})
    require_fit(child(), None, ())
    require_fit(child(spec_hash="hand"), PARENT, {"mine", "hand"})
    require_fit(child(spec_hash=""), PARENT, {"mine"})


def with_spec(file: bytes, spec_hash: str) -> bytes:
    size = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + size]) | {"__metadata__": {"vla_fleet": json.dumps({"spec_hash": spec_hash})}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[8 + size :]


def test_a_version_for_another_robot_is_no_version(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.ledger.see_robot("robot-0", SPEC, "clock", 1)
    for spec_hash, taken in (("another", False), (SPEC.hash, True)):
        trainer.files.clear()
        trainer.train()
        trainer.files[1] = with_spec(trainer.files[1], spec_hash)
        assert trainer.store.begin(trainer.offer(1, b"")) is None
        if taken:
            assert trainer.send(1, trainer.files[1]) == trainer.version(1)
            continue
        with pytest.raises(RejectedError, match="no robot of this fleet has that one"):
            trainer.send(1, trainer.files[1])
        assert trainer.store.newest() is None
        assert not list(trainer.root.iterdir()), "nothing of it stays"


def test_thousands_of_versions_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, asked = Trainer(tmp_path), []
    for number in range(1, 151):
        version = version_of(number, b"%d" % number)
        name = f"{number}-{version.sha256[:12]}.safetensors"
        (trainer.root / name).write_bytes(b"%d" % number)
        trainer.ledger.commit_version(version, name)
    known = trainer.ledger.version
    monkeypatch.setattr(trainer.ledger, "version", lambda number: asked.append(number) or known(number))
    for _ in range(2):
        assert trainer.store.prune(lambda parents: sorted(parents)[:1], 1e9) == []
    assert sorted(asked) == list(range(1, 151))
