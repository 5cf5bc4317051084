"""What makes a robot's actions is killed with -9: it holds within two ticks of losing them, and resumes.

One fleet for all: first the processes of its own robot are killed in turn, then the machine where another one thinks.
The robot's driver notes every write with its time, so what is checked is what the robot was really told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.robot_log import CONTROL_HZ, read_log
from tests.e2e.test_processes import ROOT, Job, robot
from wire.transport.keys import make_keys

pytestmark = pytest.mark.slow

PERIOD_S = 1 / CONTROL_HZ
MOST_TICKS = {"inference": 16 + 2, "control": 2, "uplink": 24 + 4 + 2}
"""commands that may still move after a kill: what is left of a chunk, nothing, what the recorder can keep and what it
sends in the 50 ms in which nobody knows; and two"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the robot's driver takes its notes."""
    return tmp_path_factory.mktemp("robot") / "written"


@pytest.fixture(scope="module")
def job(written: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLA_FLEET_TEST_LOG", str(written))
        made = Job(written.parent / "fleet", "--no-operator", recipe="tests.e2e.robot_log:recipe", robots=1)
    yield made
    made.end()


class Metronome:
    """How late an ordinary thread wakes up, all the time: what this machine makes everybody late by."""

    def __init__(self) -> None:
        self._late: list[tuple[int, float]] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended.is_set():
            due_ns = time.monotonic_ns() + 5_000_000
            time.sleep(0.005)
            self._late.append((due_ns, (time.monotonic_ns() - due_ns) / 1e9))

    def worst_s(self, since_ns: int) -> float:
        """Largest lateness since then."""
        return max((late_s for due_ns, late_s in self._late if due_ns >= since_ns), default=0.0)

    def end(self) -> None:
        self._ended.set()


def _moves(snapshot: dict[str, Any]) -> bool:
    return robot(snapshot, "robot-0").get("mode") == "policy"


def _while_it_moves(written: Path) -> np.ndarray:
    """The log, a moment after a command that moved: between two scenes nobody has to command a robot at rest."""
    deadline_s = time.monotonic() + 180
    while True:
        log = read_log(written)
        fresh = time.monotonic_ns() - log["time_ns"][-1] < PERIOD_S * 1e9
        if fresh and np.abs(log["action"][-1, :3]).max() > 0:
            return log
        assert time.monotonic() < deadline_s, "the robot does not move"
        time.sleep(PERIOD_S / 8)


def test_whatever_is_killed_the_robot_holds_and_goes_on(job: Job, written: Path) -> None:
    metronome = Metronome()
    job.wait("the robot works", _moves, 180)
    for part in ("inference", "control", "uplink"):
        job.wait(f"the robot works before {part} is killed", _moves, 120)
        time.sleep(0.5)
        pid = job.pid("edge-part", part)
        before = _while_it_moves(written)["time_ns"]
        usual_s = np.diff(before[before > before[-1] - 3_000_000_000]).max() / 1e9
        os.kill(pid, signal.SIGKILL)
        # Now, not before: this process may have waited for its turn just then, and the robot works on meanwhile.
        killed_ns = time.monotonic_ns()
        deadline_s = time.monotonic() + 180
        while True:
            time.sleep(0.2)
            log = read_log(written)
            after, last_ns = log[log["time_ns"] >= killed_ns], log["time_ns"][log["time_ns"] < killed_ns][-1]
            moving = np.abs(after["action"][:, :3]).max(axis=1) > 0
            if not moving.all() and moving[int(np.argmin(moving)) :].any():
                break
            assert time.monotonic() < deadline_s, f"{part}: it did not hold and move again: {moving}"
        first_hold = int(np.argmin(moving))
        gaps_s = np.diff(np.concatenate([[last_ns], after["time_ns"][: first_hold + 1]])) / 1e9
        # Without control the host holds after two periods; nobody ever leaves the robot alone for longer, but for what
        # this machine is late by anyway.
        limit_s = 2 * PERIOD_S + max(PERIOD_S, usual_s) + 3 * metronome.worst_s(killed_ns - 1_000_000_000)
        assert gaps_s.max() < limit_s, f"{part}: {gaps_s.max():.3f} s without a command, {usual_s:.3f} s before"
        assert first_hold <= MOST_TICKS[part], f"{part}: {first_hold} more commands that moved"
    metronome.end()
    # The process that has the driver takes its scene with it: the episode ends, a new one begins with a new process.
    os.kill(job.pid("edge-part", "robot"), signal.SIGKILL)
    dead_ns = time.monotonic_ns()
    job.wait(
        "the robot moves again with a new driver process",
        lambda now: _moves(now) and (read_log(written)["time_ns"] > dead_ns + 100_000_000).any(),
        180,
    )


@contextlib.contextmanager
def _running(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleet.cli", *words],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
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


def _check_metrics(edge: str, gateway: str) -> None:
    """Robot-9 says of itself what the gateway says of it."""
    figures = []
    for url in (edge, gateway):
        with urllib.request.urlopen(url, timeout=10) as page:
            families = text_string_to_metric_families(page.read().decode())
            samples = (sample for family in families for sample in family.samples)
            figures.append({s.name: s.value for s in samples if s.labels == {"robot": "robot-9"}})
    assert figures[0].keys() == figures[1].keys()
    for one in figures:
        assert one["vla_fleet_robot_ticks_total"] > 0
        assert one["vla_fleet_robot_policy_version"] >= 1
        assert 0 <= one["vla_fleet_robot_link_age_seconds"] < 60


def test_a_robot_thinks_elsewhere_holds_when_the_link_dies_and_goes_on(job: Job, tmp_path: Path) -> None:
    job.wait("the first robot works", _moves, 180)
    make_keys(job.data.keys, ["robot-9"])
    with socket.socket() as free, socket.socket() as also_free:
        free.bind(("127.0.0.1", 0))
        also_free.bind(("127.0.0.1", 0))
        port, metrics_port = free.getsockname()[1], also_free.getsockname()[1]
    common = [
        "--recipe",
        "tests.e2e.robot_log:recipe",
        "--data",
        str(job.data.root),
        "--gateway",
        job.data.gateway,
    ]
    server = ["think-server", *common, "--port", str(port)]
    edge = ["edge", *common, "--name", "robot-9", "--no-operator", "--think", f"tcp://127.0.0.1:{port}"]
    edge += ["--metrics-port", str(metrics_port)]

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
            _check_metrics(f"http://127.0.0.1:{metrics_port}/metrics", job.page + "/metrics")
            os.kill(thinking.pid, signal.SIGKILL)
            job.wait("it holds without them", holds, 180)
            job.wait("the operator hears of it", lambda now: told(now, "slow_path_silent"), 180)
        with _running(tmp_path / "think.log", *server):
            now = job.wait("it goes on when the server is back", works, 180)
    assert told(now, "recovered"), "the operator hears of that too"
    assert robot(now, "robot-9")["link"] == "ok"
