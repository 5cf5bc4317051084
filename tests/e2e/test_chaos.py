"""Robots are unplugged in the middle of episodes, and whole robot computers fall over, while the main job runs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.cli.client import FleetClient
from robot_edge.uplink.spool import Spool
from tests.e2e.chaos_robots import CABLES
from tests.e2e.test_processes import Job, number, robot
from wire.messages.fleet import RobotState

ROBOTS = tuple(f"robot-{n}" for n in range(3))
CHAOS_S = 36.0
EVERY_S = (1.5, 2.5)
KILLS = 2
"""of a whole edge; all others are cables"""
LONG_S = 27.0
"""one robot is out for so long that its lease must be returned"""
BACK_S = 120.0
"""until all work again, on a slow machine too"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    cables = tmp_path / "cables"
    cables.mkdir()
    monkeypatch.setenv(CABLES, str(cables))
    made = Job(tmp_path / "fleet", recipe="tests.e2e.chaos_robots:recipe", robots=len(ROBOTS))
    yield made
    made.end()


class Chaos:
    """Pulls cables and kills edges at random, always the same way for a seed."""

    def __init__(self, up: Job, cables: Path, seed: int = 0) -> None:
        self._up = up
        self._cables = cables
        self._random = random.Random(seed)
        self._back_s: dict[str, float] = {}
        self._next_s = 0.0
        self.unplugged: list[str] = []
        self.killed: list[str] = []
        self.leases: dict[str, int] = {}
        """number of each robot's newest lease, as far as it was seen"""
        self.lost: dict[str, int] = {}
        """the same of those killed, as of when it happened last"""

    def pull(self, name: str, seconds: float) -> None:
        (self._cables / name).touch()
        self._back_s[name] = time.monotonic() + seconds
        self.unplugged.append(name)

    def kill(self, name: str) -> None:
        """The whole robot computer at once."""
        for pid, words in self._up.children():
            if name in words:
                os.kill(pid, signal.SIGKILL)
        self.killed.append(name)
        self.lost[name] = self.leases.get(name, 0)

    def turn(self) -> None:
        now_s = time.monotonic()
        for name in [name for name, back_s in self._back_s.items() if now_s > back_s]:
            self.mend(name)
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._random.uniform(*EVERY_S)
        whole = [name for name in ROBOTS if name not in self._back_s]
        if not whole:
            return
        name = self._random.choice(whole)
        if len(self.killed) < KILLS and self._random.random() < 0.3:
            self.kill(name)
        else:
            self.pull(name, self._random.uniform(0.5, 5.0))

    def mend(self, name: str) -> None:
        (self._cables / name).unlink(missing_ok=True)
        self._back_s.pop(name, None)

    def end(self) -> None:
        for name in ROBOTS:
            self.mend(name)


@pytest.mark.slow
def test_robots_come_and_go_and_the_fleet_goes_on_learning(job: Job, tmp_path: Path) -> None:
    before = job.wait("all robots work", _all_work, 180)
    chaos = Chaos(job, tmp_path / "cables")
    given_back: set[str] = set()
    long, *_ = ROBOTS
    chaos.pull(long, LONG_S)
    with FleetClient(job.data.gateway, job.data.keys) as fleet:
        deadline_s = time.monotonic() + CHAOS_S
        late_s = deadline_s + BACK_S
        # A slow machine learns as much, but later.
        while time.monotonic() < deadline_s or (time.monotonic() < late_s and not _learned(before, job.snapshot())):
            for name, state in _robots(fleet).items():
                if state.lease is None:
                    given_back.add(name)
                else:
                    chaos.leases[name] = state.lease.number
            chaos.turn()
            assert job.process.poll() is None, job.log.read_text()
            time.sleep(0.1)
        chaos.end()
        during = job.snapshot()
        # more than 10% of the robots a minute, by far
        assert len(chaos.unplugged) + len(chaos.killed) >= 10
        assert len(chaos.killed) >= 1
        assert _learned(before, during), "learning goes on"
        assert long in given_back, "a robot that is out for long gives its lease back"
        told = json.dumps(during["events"])
        assert "check its cable" in told
        assert any(chaos.lost.values()), "an edge that had a lease was killed"
        job.wait("all robots are back", _all_work, BACK_S)
        deadline_s = time.monotonic() + BACK_S
        # The lease of an edge that is killed is given back; a new edge works under a new one.
        while not all(_leased_since(state, chaos.lost) for state in _robots(fleet).values()):
            assert time.monotonic() < deadline_s, (_robots(fleet), chaos.lost)
            time.sleep(0.2)
        numbers = [state.lease.number for state in _robots(fleet).values() if state.lease is not None]
        assert len(set(numbers)) == len(ROBOTS)
    assert job.stop(180) == 0
    _check_stored(job)


def _robots(fleet: FleetClient) -> dict[str, RobotState]:
    return {state.name: state for state in fleet.robots() if state.name in ROBOTS}


def _leased_since(state: RobotState, lost: dict[str, int]) -> bool:
    """Whether the robot works for the job, and under a newer lease than the one it had when it was killed."""
    return state.lease is not None and state.job == "main" and state.lease.number > lost.get(state.name, 0)


def _learned(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether versions, gradient steps and stored steps have gone on since `before`."""
    steps = now["version"]["gradient_steps"] - before["version"]["gradient_steps"]
    stored = now["totals"]["steps_stored"] - before["totals"]["steps_stored"]
    return number(now) > number(before) + 3 and steps > 50 and stored > 0


def _all_work(snapshot: dict[str, Any]) -> bool:
    found = [robot(snapshot, name) for name in ROBOTS]
    return all(card.get("link") == "ok" and card["mode"] in ("policy", "script", "reset") for card in found)


def _check_stored(job: Job) -> None:
    """Every step that a robot finished is stored, once, and reads back; those of broken episodes too."""
    ledger, store = job.data.buffer.open_reader()
    try:
        totals = ledger.robot_totals()
        for name in (*ROBOTS, "demonstrator"):
            spool = Spool(job.data.edge(name) / "spool.sqlite")
            assert (name, len(spool)) == (name, 0)
            assert (name, totals[name].steps) == (name, spool.steps_recorded)
            spool.close()
        assert ledger.totals().duplicated_steps == 0
        rows = ledger.segments_after(0, 100_000)
        seen: set[tuple[str, int]] = set()
        for row in rows:
            segment = store.read([row.row]).segments[row.row]
            ticks = {(row.episode, segment.first_tick + n) for n in range(segment.steps)}
            assert not ticks & seen
            seen |= ticks
        assert len(seen) == ledger.totals().steps
        outcomes = {episode.outcome for name in ROBOTS for episode in ledger.episodes(name, limit=10_000)}
        assert "aborted" in outcomes, "episodes were broken off in the middle"
    finally:
        ledger.close()
