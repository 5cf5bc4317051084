"""Checkpoints: whole or not there, two kept, damage noticed and passed over."""

import hashlib
import json
import logging
import os
import pickle

import numpy as np
import pytest
import torch

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.buffer.files import TEMPORARY
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.learner import Learner
from policies.conformance.check import example_batch
from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.training.batches import Batches
from wire.errors import CorruptDataError, DiskFullError, StorageError
from wire.types import Dimension, RobotSpec

SPEC = RobotSpec("small", (Dimension("x", "m", -1.0, 1.0),), (Dimension("dx", "cm", -1.0, 1.0),), (), 20.0)
CONFIG, TRAINING = HGDagger(draws=2), TrainingConfig(batch=4, warmup_steps=3)


def learner(seed=0):
    return Learner(
        FlowPolicy(SPEC, FlowConfig(state_dim=1, action_dim=1, horizon=2, width=8, layers=2), seed),
        CONFIG,
        TRAINING,
        seed,
    )


def train(subject, first, count):
    return [subject.step(Batches(example_batch(SPEC, 2, seed)))["loss"] for seed in range(first, first + count)]


def numbers(directory):
    return sorted(path.name.partition("-")[0] for path in directory.iterdir())


def test_resume_continues_bit_for_bit(tmp_path):
    torch.set_num_threads(1)
    first = learner()
    train(first, 0, 5)
    checkpoint.save(tmp_path, first.state(), {"version": 7, "newest_segment": 12})
    expected = train(first, 5, 5)
    second = learner(seed=3)
    found = checkpoint.load_newest(tmp_path)
    assert found.meta == {"version": 7, "newest_segment": 12}
    second.restore(found.state)
    assert second.gradient_steps == 5
    assert train(second, 5, 5) == expected
    assert second.weights() == first.weights()


def test_none_is_not_an_error(tmp_path):
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "missing") is None


def test_the_last_two_are_kept(tmp_path):
    subject = learner()
    for number in range(4):
        checkpoint.save(tmp_path / "deep" / "er", subject.state(), {"number": number})
    assert numbers(tmp_path / "deep" / "er") == ["00000003", "00000004"]
    assert checkpoint.load_newest(tmp_path / "deep" / "er").meta == {"number": 3}


def test_the_newest_of_another_directory_becomes_the_newest_or_nothing_does(tmp_path, monkeypatch):
    theirs, mine = learner(), learner(seed=3)
    for number in range(3):
        checkpoint.save(tmp_path / "mine", mine.state(), {"number": number})
    train(theirs, 0, 2)
    checkpoint.save(tmp_path / "theirs", theirs.state(), {"number": 7}, {"place": 1})
    assert checkpoint.copy_newest(tmp_path / "nothing", tmp_path / "mine") is None
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "move_durably", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(DiskFullError):
            checkpoint.copy_newest(tmp_path / "theirs", tmp_path / "mine")
    assert checkpoint.load_newest(tmp_path / "mine").meta == {"number": 2}
    assert checkpoint.copy_newest(tmp_path / "theirs", tmp_path / "mine").name.startswith("00000004-")
    assert numbers(tmp_path / "mine") == ["00000002", "00000003", "00000004"], "and no half one"
    found = checkpoint.load_newest(tmp_path / "mine")
    assert (found.meta, found.sampling) == ({"number": 7}, {"place": 1})
    mine.restore(found.state)
    assert train(mine, 2, 2) == train(theirs, 2, 2)


def shard(path):
    (found,) = path.glob("*.safetensors")
    return found


def cut(path):
    shard(path).write_bytes(shard(path).read_bytes()[:-5])


