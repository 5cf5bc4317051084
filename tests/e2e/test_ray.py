"""The main job on a Ray cluster of two nodes; the one with the robots is killed and comes back."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.config.data_directory import DataDirectory
from robot_edge.uplink.spool import Spool
from tests.e2e.ray_nodes import Machines
from tests.extras import needs

pytestmark = needs("ray")

ROBOTS = ("robot-0", "robot-1")
AWAY = ("robot-1",)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    short = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    made = Machines(tmp_path, short)
    yield made
    made.end()
    shutil.rmtree(short, ignore_errors=True)


class Watched:
    """`vla-fleet up`, seen through its page."""

    def __init__(self, machines: Machines, process: subprocess.Popen[bytes]) -> None:
        self.machines = machines
        self.process = process

    def snapshot(self) -> dict[str, Any]:
        page = re.search(r"the page is (http://127\.0\.0\.1:\d+)", self.machines.said("up.log"))
        if not page:
            return {"robots": [], "version": None, "totals": {"steps_stored": 0}}
        with urllib.request.urlopen(f"{page.group(1)}/api/fleet", timeout=5) as answer:
            return json.load(answer)

    def wait(self, what: str, until: Callable[[dict[str, Any]], object], seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            self.machines.turn()
            said = self.machines.said("up.log")
            assert self.process.poll() is None, f"up ended early:\n{said}"
            try:
                last = self.snapshot()
                if until(last):
                    return last
            except OSError:
                last = {}
            time.sleep(0.2)
        pytest.fail(f"not within {seconds:.0f} s: {what}; last seen {json.dumps(last)[:3000]}\n{said[-3000:]}")


def robot(snapshot: dict[str, Any], name: str) -> dict[str, Any]:
    return next(
        (found for found in snapshot["robots"] if found["name"] == name), {"link": "", "mode": "", "version": 0}
    )


def acts(snapshot: dict[str, Any], *names: str) -> bool:
    found = [robot(snapshot, name) for name in names]
    # a scene is made between two episodes
    works = ("policy", "script", "reset")
    return all(one["link"] == "ok" and one["mode"] in works and one["version"] for one in found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_main_job_on_two_nodes_and_one_of_them_dies_and_returns(machines: Machines, tmp_path: Path) -> None:
    data = DataDirectory(tmp_path / "fleet")
    address = f"127.0.0.1:{machines.free_port()}"
    first_words = ("--head", "--port", address.split(":")[1], "--include-dashboard", "false", "--robots", "robot-0")
    first = machines.node("first", *first_words, "--num-cpus", "2")
    up_words = ("up", "--backend", "ray", "--ray-address", address, "--data", str(data.root))
    up_words += ("--recipe", "tests.e2e.small_recipes:fake")
    _await(lambda: "Ray runtime started" in machines.said("first.log"), "the first node starts", 180, machines.turn)
    up = Watched(machines, machines.start("up.log", *up_words, "--port", "0", "--web-port", "0", "--headless"))
    # The second node joins a running job.
    second_words = ("--address", address, "--robots", ",".join(AWAY), "--site", "lab")
    second = machines.node("second", *second_words)
    before = up.wait("both act on a version of the trainer", lambda now: acts(now, *ROBOTS), 400)

    # Robots run where they are, everything else runs where there are CPUs.
    away = [line for line in machines.below(second.raylet) if line[3:4] == ["edge"]]
    assert sorted(line[line.index("--name") + 1] for line in away) == list(AWAY)
    assert all(line[line.index("--site") + 1] == "lab" for line in away)
    here = {line[3] for line in machines.below(first.raylet) if line[2:3] == ["fleet.cli"]}
    assert {"trainer", "evaluator", "edge"} <= here

    # The node dies as in a power cut: those that were on it are lost, the other one goes on.
    second.cut_power(*AWAY)
    lost = up.wait("its robots are lost", lambda now: all(robot(now, name)["link"] == "lost" for name in AWAY), 60)
    newer = lost["version"]["number"] + 1
    up.wait("learning goes on", lambda now: acts(now, "robot-0") and robot(now, "robot-0")["version"] >= newer, 60)
    _await(lambda: "robot-1 is lost" in machines.said("up.log"), "up says so", 60)

    second.switch_on()
    again = up.wait("they are back", lambda now: acts(now, *ROBOTS), 400)
    assert again["version"]["number"] > before["version"]["number"]
    gained = again["totals"]["steps_stored"] + 100
    up.wait("all is well", lambda now: now["totals"]["steps_stored"] > gained and acts(now, *ROBOTS), 30)

    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(90) == 0, machines.said("up.log")
    assert not [line for _, line in machines.running().values() if str(data.root) in line], "the job's processes ended"
    _nothing_is_lost(data)
    for node in (second, first):
        node.switch_off()
    _await(lambda: not machines.running(), "the nodes' processes ended", 30)


def _nothing_is_lost(data: DataDirectory) -> None:
    ledger, _ = data.buffer.open_reader()
    totals, applied = ledger.robot_totals(), ledger.applied()
    ledger.close()
    for name in ROBOTS:
        spool = Spool(data.edge(name) / "spool.sqlite")
        assert len(spool) == 0
        assert totals[name].steps == spool.steps_recorded > 0
        spool.close()
    assert {row.robot for row in applied} >= set(ROBOTS), "published versions acted on every robot"


def _await(
    true: Callable[[], Any], what: str, seconds: float = 60.0, meanwhile: Callable[[], None] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        meanwhile()
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)
