from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.resource.health import HealthConfig, HealthWatch, RobotHealth
from robot_edge.control.mode import HoldReason
from tests.hal.scheduler.fleets import status
from wire.messages.gateway import EdgeStatus

S = 1_000_000_000
WELL = status()
TROUBLE = status(mode="hold", reason="the robot does not take commands", fault="the driver raises")


def feed(watch: HealthWatch, report: EdgeStatus, begin_s: float, end_s: float, every_s: float = 0.25) -> None:
    """Reports from `begin_s` to `end_s`, both included."""
    for step in range(round((end_s - begin_s) / every_s) + 1):
        watch.report(report, round((begin_s + step * every_s) * S))
        watch.check_silence(round((begin_s + step * every_s) * S))


def test_it_starts_and_is_ready_with_its_first_report() -> None:
    watch = HealthWatch(0)
    assert (watch.health, watch.reason) == (RobotHealth.starting, "has not reported yet")
    assert watch.health.works
    assert watch.report(WELL, S)
    assert (watch.health, watch.since_ns) == (RobotHealth.ready, S)
    assert not watch.report(WELL, 2 * S)


def test_a_short_hold_changes_nothing_a_longer_one_degrades_a_long_one_drains() -> None:
    watch = HealthWatch(0)
    feed(watch, WELL, 0, 1)
    feed(watch, TROUBLE, 1.25, 3)
    assert watch.health is RobotHealth.ready
    feed(watch, TROUBLE, 3.25, 3.25)
    assert (watch.health, watch.reason) == (RobotHealth.degraded, "the driver raises")
    assert watch.health.works
    feed(watch, TROUBLE, 3.5, 21)
    assert watch.health is RobotHealth.degraded
    feed(watch, TROUBLE, 21.25, 21.25)
    assert watch.health is RobotHealth.draining
    assert not watch.health.works


def test_trouble_with_breaks_is_not_trouble_for_long() -> None:
    watch = HealthWatch(0)
    for second in range(100):
        feed(watch, TROUBLE if second % 2 else WELL, second, second + 0.75)
    assert watch.health is RobotHealth.ready


def test_degraded_ends_after_a_while_of_health() -> None:
    watch = HealthWatch(0)
    feed(watch, WELL, 0, 1)
    feed(watch, TROUBLE, 1.25, 5)
    feed(watch, WELL, 5.25, 8)
    assert watch.health is RobotHealth.degraded
    feed(watch, WELL, 8.25, 8.25)
    assert (watch.health, watch.reason) == (RobotHealth.ready, "")


def test_draining_ends_only_after_a_steady_time_that_doubles() -> None:
    config = HealthConfig()
    watch = HealthWatch(0, config)
    feed(watch, WELL, 0, 1)
    now = 1.25
    for wanted in (10, 20, 40):
        feed(watch, TROUBLE, now, now + 25)
        now += 25.25
        assert watch.health is RobotHealth.draining
        feed(watch, WELL, now, now + wanted - 0.25)
        assert watch.health is RobotHealth.draining
        feed(watch, TROUBLE, now + wanted, now + wanted)
        assert watch.health is RobotHealth.draining, "one unwell report starts the time anew"
        now += wanted + 0.25
        feed(watch, WELL, now, now + wanted)
        assert watch.health is RobotHealth.ready
        now += wanted + 0.25
    feed(watch, WELL, now, now + config.forget_s, every_s=0.5)
    now += config.forget_s + 0.5
    feed(watch, TROUBLE, now, now + 25)
    feed(watch, WELL, now + 25.25, now + 35.25)
    assert watch.health is RobotHealth.ready, "earlier drainings were forgotten"


@pytest.mark.parametrize("reason", HealthConfig().calm_holds)
def test_holding_for_want_of_work_or_a_person_is_no_trouble(reason: str) -> None:
    assert reason in set(HoldReason), "not a reason that control gives"
    watch = HealthWatch(0)
    feed(watch, status(mode="hold", reason=reason), 0, 60)
    assert watch.health is RobotHealth.ready


