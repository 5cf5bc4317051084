"""`vla-fleet train --ranks`: Ray Train's processes learn what one would, also when some or all of them are killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cloud_learner.training.checkpoints.checkpoint import newest_gradient_steps
from fleet.config.data_directory import DataDirectory
from policies.common.weights import unpack
from tests.command_line import vla_fleet
from tests.extras import needs

pytestmark = [needs("ray"), pytest.mark.slow, pytest.mark.timeout(1800)]
FAST = ("--recipe", "fake", "--set", "training.batch=8")
WAIT_S = 600.0
"""longer than anything here takes on a machine that has much else to do"""


def saved(out: Path) -> int:
    return newest_gradient_steps(DataDirectory(out).training)


def trained(out: Path) -> dict[str, torch.Tensor]:
    return unpack((out / "trained.safetensors").read_bytes())[1]


def loss(said: str) -> float:
    """Mean of those of the run."""
    found = re.search(r"loss ([0-9.]+)\.$", said.strip())
    assert found, said
    return float(found[1])


def test_two_ranks_learn_what_one_does_and_each_goes_on_where_the_other_was(fleet: Path, tmp_path: Path) -> None:
    def train(out: str, steps: int, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        given = ("--data", str(fleet), "--out", str(tmp_path / out), "--steps", str(steps), "--ranks", str(ranks))
        done = vla_fleet("train", *FAST, *given)
        assert done.returncode == 0, done.stderr
        return done

    train("alone", 4)
    shutil.copytree(tmp_path / "alone", tmp_path / "mixed")
    for steps, ranks in ((24, 2), (28, 1)):
        alone, mixed = train("alone", steps), train("mixed", steps, ranks)
        assert "resumed at gradient step" in mixed.stderr
        # printed with four digits
        assert loss(mixed.stdout) == pytest.approx(loss(alone.stdout), rel=1e-3)
        theirs = trained(tmp_path / "mixed")
        for name, tensor in trained(tmp_path / "alone").items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4)
    refused = vla_fleet("train", *FAST, "--data", str(fleet), "--out", str(tmp_path / "mixed"), "--ranks", "3")
    assert refused.returncode == 1 and "3 ranks cannot share a batch of 8 evenly" in refused.stderr


class Command:
    """`vla-fleet train --ranks 2` as a person starts it, with all processes below it."""

    def __init__(self, fleet: Path, out: Path, log: Path, *words: str) -> None:
        self._log, self._seen = log, set[int]()
        words = ("train", "--data", str(fleet), "--out", str(out), "--ranks", "2", *words)
        with log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli", *words], stdout=said, stderr=said, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait(self, what: str, until: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not until():
            self.ranks()
            assert self.process.poll() is None, f"{what}, but it ended: {self.said}"
            assert time.monotonic() < deadline_s, f"{what}: {self.said}"
            time.sleep(0.1)

    def ranks(self) -> list[int]:
        """Process ids; all that it has started is noted meanwhile."""
        alive = _alive()
        for pid in alive:
            at = pid
            while at in alive and at != self.process.pid:
                at = alive[at][0]
            if at == self.process.pid:
                self._seen.add(pid)
        return [pid for pid in self._seen if alive.get(pid, (0, ""))[1].startswith("ray::RayTrainWorker")]

    def end(self) -> int:
        """Wait for it and for all that it started; its exit status."""
        status = self.process.wait(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while left := self._seen & (alive := _alive()).keys():
            assert time.monotonic() < deadline_s, f"still running: {[alive[pid] for pid in left]}"
            time.sleep(0.1)
        return status

    def kill(self) -> None:
        """Whatever is left of it."""
        self.ranks()
        self.process.kill()
        self.process.wait()
        for pid in self._seen & _alive().keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _alive() -> dict[int, tuple[int, str]]:
    """Parent and command line of all processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent), (entry / "cmdline").read_bytes().decode(errors="replace")
    return found


Start = Callable[..., Command]


@pytest.fixture
def start(fleet: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Command] = []

    def begin(out: Path, *words: str) -> Command:
        started.append(Command(fleet, out, tmp_path / f"{len(started)}.log", *words))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


def test_killed_ranks_and_a_killed_command_cost_what_came_after_the_checkpoint_and_ctrl_c_saves(
    tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "out"
    words = (*FAST, "--set", "checkpoint_every_s=0.5", "--steps", "1000000")
    command = start(out, *words)
    command.wait("a checkpoint", lambda: saved(out))
    os.kill(max(command.ranks()), signal.SIGKILL)
    command.wait("told of the death", lambda: "(restart 1 of 3)" in command.said)
    told = r"^rank [01] died; all ranks go on from gradient step (\d+) \(restart 1 of 3\)\.$"
    line = re.search(told, command.said, re.M)
    assert line, command.said
    from_step = int(line[1])
    command.wait("going on", lambda: f"resumed at gradient step {from_step}.\n" in command.said)
    command.wait("progress", lambda: saved(out) > from_step)
    ranks = set(command.ranks()) & _alive().keys()
    assert len(ranks) == 2
    command.process.kill()
    killed_s = time.monotonic()
    while ranks & _alive().keys():
        # Ray itself takes a minute
        assert time.monotonic() < killed_s + 20
        time.sleep(0.05)
    reached = saved(out)
    again = start(out, *words)
    again.wait("going on", lambda: f"resumed at gradient step {reached}.\n" in again.said)
    again.wait("progress", lambda: saved(out) > reached)
    # as a terminal does: to all of them
    os.killpg(again.process.pid, signal.SIGINT)
    assert again.end() == 0, again.said
    said = f"stopped and saved at gradient step {saved(out)} of 1000000: the same command goes on.\n"
    assert said in again.said
    command.end()


def test_more_ranks_than_there_is_room_for_are_refused_at_once(fleet: Path, tmp_path: Path) -> None:
    words = ("train", "--recipe", "fake", "--set", "training.batch=1024", "--ranks", "1024", "--steps", "4")
    refused = vla_fleet(*words, "--data", str(fleet), "--out", str(tmp_path / "out"))
    assert refused.returncode == 1 and "1024 ranks need 1024 processors, and Ray has" in refused.stderr
