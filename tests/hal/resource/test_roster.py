from __future__ import annotations

import pytest

from hal.resource import Change, HealthReport, Leases, RobotHealth, RobotRegistry
from tests.hal.scheduler.fleets import capabilities
from wire.errors import RejectedError

S = 1_000_000_000


def test_robots_join_report_and_leave_at_any_time() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0)
    assert roster.turn(0) == [Change("a", RobotHealth.starting, joined=True)]
    roster.report("a", HealthReport("policy"), S)
    roster.join("b", capabilities(site="north"), S)
    assert [(change.robot, change.health) for change in roster.turn(S)] == [
        ("a", RobotHealth.ready),
        ("b", RobotHealth.starting),
    ]
    assert ("a" in roster, len(roster)) == (True, 2)
    roster.leave("a", "said goodbye", 2 * S)
    assert roster.turn(2 * S) == [Change("a", None, "said goodbye")]
    roster.leave("a", "again", 2 * S)
    assert roster.turn(2 * S) == []
    assert (roster.health("a"), roster.capabilities("a")) == (None, None)
    assert [robot.name for robot in roster.robots()] == ["b"]


def test_saying_hello_again_changes_nothing() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0, "process 1")
    roster.report("a", HealthReport(), 0)
    roster.turn(0)
    roster.join("a", capabilities(), 1, "process 1")
    assert roster.turn(1) == []
    assert roster.health("a") is RobotHealth.ready
    roster.join("a", capabilities(site="south"), 2, "process 1")
    assert roster.turn(2) == [Change("a", RobotHealth.ready, "other capabilities", joined=True)]


def test_two_robots_with_one_name_are_refused_with_the_field_named() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0, "process 1")
    roster.report("a", HealthReport(), S)
    with pytest.raises(RejectedError, match=r"name: there is a robot 'a' already \(process 1, heard 0\.5 s ago\)"):
        roster.join("a", capabilities(), round(1.5 * S), "process 2")
    roster.turn(round(1.5 * S))
    assert roster.health("a") is RobotHealth.ready, "the first works on undisturbed"
    with pytest.raises(RejectedError, match="name: a robot without a name"):
        roster.join("", capabilities(), S)


def test_a_robot_that_started_anew_takes_its_place_when_the_old_process_is_silent() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0, "process 1")
    roster.report("a", HealthReport(), S)
    roster.turn(S)
    roster.join("a", capabilities(), round(2.5 * S), "process 2")
    assert roster.turn(round(2.5 * S)) == [Change("a", RobotHealth.starting, joined=True)]


def test_silence_is_found_without_a_report() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0)
    roster.report("a", HealthReport(), 0)
    roster.turn(0)
    found = [change for tenth in range(80) for change in roster.turn(tenth * S // 10)]
    assert [(change.health, change.reason) for change in found] == [
        (RobotHealth.degraded, "reports late"),
        (RobotHealth.lost, "silent"),
    ]


def test_the_load_is_the_share_of_the_last_minute_in_which_it_worked() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0)
    for second in range(1, 61):
        roster.report(
            "a", HealthReport("policy" if second % 4 else "hold", "" if second % 4 else "no job yet"), second * S
        )
    assert roster.robots()[0].load == pytest.approx(0.75, abs=0.03)
    for second in range(61, 131):
        roster.report("a", HealthReport("hold", "no job yet"), second * S)
    assert roster.robots()[0].load == 0.0


def test_a_silent_time_is_not_taken_for_work() -> None:
    roster = RobotRegistry()
    roster.join("a", capabilities(), 0)
    roster.report("a", HealthReport("hold", "no job yet"), S)
    roster.report("a", HealthReport("policy"), 41 * S)
    assert roster.robots()[0].load == pytest.approx(0.5)


def test_it_shows_leases_and_jobs_and_does_not_hear_strangers() -> None:
    leases = Leases()
    roster = RobotRegistry(leases)
    roster.join("a", capabilities(), 0)
    lease, _ = leases.acquire("a", "main", "rollout", 10, 15 * S, 0)
    roster.report("a", HealthReport(), S, job="main")
    roster.report("nobody", HealthReport(), S)
    (state,) = roster.robots()
    assert (state.lease, state.job, state.health, state.since_ns) == (lease, "main", "ready", S)
    roster.report("a", HealthReport(), 20 * S)
    assert roster.robots()[0].lease is None, "it has run out"