def test_a_hold_of_another_kind_is() -> None:
    watch = HealthWatch(0)
    feed(watch, status(mode="hold", reason=str(HoldReason.frozen_camera)), 0, 3)
    assert (watch.health, watch.reason) == (RobotHealth.degraded, "a camera repeats its picture")


def test_late_reports_degrade_and_silence_is_lost() -> None:
    watch = HealthWatch(0)
    feed(watch, WELL, 0, 1)
    assert not watch.check_silence(2 * S)
    assert watch.check_silence(round(2.1 * S))
    assert (watch.health, watch.reason) == (RobotHealth.degraded, "reports late")
    assert not watch.check_silence(6 * S)
    assert watch.check_silence(round(6.1 * S))
    assert (watch.health, watch.reason) == (RobotHealth.lost, "silent")
    assert not watch.health.works


def test_one_that_never_reports_is_lost_too() -> None:
    watch = HealthWatch(0)
    watch.check_silence(4 * S)
    assert watch.health is RobotHealth.starting
    watch.check_silence(6 * S)
    assert watch.health is RobotHealth.lost


def test_back_from_a_short_silence_it_works_on_from_a_long_one_it_is_watched_first() -> None:
    for silent_s, health in ((8, RobotHealth.degraded), (20, RobotHealth.draining)):
        watch = HealthWatch(0)
        feed(watch, WELL, 0, 1)
        watch.check_silence((1 + silent_s) * S)
        assert watch.health is RobotHealth.lost
        watch.report(WELL, (1 + silent_s) * S)
        assert (watch.health, watch.reason) == (health, f"back after {silent_s} s of silence")
        feed(watch, WELL, 1.25 + silent_s, 12 + silent_s)
        assert watch.health is RobotHealth.ready


def test_an_emergency_stop_stops_it_until_it_is_released_for_a_while() -> None:
    watch = HealthWatch(0)
    feed(watch, WELL, 0, 1)
    watch.report(status(mode="estop", reason="emergency stop"), round(1.25 * S))
    assert watch.health is RobotHealth.stopped
    assert not watch.health.works
    feed(watch, status(mode="estop", reason="emergency stop"), 1.5, 60)
    assert watch.health is RobotHealth.stopped
    feed(watch, WELL, 60.25, 63)
    assert watch.health is RobotHealth.stopped
    feed(watch, WELL, 63.25, 63.5)
    assert watch.health is RobotHealth.ready


def test_missed_ticks_degrade() -> None:
    watch = HealthWatch(0)
    for step in range(20):
        watch.report(status(ticks=step * 20, missed_ticks=step * 10), step * S // 4)
    assert watch.health is RobotHealth.degraded
    assert watch.reason == "misses 33% of its ticks"
    few = HealthWatch(0)
    for step in range(20):
        few.report(status(ticks=step * 20, missed_ticks=step), step * S // 4)
    assert few.health is RobotHealth.ready


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(("well", "trouble", "estop", "look")), st.integers(1, 80)), max_size=80))
def test_it_leaves_draining_and_stopped_only_when_well_for_long_enough(steps: list[tuple[str, int]]) -> None:
    config = HealthConfig()
    watch, now_ns, well_since = HealthWatch(0, config), 0, None
    reports = {"well": WELL, "trouble": TROUBLE, "estop": status(mode="estop", reason="emergency stop")}
    for kind, tenths in steps:
        now_ns += tenths * S // 10
        before = watch.health
        if kind == "look":
            watch.check_silence(now_ns)
            continue
        if kind != "well" or (now_ns - watch.heard_ns) / S > config.late_after_s:
            well_since = None
        if kind == "well" and well_since is None:
            well_since = now_ns
        watch.report(reports[kind], now_ns)
        if before is RobotHealth.draining and watch.health is RobotHealth.ready:
            assert well_since is not None
            assert now_ns - well_since >= config.steady_s * S
        if before is RobotHealth.stopped and watch.health is RobotHealth.ready:
            assert well_since is not None
            assert now_ns - well_since >= config.recover_s * S
        assert (watch.health is RobotHealth.stopped) or kind != "estop"
