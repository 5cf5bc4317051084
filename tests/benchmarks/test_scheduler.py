"""The scheduler's benchmark: that it runs, that its bound is one, and that its audit finds what it looks for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.common import table
from benchmarks.scheduler import __main__ as scheduler
from benchmarks.scheduler.audit import Audit
from benchmarks.scheduler.bound import Flow, clairvoyant_s
from benchmarks.scheduler.simulator import SECOND, Arrival, Outage, Scenario, SimulatedRobot
from benchmarks.scheduler.world import LENGTHS_S, WorldSize, scenario, work_s
from tests.hal.scheduler.fleets import capabilities
from wire.messages.fleet import JobRequest, Requirement


@pytest.mark.slow
def test_a_quick_run_compares_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "QUICK", WorldSize(30, 120, 0.2, 0.9, 0.3, (0,)))
    table.run("scheduler", scheduler.measure, ["--quick", "--json", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    rows = {row["arm"]: row for row in found["rows"]}
    assert list(rows) == ["scheduler", "FIFO, first fit", "static ranks"]
    share = "work done, over the clairvoyant bound"
    assert all(0 < row[share] <= 1 for row in rows.values())
    assert rows["scheduler"][share] > 0.85
    assert rows["scheduler"][share] > rows["static ranks"][share]
    goals = {goal["name"]: goal for goal in found["goals"]}
    assert len(goals) == 6
    for name in ("longest wait for a robot, min", "jobs never done", "robots leased twice", "p99 of a decision, ms"):
        assert goals[name]["holds"], goals[name]
    assert goals["longest wait for a robot, min"]["target"] == "<= 10.5"
    decisions, spread = found["more"].values()
    assert {row["figure"]: row["highest"] for row in spread}["longest wait, min"] == rows["scheduler"]["longest"]
    (details,) = decisions
    assert details["leases"] > 120
    assert details["decisions"] > 1000


def test_the_world_is_the_same_every_time_and_loads_it_as_asked() -> None:
    size = WorldSize(40, 200, 0.5, 0.9, 0.5, (0,))
    world = scenario(size, 3)
    assert world == scenario(size, 3)
    assert world.arrivals != scenario(size, 4).arrivals
    asked_s = sum(work_s(one.request) for one in world.arrivals)
    assert asked_s == pytest.approx(0.9 * 40 * 1800, rel=0.2)
    assert sum(len(robot.outages) for robot in world.robots) > 20


def test_the_largest_flow_of_small_networks() -> None:
    flow = Flow(4)
    for a, b, room in ((0, 1, 3), (0, 2, 2), (1, 2, 5), (1, 3, 2), (2, 3, 3)):
        flow.edge(a, b, room)
    assert flow.largest(0, 3) == 5
    drawn = random.Random(0)
    for _ in range(30):
        # Against the smallest cut, found by trying all of them.
        edges = [(a, b, drawn.randint(0, 9)) for a in range(6) for b in range(6) if a != b and drawn.random() < 0.5]
        flow = Flow(6)
        for edge in edges:
            flow.edge(*edge)
        cuts = []
        for chosen in range(16):
            near = {0, *(node for node in range(1, 5) if chosen >> (node - 1) & 1)}
            cuts.append(sum(room for a, b, room in edges if a in near and b not in near))
        assert flow.largest(0, 5) == min(cuts)


def test_the_bound_counts_only_what_fits_is_there_and_has_come() -> None:
    can, cannot = capabilities(tasks=("reach",), site="north"), capabilities(tasks=("push",))
    robots = (
        SimulatedRobot("r0", can, (Outage(0, 60 * SECOND, True),)),
        SimulatedRobot("r1", cannot),
    )
    job = JobRequest("j", "rollout", ("reach",), 1, 100, Requirement(site="north"))
    early, late = (Scenario(robots, (Arrival(at * SECOND, job),), LENGTHS_S) for at in (0, 270))
    # 800 s of work for one robot that is well from 60 s to 300 s
    assert clairvoyant_s(early, 300 * SECOND) == pytest.approx(240, abs=0.1)
    assert clairvoyant_s(late, 300 * SECOND) == pytest.approx(30, abs=0.1)
    assert clairvoyant_s(early, 3600 * SECOND) == pytest.approx(800, abs=0.1)
    fast = Scenario((SimulatedRobot("r0", can, (), 0.5),), early.arrivals, LENGTHS_S)
    assert clairvoyant_s(fast, 300 * SECOND) == pytest.approx(600, abs=0.1)


def test_the_audit_finds_a_robot_that_is_leased_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit()
    audit.acquire("r", "main", "rollout", 10, 10 * SECOND, 0)
    audit.acquire("r", "ann", "operator", 80, 10 * SECOND, SECOND)
    audit.release("r", 2, 2 * SECOND)
    audit.acquire("r", "main", "rollout", 10, 10 * SECOND, 3 * SECOND)
    assert (audit.given, audit.double) == (3, 0)
    # as if the leases had forgotten who holds it
    audit._held.clear()
    audit.acquire("r", "other", "rollout", 10, 10 * SECOND, 4 * SECOND)
    assert audit.double == 1
