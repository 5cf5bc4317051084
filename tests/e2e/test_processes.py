"""Real processes, real ZeroMQ with CURVE, a real simulator: killed with -9 in turn, nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.config.data_directory import DataDirectory
from robot_edge.uplink.spool import Spool

ROOT = Path(__file__).resolve().parents[2]
SMALL = "tests.e2e.small_recipes:state"
"""a real simulator"""


class Job:
    """`vla-fleet up` in a process of its own, watched through its page as a person would."""

    def __init__(self, data: Path, *options: str, recipe: str = SMALL, robots: int | str = 2) -> None:
        self.data = DataDirectory(data)
        self.log = data.with_suffix(".log")
        command = [sys.executable, "-m", "fleet.cli", "up", "--recipe", recipe, "--robots", str(robots)]
        command += ["--data", str(data), "--port", "0", "--web-port", "0", "--headless", *options]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "COLUMNS": "200"},
            )
        self.page = ""
        self.rest: Callable[[], object] = lambda: time.sleep(0.05)

    def snapshot(self) -> dict[str, Any]:
        if not self.page:
            found = re.search(r"http://127\.0\.0\.1:\d+", self.log.read_text())
            if not found:
                raise OSError("the page is not there yet")
            self.page = found.group()
        with urllib.request.urlopen(f"{self.page}/api/fleet", timeout=2) as answer:
            return json.load(answer)

    def wait(self, what: str, until: Callable[[dict[str, Any]], object], seconds: float = 180.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"up ended early:\n{self.log.read_text()}"
            try:
                last = self.snapshot()
                if until(last):
                    return last
            except OSError:
                last = {}
            self.rest()
        pytest.fail(
            f"not within {seconds:.0f} s: {what}; last seen {json.dumps(last)[:3000]}\n{self.log.read_text()[-2000:]}"
        )

    def children(self) -> list[tuple[int, list[str]]]:
        """(process id, command line) of everything that works on this data directory but `up` itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                if str(self.data.root) in line and line[3:4] != ["up"]:
                    found.append((int(entry.name), line))
        return found

    def pid(self, command: str, *words: str) -> int:
        """Process id of the child that runs `vla-fleet COMMAND ... words ...`, 0 when there is none."""
        for pid, line in self.children():
            if line[3:4] == [command] and set(words) <= set(line):
                return pid
        return 0

    def kill(self, pid: int) -> None:
        assert pid > 0
        os.kill(pid, signal.SIGKILL)

    def stop(self, seconds: float = 180.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(*options: str, **more: Any) -> Job:
        made.append(Job(tmp_path / "fleet", *options, **more))
        return made[-1]

    yield start
    for one in made:
        one.end()


def robot(snapshot: dict[str, Any], name: str) -> dict[str, Any]:
    return next((r for r in snapshot["robots"] if r["name"] == name), {})


def number(snapshot: dict[str, Any]) -> int:
    """The newest version, 0 when there is none."""
    return (snapshot["version"] or {"number": 0})["number"]


def acts(snapshot: dict[str, Any], count: int = 2) -> bool:
    robots = [r for r in snapshot["robots"] if r["name"].startswith("robot-")]
    return len(robots) == count and all(r["link"] == "ok" and r["mode"] in ("policy", "script") for r in robots)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_everything_is_killed_in_turn_and_nothing_is_lost(job: Callable[..., Job]) -> None:
    up = job()
    before = up.wait("robots act on the policy", acts, 180)
    assert before["version"]["number"] >= 1

    # the gateway: robots go on, it comes back on the same port and knows everything
    stored = up.wait("steps are stored", lambda s: s["totals"]["steps_stored"] > 500)["totals"]["steps_stored"]
    up.kill(up.pid("gateway"))
    up.wait("the gateway is back with all it had acknowledged", lambda s: s["totals"]["steps_stored"] >= stored)
    up.wait("robots are connected again", acts)

    # the trainer: it resumes from its checkpoint and goes on publishing
    # (a checkpoint is written every few seconds; wait for one that is worth something)
    deadline = time.monotonic() + 180
    while not list(up.data.checkpoints.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    version = up.snapshot()["version"]["number"]
    up.kill(up.pid("trainer"))
    up.wait("a newer version after the trainer's death", lambda s: number(s) > version + 1)
    assert "resumed at gradient step" in (up.data.logs / "trainer.log").read_text()

    # one robot's inference: it comes back (that the robot holds meanwhile is seen in test_hold)
    pids = robot(up.snapshot(), "robot-0")["pids"]
    up.kill(pids[1])
    up.wait("a new inference", lambda s: robot(s, "robot-0")["pids"][1] not in (0, pids[1]) and acts(s))

    # its uplink: control notices that nobody takes notes
    up.kill(robot(up.snapshot(), "robot-0")["pids"][2])
    up.wait("a new uplink", lambda s: robot(s, "robot-0")["pids"][2] not in (0, pids[2]) and acts(s))

    # the whole edge: parent and children
    old = robot(up.snapshot(), "robot-1")["pids"]
    for pid in (up.pid("edge", "robot-1"), *old):
        up.kill(pid)
    up.wait("robot-1 is a new process", lambda s: not set(robot(s, "robot-1")["pids"]) & set(old) and acts(s))

    assert up.stop() == 0
    check(up.data)
    assert not up.children()

    # the same command on the same directory goes on where it was
    ledger, _ = up.data.buffer.open_reader()
    stored, newest = ledger.totals().steps, ledger.newest_version()
    ledger.close()
    assert newest is not None
    again = job()
    again.wait(
        "it goes on",
        lambda s: s["totals"]["steps_stored"] > stored and number(s) > newest.version.number,
        180,
    )
    assert "recording" not in again.log.read_text()
    assert again.stop() == 0
    check(up.data)


@pytest.mark.slow
def test_a_robot_that_starts_while_the_gateway_is_silent_has_the_version_that_acted(job: Callable[..., Job]) -> None:
    up = job(robots=1)
    up.wait("it acts", lambda s: acts(s, 1) and robot(s, "robot-0")["version"])
    _, inference, uplink = robot(up.snapshot(), "robot-0")["pids"]
    gateway, log = up.pid("gateway"), up.data.logs / "robot-0.inference.log"
    os.kill(gateway, signal.SIGSTOP)
    try:
        said = log.stat().st_size
        up.kill(uplink)
        up.kill(inference)
        deadline = time.monotonic() + 90
        while not (found := re.search(r"version \d+ loaded", log.read_text()[said:])) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        os.kill(gateway, signal.SIGCONT)
    assert found, (up.data.logs / "robot-0.uplink.log").read_text()[-2000:]
    up.wait("it acts again", lambda s: acts(s, 1) and inference not in robot(s, "robot-0")["pids"])
    assert up.stop() == 0


@pytest.mark.slow
def test_a_simulator_that_cannot_draw_is_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleet.cli", "up", "--recipe", "pixels", "--data", str(tmp_path / "fleet")]
    command += ["--port", "0", "--web-port", "0", "--headless", "--minutes", "0"]
    environment = {**os.environ, "MUJOCO_GL": "nonsense"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 1
    assert "MUJOCO_GL" in done.stderr
    assert "Traceback" not in done.stderr


def check(data: DataDirectory) -> None:
    """Everything that left a spool is in the buffer, once, and reads back."""
    ledger, store = data.buffer.open_reader()
    totals = ledger.robot_totals()
    for name in ("robot-0", "robot-1", "demonstrator"):
        spool = Spool(data.edge(name) / "spool.sqlite")
        assert len(spool) == 0
        assert totals[name].steps == spool.steps_recorded
        spool.close()
        assert all(episode.outcome for episode in ledger.episodes(name, limit=100_000)), "each has an end"
    rows = ledger.segments_after(0, 100_000)
    seen: set[tuple[str, int]] = set()
    for row in rows:
        segment = store.read([row.row]).segments[row.row]
        for tick in range(segment.first_tick, segment.first_tick + segment.steps):
            assert (row.episode, tick) not in seen
            seen.add((row.episode, tick))
    assert len(seen) == ledger.totals().steps
    ledger.close()
