"""`vla-fleet robots | jobs | submit | lease | release` against a whole fleet of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_processes import ROOT, Job, robot
from wire.keys import make_keys

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Job]:
    data = tmp_path / "fleet"
    make_keys(data / "keys", ["console"])
    made = Job(data, "--no-operator", recipe="tests.e2e.small_recipes:fake", robots=2)
    yield made
    made.end()


def command(fleet: Job, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "fleet.cli", *arguments, "--data", str(fleet.data.root)]


def run(fleet: Job, *arguments: str) -> str:
    done = subprocess.run(
        command(fleet, *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def robots(fleet: Job) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(run(fleet, "robots", "--json"))["robots"]}


def jobs(fleet: Job) -> dict[str, dict[str, Any]]:
    return {one["request"]["id"]: one for one in json.loads(run(fleet, "jobs", "--json"))}


def until(what: str, holds: Callable[[], object], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def test_robots_are_listed_leased_examined_and_go_on_after_a_kill(fleet: Job) -> None:
    fleet.wait("two robots practise", lambda s: [r["job"] for r in s["robots"]] == ["main"] * 2 and s["version"], 180)
    until("both are ready", lambda: [one["health"] for one in robots(fleet).values()] == ["ready"] * 2)
    assert "main (rollout, priority 10)" in run(fleet, "robots")

    # a lease keeps one robot at rest while the other one works, also over a gateway that is killed
    held = subprocess.Popen(
        command(fleet, "lease", "robot-0", "--ttl", "60", "--purpose", "cleaning"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until("it is held", lambda: (robots(fleet)["robot-0"]["lease"] or {}).get("purpose") == "cleaning")
        fleet.wait("it rests", lambda s: robot(s, "robot-0")["reason"] == "no job yet", 180)
        number = robots(fleet)["robot-0"]["lease"]["number"]
        fleet.kill(fleet.pid("gateway"))
        fleet.page = ""
        until("another gateway answers", lambda: _answers(fleet))
        fleet.wait("both robots are back", lambda s: len(s["robots"]) == 2, 180)
        assert robots(fleet)["robot-0"]["lease"]["number"] == number
        before = robot(fleet.snapshot(), "robot-1")["episodes"]
        fleet.wait("the other one works on", lambda s: robot(s, "robot-1")["episodes"] > before + 1, 180)
        held.send_signal(signal.SIGINT)
        output, errors = held.communicate(timeout=120)
    finally:
        held.kill()
    assert held.returncode == 0, errors
    assert "robot-0 is given back" in output
    fleet.wait("it works again", lambda s: robot(s, "robot-0")["job"] == "main", 180)

    # the newest version is examined on one robot, on held-out seeds, and measured
    run(fleet, "submit", "--kind", "evaluation", "--episodes", "2", "--id", "check")
    until("it is done", lambda: jobs(fleet)["check"]["phase"] == "done")
    state = jobs(fleet)["check"]
    assert state["episodes"] == 2 * len(state["request"]["tasks"])
    measured = fleet.wait("it is shown", lambda s: "canary" in s["measured"], 180)["measured"]["canary"]
    assert measured["version"] == state["request"]["version"] > 0
    fleet.wait("all practise again", lambda s: [r["job"] for r in s["robots"]] == ["main"] * 2, 180)
    assert fleet.stop() == 0


def _answers(fleet: Job) -> bool:
    try:
        fleet.snapshot()
    except OSError:
        return False
    return True
