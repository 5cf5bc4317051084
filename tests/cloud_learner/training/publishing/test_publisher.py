"""Versions are made of snapshots: whole or as deltas, checked, and what robots rebuild is what is hashed."""

from __future__ import annotations

import hashlib
import io
import logging
import threading

import numpy as np
import pytest
import torch

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import PublisherConfig, TrainingConfig
from cloud_learner.training.learner import Learner
from cloud_learner.training.publishing.publisher import PreparedVersion, VersionPublisher
from cloud_learner.training.status import VersionFault
from policies.common.weights import unpack
from policies.conformance.check import example_batch
from policies.flow.config import FlowConfig
from policies.flow.policy import FlowPolicy
from tests.cloud_learner.training.batches import Batches
from wire.errors import ConfigError, StorageError
from wire.types import Dimension, PolicyVersion, RobotSpec
from wire.weights.delta import Precision, apply, read_frames

SPEC = RobotSpec("small", (Dimension("x", "m", -1.0, 1.0),), (Dimension("dx", "cm", -1.0, 1.0),), (), 20.0)
CONFIG, TRAINING = HGDagger(draws=2), TrainingConfig(batch=4, warmup_steps=3)


class Robot:
    """Holds the newest version's file and rebuilds the next one, as a gateway does."""

    def __init__(self):
        self.version, self.file = None, None

    def take(self, made: PreparedVersion, number: int) -> PolicyVersion:
        if made.delta is None:
            self.file = made.file.copy()
        else:
            apply(self.file, read_frames(io.BytesIO(bytes(made.delta))))
        assert hashlib.sha256(self.file.data).hexdigest() == made.version.sha256
        assert len(self.file) == made.version.size_bytes
        self.version = PolicyVersion(number, made.version.sha256, len(self.file), made.version.parent, 0, 0, 0)
        return self.version


class Bench:
    """A learner, its publisher without a thread, and a robot."""

    def __init__(self, directory, config=PublisherConfig(), save=None, seed=0):
        torch.set_num_threads(1)
        policy = FlowPolicy(SPEC, FlowConfig(state_dim=1, action_dim=1, horizon=2, width=32, layers=2), seed)
        self.learner = Learner(policy, CONFIG, TRAINING, seed)
        self.directory, self.config = directory, config
        self.publisher = VersionPublisher(save or policy.save, directory, config)
        self.robot, self.steps = Robot(), 0

    def train(self, count=3):
        for _ in range(count):
            self.learner.step(Batches(example_batch(SPEC, 2, self.steps)))
            self.steps += 1

    def submit(self, *, whole=False):
        parent = self.robot.version
        version = PolicyVersion(0, "", 0, parent.number if parent else 0, self.steps, 0, 0)
        sha256 = parent.sha256 if parent else ""
        self.publisher.submit(self.learner.snapshot(), version, frozenset(), sha256, whole=whole)

    def publish(self, *, whole=False) -> PreparedVersion | None:
        self.submit(whole=whole)
        made = self.publisher.poll()
        if made is not None:
            self.robot.take(made, self.robot.version.number + 1 if self.robot.version else 1)
            self.publisher.on_published(made)
        return made

    def restart(self):
        self.publisher = VersionPublisher(self.learner.policy.save, self.directory, self.config)

    def checkpoint(self):
        self.publisher.on_checkpoint(self.robot.version.number)
        self.publisher.poll()


def floats(file):
    return {name: tensor.numpy() for name, tensor in unpack(bytes(file))[1].items()}


def test_the_first_version_is_the_exact_weights_and_the_next_ones_are_small_deltas(tmp_path):
    bench = Bench(tmp_path)
    first = bench.publish()
    assert first.delta is None
    assert bytes(bench.robot.file) == bench.learner.weights()
    for _ in range(3):
        bench.train()
        made = bench.publish()
        assert made.delta is not None
        assert len(made.delta) < 0.15 * len(made.file)
        assert made.measures.sent_bytes == len(made.delta)
        assert 0 < made.measures.changed_share <= 1
    counts = bench.publisher.counts
    assert (counts.made, counts.whole) == (4, 1)
    assert not bench.publisher.busy


def test_what_is_trained_on_goes_on_by_itself(tmp_path):
    one, other = Bench(tmp_path / "1"), Bench(tmp_path / "2")
    for _ in range(3):
        one.train()
        one.publish()
        other.train()
    assert one.learner.weights() == other.learner.weights()


def test_a_snapshot_is_not_trained_any_more(tmp_path):
    bench = Bench(tmp_path)
    bench.submit()
    before = bench.learner.weights()
    bench.train()
    assert bytes(bench.publisher.poll().file) == before != bench.learner.weights()


def test_errors_are_fed_back_after_many_versions_robots_are_within_a_step_of_what_is_trained(tmp_path):
    bench = Bench(tmp_path, PublisherConfig(anchor_every=0))
    bench.publish()
    for _ in range(60):
        bench.train(2)
        before = floats(bench.robot.file)
        bench.publish()
        for name, trained in floats(bench.learner.weights()).items():
            change = trained - before[name]
            if trained.size >= 64 and np.any(change):
                step = 1.5 * np.sqrt(np.mean(np.square(change, dtype=np.float64)))
                assert np.max(np.abs(trained - floats(bench.robot.file)[name])) <= 0.601 * step, name
    assert bench.publisher.counts.whole == 1


