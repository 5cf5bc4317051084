"""Checkpoints of a run: written beside gradient steps, one at a time, and whole whenever the process is killed."""

import os
import random
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.checkpoints.run_checkpoints import RunCheckpoints
from tests.cloud_learner.training.checkpoints.test_checkpoint import learner, numbers, train
from wire.errors import DiskFullError, StorageError


class Source:
    """Knows where it is, as a `ReplayDataset`."""

    def __init__(self, at=0):
        self.at = at

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]
        return True


class Ledger:
    def __init__(self, success=()):
        self.success = dict(success)

    def evaluations(self):
        if self.success is None:
            raise StorageError("the database is away.")
        return [SimpleNamespace(number=number, success={"reach": one}) for number, one in self.success.items()]


@pytest.fixture
def slow_save(monkeypatch):
    """Writing waits until it is let go on."""
    real, going = checkpoint.save, threading.Event()

    def save(*args, **options):
        assert going.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    return going


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_gradient_steps_go_on_while_it_is_written(tmp_path, slow_save):
    subject, source = learner(), Source(3)
    checkpoints = RunCheckpoints(tmp_path, subject, source, Ledger())
    checkpoints.start()
    train(subject, 0, 2)
    then = subject.state()
    checkpoints.begin({"version": 4})
    source.at = 9
    train(subject, 2, 3)
    assert checkpoints.busy and not checkpoints.has_result and not checkpoints.there
    slow_save.set()
    checkpoints.wait()
    checkpoints.pop_result()
    assert checkpoints.there and not checkpoints.busy
    found = checkpoint.load_newest(tmp_path)
    assert same(found.state.tensors, then.tensors) and found.state.meta["gradient_steps"] == 2
    assert found.meta == {"version": 4} and found.sampling == {"at": 3}
    checkpoints.close()


def test_a_second_one_waits_for_the_first(tmp_path, slow_save):
    checkpoints = RunCheckpoints(tmp_path, learner(), Source(), Ledger())
    checkpoints.start()
    checkpoints.begin({"number": 1})
    threading.Timer(0.2, slow_save.set).start()
    checkpoints.begin({"number": 2})
    # the first is there by now, whole
    assert numbers(tmp_path)[0] == "00000001"
    checkpoints.wait()
    checkpoints.pop_result()
    assert checkpoint.load_newest(tmp_path).meta == {"number": 2}
    checkpoints.close()


def test_what_could_not_be_written_is_told_and_the_earlier_one_stands(tmp_path, monkeypatch):
    checkpoints = RunCheckpoints(tmp_path, learner(), Source(), Ledger())
    checkpoints.start()
    checkpoints.begin({"number": 1})
    checkpoints.wait()
    checkpoints.pop_result()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        checkpoints.begin({"number": 2})
        checkpoints.wait()
        with pytest.raises(DiskFullError, match="writing a checkpoint"):
            checkpoints.pop_result()
    assert checkpoint.load_newest(tmp_path).meta == {"number": 1}
    assert numbers(tmp_path) == ["00000001"] and checkpoints.there
    checkpoints.close()


def test_that_of_the_best_version_stays_also_while_the_ledger_is_away(tmp_path):
    ledger = Ledger({1: 0.9, 2: 0.3})
    checkpoints = RunCheckpoints(tmp_path, learner(), Source(), ledger, kept=1)
    for number in range(1, 5):
        if number == 3:
            ledger.success = None
        checkpoints.begin({"version": number})
        checkpoints.wait()
        checkpoints.pop_result()
    assert numbers(tmp_path) == ["00000001", "00000004"]


def test_it_resumes_the_learner_and_the_sampling(tmp_path):
    subject = learner()
    checkpoints = RunCheckpoints(tmp_path, subject, Source(5), Ledger())
    assert checkpoints.resume() is None and not checkpoints.there
    train(subject, 0, 3)
    checkpoints.begin({"phase": "online"})
    checkpoints.wait()
    expected, source, other = train(subject, 3, 3), Source(), learner(seed=4)
    again = RunCheckpoints(tmp_path, other, source, Ledger())
    assert again.resume() == {"phase": "online"} and again.there
    assert source.at == 5 and train(other, 3, 3) == expected


SAVES = """
import sys
from pathlib import Path
import torch
from cloud_learner.training.checkpoints import checkpoint
from cloud_learner.training.learner import LearnerState
number = int(sys.argv[2])
while True:
    number += 1
    tensors = {str(n): torch.full((200_000,), float(number)) for n in range(4)}
    checkpoint.save(Path(sys.argv[1]), LearnerState(tensors, {"number": number}), {"number": number}, number)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving_all_that_was_said_to_be_there_is(tmp_path):
    """kill -9 at any moment: the newest checkpoint is whole, and at least the one that was reported last."""
    dice, said = random.Random(0), 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), str(said)], stdout=subprocess.PIPE, text=True
        )
        try:
            for _ in range(dice.randrange(1, 4)):
                said = int(process.stdout.readline())
            # somewhere within the next one
            threading.Event().wait(dice.uniform(0, 0.05))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            said = max([said, *map(int, process.stdout.read().split())])
            process.wait()
        found = checkpoint.load_newest(tmp_path)
        number = found.meta["number"]
        assert number in (said, said + 1) and found.sampling == number
        assert all(torch.equal(one, torch.full((200_000,), float(number))) for one in found.state.tensors.values())
        said = number
