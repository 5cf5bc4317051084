from __future__ import annotations

import pytest

from hal.resource import HealthReport, Leases, RobotHealth, RobotRegistry
from hal.resource.robot_registry import Change
from tests.hal.scheduler.fleets import capabilities
from wire.errors import RejectedError

S = 1_000_000_000


def test_robots_join_report_and_leave_at_any_time() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0)
    assert registry.poll(0) == [Change("a", RobotHealth.starting, joined=True)]
    registry.report("a", HealthReport("policy"), S)
    registry.join("b", capabilities(site="north"), S)
    assert [(change.robot, change.health) for change in registry.poll(S)] == [
        ("a", RobotHealth.ready),
        ("b", RobotHealth.starting),
    ]
    assert ("a" in registry, len(registry.robots())) == (True, 2)
    registry.leave("a", "said goodbye", 2 * S)
    assert registry.poll(2 * S) == [Change("a", None, "said goodbye")]
    registry.leave("a", "again", 2 * S)
    assert registry.poll(2 * S) == []
    assert (registry.health("a"), registry.capabilities("a")) == (None, None)
    assert [robot.name for robot in registry.robots()] == ["b"]


def test_saying_hello_again_changes_nothing() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0, "process 1")
    registry.report("a", HealthReport(), 0)
    registry.poll(0)
    registry.join("a", capabilities(), 1, "process 1")
    assert registry.poll(1) == []
    assert registry.health("a") is RobotHealth.ready
    registry.join("a", capabilities(site="south"), 2, "process 1")
    assert registry.poll(2) == [Change("a", RobotHealth.ready, "other capabilities", joined=True)]


def test_two_robots_with_one_name_are_refused_with_the_field_named() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0, "process 1")
    registry.report("a", HealthReport(), S)
    with pytest.raises(RejectedError, match=r"name: there is a robot 'a' already \(process 1, heard 0\.5 s ago\)"):
        registry.join("a", capabilities(), round(1.5 * S), "process 2")
    registry.poll(round(1.5 * S))
    assert registry.health("a") is RobotHealth.ready, "the first works on undisturbed"
    with pytest.raises(RejectedError, match="name: a robot without a name"):
        registry.join("", capabilities(), S)


def test_a_robot_that_started_anew_takes_its_place_when_the_old_process_is_silent() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0, "process 1")
    registry.report("a", HealthReport(), S)
    registry.poll(S)
    registry.join("a", capabilities(), round(2.5 * S), "process 2")
    assert registry.poll(round(2.5 * S)) == [Change("a", RobotHealth.starting, joined=True)]


def test_silence_is_found_without_a_report() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0)
    registry.report("a", HealthReport(), 0)
    registry.poll(0)
    found = [change for tenth in range(80) for change in registry.poll(tenth * S // 10)]
    assert [(change.health, change.reason) for change in found] == [
        (RobotHealth.degraded, "reports late"),
        (RobotHealth.lost, "silent"),
    ]


def test_the_load_is_the_share_of_the_last_minute_in_which_it_worked() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0)
    for second in range(1, 61):
        registry.report(
            "a", HealthReport("policy" if second % 4 else "hold", "" if second % 4 else "no job yet"), second * S
        )
    assert registry.robots()[0].load == pytest.approx(0.75, abs=0.03)
    for second in range(61, 131):
        registry.report("a", HealthReport("hold", "no job yet"), second * S)
    assert registry.robots()[0].load == 0.0


def test_a_silent_time_is_not_taken_for_work() -> None:
    registry = RobotRegistry()
    registry.join("a", capabilities(), 0)
    registry.report("a", HealthReport("hold", "no job yet"), S)
    registry.report("a", HealthReport("policy"), 41 * S)
    assert registry.robots()[0].load == pytest.approx(0.5)


def test_it_shows_leases_and_jobs_and_does_not_hear_strangers() -> None:
    leases = Leases()
    registry = RobotRegistry(leases)
    registry.join("a", capabilities(), 0)
    lease, _ = leases.acquire("a", "main", "rollout", 10, 15 * S, 0)
    registry.report("a", HealthReport(), S, job="main")
    registry.report("nobody", HealthReport(), S)
    (state,) = registry.robots()
    assert (state.lease, state.job, state.health, state.since_ns) == (lease, "main", "ready", S)
    registry.report("a", HealthReport(), 20 * S)
    assert registry.robots()[0].lease is None, "it has run out"