def flip(path):
    data = bytearray(shard(path).read_bytes())
    data[len(data) // 2] ^= 1
    shard(path).write_bytes(data)


def edit_manifest(path):
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes().replace(b'"version":0', b'"version":7'))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        edit_manifest,
        lambda path: shard(path).write_bytes(b""),
        lambda path: shard(path).unlink(),
        lambda path: (path / "meta.json").unlink(),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "meta.json").write_text("{}"),
        lambda path: (path / "more.safetensors").write_bytes(shard(path).read_bytes()),
        lambda path: path.rename(path.with_name(f"00000002-{'0' * 64}")),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage):
    subject = learner()
    checkpoint.save(tmp_path, subject.state(), {"number": 1})
    damage(checkpoint.save(tmp_path, subject.state(), {"number": 2}))
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load_newest(tmp_path).meta == {"number": 1}
    assert "00000002" in caplog.text
    assert "Falling back" in caplog.text
    # the next one takes a new number and the damaged one goes with time
    checkpoint.save(tmp_path, subject.state(), {"number": 3})
    assert checkpoint.load_newest(tmp_path).meta == {"number": 3}
    assert numbers(tmp_path) == ["00000002", "00000003"]


def test_the_best_by_held_out_success_stays_as_well(tmp_path):
    state = learner().state()
    for number in range(1, 7):
        success = {version: {2: 0.5, 3: 0.9, 5: 0.4}[version] for version in (2, 3, 5) if version < number}
        checkpoint.save(tmp_path, state, {"version": number}, success=success)
    assert numbers(tmp_path) == ["00000003", "00000005", "00000006"]
    # a better one takes its place
    checkpoint.save(tmp_path, state, {"version": 7}, success={3: 0.9, 6: 0.95})
    checkpoint.save(tmp_path, state, {"version": 8}, success={3: 0.9, 6: 0.95})
    assert numbers(tmp_path) == ["00000006", "00000007", "00000008"]
    assert checkpoint.load_newest(tmp_path).meta == {"version": 8}


def test_all_damaged_is_an_error_with_a_way_out(tmp_path):
    cut(checkpoint.save(tmp_path, learner().state(), {}))
    with pytest.raises(CorruptDataError, match="Move them away"):
        checkpoint.load_newest(tmp_path)


def test_a_checkpoint_that_was_never_finished_is_ignored_and_removed(tmp_path):
    half = tmp_path / f"next{TEMPORARY}"
    half.mkdir()
    (half / "learner.json").write_bytes(b"half")
    assert checkpoint.load_newest(tmp_path) is None
    checkpoint.save(tmp_path, learner().state(), {})
    assert numbers(tmp_path) == ["00000001"]