def test_an_anchor_goes_whole_and_exact(tmp_path):
    bench = Bench(tmp_path, PublisherConfig(anchor_every=3))
    went = []
    for _ in range(7):
        bench.train()
        made = bench.publish()
        went.append("whole" if made.delta is None else "delta")
        if made.delta is None:
            assert bytes(made.file) == bench.learner.weights()
    assert went == ["whole", "delta", "delta", "whole", "delta", "delta", "whole"]


@pytest.mark.parametrize("precision", list(Precision))
def test_each_precision_is_rebuilt(tmp_path, precision):
    bench = Bench(tmp_path, PublisherConfig(precision))
    bench.publish()
    bench.train()
    assert bench.publish().delta is not None
    exact = bytes(bench.robot.file) == bench.learner.weights()
    assert exact == (precision == Precision.exact)


def test_a_restarted_trainer_goes_on_with_the_same_bytes(tmp_path):
    one, other = Bench(tmp_path / "1"), Bench(tmp_path / "2")
    for bench in (one, other):
        bench.publish()
        bench.train()
        bench.publish()
        bench.checkpoint()
    other.restart()
    for bench in (one, other):
        bench.train()
    made, again = one.publish(), other.publish()
    assert again.delta == made.delta is not None
    assert again.version.sha256 == made.version.sha256


@pytest.mark.parametrize("damage", ["gone", "torn", "none was kept"])
def test_without_its_parents_file_a_restarted_trainer_sends_the_whole(tmp_path, damage, caplog):
    bench = Bench(tmp_path)
    bench.publish()
    if damage != "none was kept":
        bench.checkpoint()
        (kept,) = tmp_path.iterdir()
        kept.unlink() if damage == "gone" else kept.write_bytes(kept.read_bytes()[:-1])
    bench.restart()
    bench.train()
    with caplog.at_level(logging.WARNING):
        assert bench.publish().delta is None
    assert bytes(bench.robot.file) == bench.learner.weights()
    assert ("does not match the sha256" in caplog.text) == (damage == "torn")
    bench.train()
    assert bench.publish().delta is not None


def test_a_disk_that_keeps_nothing_does_not_keep_versions_from_going_out(tmp_path, monkeypatch, caplog):
    bench = Bench(tmp_path)
    bench.publish()

    def full(*_):
        raise StorageError("the disk is full.")

    monkeypatch.setattr("cloud_learner.training.publishing.publisher.keep_file", full)
    bench.checkpoint()
    bench.train()
    assert bench.publish().delta is not None
    assert "the disk is full" in caplog.text


def test_it_goes_whole_when_told_to_and_when_its_parent_is_another_network(tmp_path):
    bench = Bench(tmp_path)
    bench.publish()
    bench.train()
    assert bench.publish(whole=True).delta is None
    other = Bench(tmp_path / "other")
    other.learner.policy.module.register_buffer("extra", torch.zeros(100))
    other.learner = Learner(other.learner.policy, CONFIG, TRAINING)
    other.robot, bench.learner = bench.robot, other.learner
    assert bench.publish().delta is None


def test_a_version_that_did_not_get_there_is_no_base(tmp_path):
    bench = Bench(tmp_path)
    bench.publish()
    bench.train()
    bench.submit()
    assert bench.publisher.poll().delta is not None
    bench.train()
    # the robot checks that it rebuilds from what it has
    assert bench.publish().delta is not None


@pytest.mark.parametrize("first", [True, False])
def test_what_is_not_finite_is_refused_and_said_once(tmp_path, caplog, first):
    bench = Bench(tmp_path)
    if not first:
        bench.publish()
    value = next(bench.learner.average.parameters())
    before = value.clone()
    for _ in range(3):
        value.view(-1)[1] = float("nan")
        assert bench.publish() is None
        assert not bench.publisher.busy
    counts = bench.publisher.counts
    assert counts.refused == {VersionFault.not_finite: 3}
    assert counts.refusal.startswith("not finite")
    assert caplog.text.count("is not published, learning goes on") == 1
    value.copy_(before)
    bench.train()
    assert bench.publish() is not None
    assert bench.publisher.counts.refusal == ""


def test_a_thread_makes_it_and_nobody_waits(tmp_path):
    began, may_end = threading.Event(), threading.Event()
    bench = Bench(tmp_path)
    save = bench.learner.policy.save

    def slow(module):
        began.set()
        assert may_end.wait(60)
        return save(module)

    bench.publisher = VersionPublisher(slow, tmp_path, PublisherConfig())
    bench.publisher.start()
    bench.submit()
    assert began.wait(60)
    before = bench.learner.weights()
    bench.train()
    assert bench.publisher.poll() is None
    assert bench.publisher.busy
    may_end.set()
    for _ in range(6000):
        if (made := bench.publisher.poll()) is not None:
            break
        threading.Event().wait(0.01)
    assert bytes(made.file) == before
    bench.publisher.close()


def test_what_cannot_be_packed_ends_the_trainer(tmp_path):
    def broken(module):
        raise RuntimeError("no such tensor")

    bench = Bench(tmp_path, save=broken)
    bench.submit()
    with pytest.raises(RuntimeError, match="no such tensor"):
        bench.publisher.poll()


def test_a_negative_number_of_versions_is_refused():
    with pytest.raises(ConfigError, match="anchor_every is -1"):
        PublisherConfig(anchor_every=-1)
