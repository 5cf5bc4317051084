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
from cloud_learner.training import checkpoint
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


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name(f"00000002-{'0' * 64}.safetensors")),
    ],
)
def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage):
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


def test_all_damaged_is_an_error_with_a_way_out(tmp_path):
    cut(checkpoint.save(tmp_path, learner().state(), {}))
    with pytest.raises(CorruptDataError, match="Move them away"):
        checkpoint.load_newest(tmp_path)


def test_a_checkpoint_that_was_never_finished_is_ignored_and_removed(tmp_path):
    (tmp_path / f"00000009-{'0' * 64}.safetensors{TEMPORARY}").write_bytes(b"half")
    assert checkpoint.load_newest(tmp_path) is None
    checkpoint.save(tmp_path, learner().state(), {})
    assert numbers(tmp_path) == ["00000001"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
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
        patched.setattr(checkpoint, "FORMAT", 2)
        checkpoint.save(tmp_path, learner().state(), {})
    with pytest.raises(StorageError, match="format 2"):
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


def named(directory, data):
    """A file whose name vouches for it, whoever made it."""
    path = directory / f"00000001-{hashlib.sha256(data).hexdigest()}.safetensors"
    path.write_bytes(data)
    return path


def headed(header, data=0):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was run",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        headed({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}, 4),
        headed({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 4]}}, 4),
        headed({"__metadata__": {"format": "1", "learner": "[" * 10**5, "meta": "{}"}}),
        headed({"__metadata__": {"format": "1"}}),
        (2**40).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_that_vouches_for_harm_is_damaged(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    named(tmp_path, data)
    with pytest.raises(CorruptDataError, match=r"all checkpoints in .* are damaged"):
        checkpoint.load_newest(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_a_link_out_of_the_directory_is_not_read(tmp_path):
    kept = checkpoint.save(tmp_path / "other", learner().state(), {})
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / kept.name).symlink_to(kept)
    with pytest.raises(CorruptDataError, match="are damaged"):
        checkpoint.load_newest(tmp_path / "here")