def test_one_of_the_format_before_is_not_passed_over(tmp_path):
    (tmp_path / f"00000003-{'a' * 64}.safetensors").write_bytes(b"as it was")
    with pytest.raises(StorageError, match="has format 1, this program reads 2; use the vla-fleet that wrote it, or"):
        checkpoint.load_newest(tmp_path)
    checkpoint.save(tmp_path, learner().state(), {"number": 4})
    assert checkpoint.load_newest(tmp_path).meta == {"number": 4}


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch, call):
    subject = learner()
    checkpoint.save(tmp_path, subject.state(), {"number": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(DiskFullError, match="writing a checkpoint"):
            checkpoint.save(tmp_path, subject.state(), {"number": 2})
    assert numbers(tmp_path) == ["00000001"]
    assert checkpoint.load_newest(tmp_path).meta == {"number": 1}


def test_another_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FORMAT", 3)
        checkpoint.save(tmp_path, learner().state(), {})
    with pytest.raises(StorageError, match="format 3"):
        checkpoint.load_newest(tmp_path)


def test_moments_and_the_average_are_in_it(tmp_path):
    subject = learner()
    train(subject, 0, 1)
    checkpoint.save(tmp_path, subject.state(), {})
    names = checkpoint.load_newest(tmp_path).state.tensors.keys()
    for name in (
        "policy/optimizer/exp_avg/fast.latent.weight",
        "policy/optimizer/step/fast.latent.bias",
        "policy/average/normalizer.std",
    ):
        assert name in names
    assert np.isfinite(train(subject, 1, 1)).all()


def vouched(directory, files, format=checkpoint.FORMAT, number=1):
    """A checkpoint whose name and manifest vouch for it, whoever made it."""
    said = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = json.dumps({"format": format, "version": 0, "files": said}).encode()
    path = directory / f"{number:08d}-{hashlib.sha256(manifest).hexdigest()}"
    path.mkdir()
    for name, data in {**files, "manifest.json": manifest}.items():
        (path / name).write_bytes(data)
    return path


def headed(tensors, places, data=0, header=None):
    """A safetensors file; `places` is what it says of its shards."""
    about = {"__metadata__": {"DCP_SHARDING_INFO": places if isinstance(places, str) else json.dumps(places)}}
    text = json.dumps({**tensors, **about}).encode() if header is None else header
    return len(text).to_bytes(8, "little") + text + bytes(data)


def floats(*shape, first=0):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [first, first + 4 * int(np.prod(shape))]}


def at(*offsets):
    return {"saved_offsets": list(offsets)}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was run",)


SHARD = "shard-00001-model-00001-of-00001.safetensors"
SOUND = headed({"a": floats(2)}, {"a": at(0)}, 8)
REST = {"learner.json": b"{}", "meta.json": b"{}", "sampling-00000.json": b"null"}


def test_what_is_vouched_for_and_sound_is_read(tmp_path):
    vouched(tmp_path, {SHARD: SOUND, **REST})
    found = checkpoint.load_newest(tmp_path)
    assert found.state.tensors["a"].tolist() == [0.0, 0.0] and found.sampling is None


@pytest.mark.parametrize(
    "files",
    [
        {SHARD: pickle.dumps(Evil())},
        {SHARD: headed({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}, {"a": at(0)}, 4)},
        {SHARD: headed({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 4]}}, {"a": at(0)}, 4)},
        # a shard that claims a place far behind: the tensor would be as large
        {SHARD: headed({"a": floats(2)}, {"a": at(2**40)}, 8)},
        {SHARD: headed({"a": floats(2)}, {"a": at(-2)}, 8)},
        {SHARD: headed({"a": floats(2)}, {"a": at(0, 0)}, 8)},
        {SHARD: headed({"a": floats(2)}, {}, 8)},
        {SHARD: headed({"a": floats(2)}, "[" * 10**5, 8)},
        {SHARD: headed({}, {}, header=b"[" * 10**5)},
        {SHARD: headed({}, {}, header=b"{}")[:6]},
        # two shards that overlap, or leave a hole
        {SHARD: SOUND, SHARD.replace("d-00001", "d-00002"): headed({"a": floats(2)}, {"a": at(1)}, 8)},
        {SHARD: SOUND, SHARD.replace("d-00001", "d-00002"): headed({"a": floats(2)}, {"a": at(3)}, 8)},
        {SHARD: SOUND, ".metadata": pickle.dumps(Evil())},
        {SHARD: SOUND, "other.safetensors": SOUND},
        {SHARD: SOUND, "meta.json": b"[" * 10**5},
        {SHARD: SOUND, "meta.json": b"[]"},
        {SHARD: SOUND, "learner.json": pickle.dumps(Evil())},
    ],
)
def test_a_checkpoint_that_vouches_for_harm_is_damaged(tmp_path, monkeypatch, files):
    monkeypatch.chdir(tmp_path)
    vouched(tmp_path, {**REST, **files})
    with pytest.raises(CorruptDataError, match=r"all checkpoints in .* are damaged"):
        checkpoint.load_newest(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_a_link_out_of_the_directory_is_not_read(tmp_path):
    kept = checkpoint.save(tmp_path / "other", learner().state(), {})
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / kept.name).symlink_to(kept)
    with pytest.raises(CorruptDataError, match="are damaged"):
        checkpoint.load_newest(tmp_path / "here")
