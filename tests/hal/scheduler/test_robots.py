"""Robots join and report at any time; what the fleet knows of them."""

from __future__ import annotations

import pytest

from hal.resource.health import RobotHealth
from hal.scheduler.records import REST
from tests.hal.scheduler.fleets import capabilities, health, scheduler, status
from wire.messages.fleet import JobRequest

S = 1_000_000_000
IDLE = {"mode": "hold", "reason": "no job yet"}


def test_robots_join_and_report_at_any_time() -> None:
    found, _ = scheduler(robots=("known",))
    assert found.robots(0) == (), "it is known by name only"
    assert not found.join("b", capabilities(), 0)
    assert health(found, "b") == "starting"
    found.report(status("b"), S)
    found.join("a", capabilities(site="north"), S)
    assert [(robot.name, robot.health) for robot in found.robots(S)] == [("a", "starting"), ("b", "ready")]


def test_saying_hello_again_changes_nothing_and_other_capabilities_start_anew() -> None:
    found, _ = scheduler()
    found.submit(JobRequest("main", "rollout", ("a",)), 0)
    found.join("a", capabilities(), 0, "process 1")
    found.report(status("a"), 0)
    (decision,) = found.step(0)
    assert not found.join("a", capabilities(), 1, "process 1")
    assert found.step(1) == []
    assert health(found, "a") == "ready"
    assert not found.join("a", capabilities(site="south"), 2, "process 1"), "it is the same process"
    (again,) = found.step(2)
    assert health(found, "a") == "ready"
    assert again.job.lease > decision.job.lease


def test_a_new_process_of_a_robot_takes_its_place_and_is_told_anew() -> None:
    found, _ = scheduler()
    found.join("a", capabilities(), 0, "process 1")
    found.report(status("a"), S)
    (decision,) = found.step(S)
    assert decision.job.id == REST
    assert found.join("a", capabilities(), round(2.5 * S), "process 2")
    assert health(found, "a") == "starting"
    assert [told.job.id for told in found.step(round(2.5 * S))] == [REST]


def test_silence_is_found_without_a_report_and_people_hear_of_it() -> None:
    said: list[tuple[str, str]] = []
    found, _ = scheduler(on_health=lambda robot, text: said.append((robot, text)))
    found.join("a", capabilities(), 0)
    found.report(status("a"), 0)
    for tenth in range(80):
        found.step(tenth * S // 10)
    assert said == [("a", "degraded: reports late"), ("a", "lost: silent")]


def test_the_load_is_the_share_of_the_last_minute_in_which_it_worked() -> None:
    found, _ = scheduler()
    found.join("a", capabilities(), 0)
    for second in range(1, 61):
        found.report(status("a", **({} if second % 4 else IDLE)), second * S)
    assert found.robots(60 * S)[0].load == pytest.approx(0.75, abs=0.03)
    for second in range(61, 131):
        found.report(status("a", **IDLE), second * S)
    assert found.robots(130 * S)[0].load == 0.0


def test_a_silent_time_is_not_taken_for_work() -> None:
    found, _ = scheduler()
    found.join("a", capabilities(), 0)
    found.report(status("a", **IDLE), S)
    found.report(status("a"), 41 * S)
    assert found.robots(41 * S)[0].load == pytest.approx(0.5)


def test_it_shows_leases_and_jobs_and_does_not_hear_strangers() -> None:
    found, leases = scheduler()
    found.join("a", capabilities(), 0)
    lease, _ = leases.acquire("a", "main", "rollout", 10, 15 * S, 0)
    found.report(status("a", job="main/1"), S)
    found.report(status("nobody"), S)
    (state,) = found.robots(S)
    assert (state.lease, state.job, state.health) == (lease, "main", RobotHealth.ready)
    assert found.robots(20 * S)[0].lease is None, "it has run out"
