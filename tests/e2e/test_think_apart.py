"""A robot whose slow path runs on another machine: over ZeroMQ with keys, killed, and back again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.paths import DataDirectory
from tests.e2e.test_processes import ROOT, Job, robot
from wire.keys import make_keys


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "fleet", "--no-operator", recipe="tests.e2e.robot_log:recipe", robots=1)
    yield made
    made.end()


@contextlib.contextmanager
def _running(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet.cli", *words], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_robot_thinks_elsewhere_holds_when_the_link_dies_and_goes_on(job: Job, tmp_path: Path) -> None:
    job.wait("the first robot works", lambda now: robot(now, "robot-0").get("mode") == "policy", 180)
    make_keys(job.data.keys, ["robot-9"])
    gateway = _gateway(job.data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--recipe", "tests.e2e.robot_log:recipe", "--data", str(job.data.root), "--gateway", gateway]
    server = ["think-server", *common, "--port", str(port)]
    edge = ["edge", *common, "--name", "robot-9", "--no-operator", "--think", f"tcp://127.0.0.1:{port}"]

    def works(now: dict[str, Any]) -> bool:
        return robot(now, "robot-9").get("mode") == "policy"

    def holds(now: dict[str, Any]) -> bool:
        mine = robot(now, "robot-9")
        return mine.get("mode") == "hold" and mine.get("reason") == "the slow path is silent"

    def told(now: dict[str, Any], kind: str) -> bool:
        return any(event["kind"] == kind and event["robot"] == "robot-9" for event in now["events"])

    with _running(tmp_path / "edge.log", *edge):
        with _running(tmp_path / "think.log", *server) as thinking:
            job.wait("the second robot works with thoughts from elsewhere", works, 180)
            os.kill(thinking.pid, signal.SIGKILL)
            job.wait("it holds without them", holds, 180)
            job.wait("the operator hears of it", lambda now: told(now, "slow_path_silent"), 180)
        with _running(tmp_path / "think.log", *server):
            now = job.wait("it goes on when the server is back", works, 180)
    assert told(now, "recovered"), "the operator hears of that too"
    assert robot(now, "robot-9")["link"] == "ok"


def _gateway(data: DataDirectory) -> str:
    """The address that the robots of this fleet were given."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(data.root) in words and "--gateway" in words:
                    return words[words.index("--gateway") + 1]
    raise AssertionError("no process of the fleet names its gateway")
