"""People at the gateway: who drives a robot, and who stops it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.safety.stop_latch import StopLatch
from tests.cloud_learner.dispatch.hall import Hall, commands, page
from tests.cloud_learner.fake_edge import FakeEdge
from tests.people import Person
from wire.errors import RejectedError, StorageError
from wire.messages.fleet import AcquireLease, Preempted, ReleaseLease, RenewLease
from wire.messages.gateway import LAST_SEQUENCE, OperatorCommand


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    made = Hall(tmp_path)
    yield made
    made.ledger.close()


def test_taking_over_at_the_page_is_a_lease_and_handing_back_gives_the_job_back(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    told = edge.job
    page(hall, me, "take_over")
    page(hall, me, "take_over")  # pressed twice
    assert hall.lease("robot-0") == (f"web-{me}", "operator")
    hall.pass_time(40.0)
    assert hall.lease("robot-0") == (f"web-{me}", "operator")
    assert edge.job is told  # its episodes go on under the person's hand
    page(hall, me, "command", action=[0, 0, 0, 0])
    page(hall, me, "hand_back")
    hall.pass_time(1.0)
    assert commands(edge) == ["take_over", "take_over", "command", "hand_back"]
    assert hall.lease("robot-0") == ("main", "rollout")
    assert told is not None and edge.job is not None and edge.job.id == told.id


def test_a_page_that_leaves_leaves_the_robot_to_people(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "take_over")
    hall.desk.leave(me)
    hall.pass_time(40.0)
    assert commands(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == (f"dropped:web-{me}", "operator")
    assert hall.desk.control(you) == {"robot-0": "dropped"}
    page(hall, you, "take_over")
    assert hall.lease("robot-0") == (f"web-{you}", "operator")
    page(hall, you, "hand_back")
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_page_of_before_a_kill_has_dropped_its_robot(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "take_over")
    hall = hall.killed()
    hall.pass_time(30.0)
    assert commands(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == (f"dropped:web-{me}", "operator")
    again = hall.desk.join()
    assert hall.desk.control(again) == {"robot-0": "dropped"}
    page(hall, again, "hand_back")
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("main", "rollout") and commands(edge)[-1] == "hand_back"
    hall.ledger.close()


def test_a_stop_outranks_everybody_until_it_is_released(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1000.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", "take_over", lease=lease.number))
    hall.pass_time(1.0)
    hall.received(teleoperator)
    me = hall.desk.join()
    page(hall, me, "estop")
    assert hall.lease("robot-0") == (f"web-{me}", "estop")
    (ended,) = [m for m in hall.received(teleoperator) if isinstance(m, Preempted)]
    assert ended.lease.number == lease.number and "for estop" in ended.reason
    hall.pass_time(30.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == (f"web-{me}", "estop")
    assert hall.robots(hall.peer())["robot-0"].health == "stopped"
    refused = hall.ask(teleoperator, AcquireLease(2, "robot-0", "teleoperation", 80, 1.0)).refused
    (stop,) = edge.latch.state.stops
    assert f"is stopped by web-{me} ({stop}). Release the stop first." in refused
    page(hall, me, "take_over")
    assert hall.desk.pop_rejections(me) == [f"robot-0 is stopped by web-{me} ({stop}). Release the stop first."]
    assert hall.desk.control(me) == {}
    release(hall, me, edge)
    assert hall.lease("robot-0") == (f"web-{me}", "estop") and edge.mode == "hold"
    assert hall.robots(hall.peer())["robot-0"].health == "stopped"
    page(hall, me, "take_over")
    assert "Start it first." in hall.desk.pop_rejections(me)[0]
    page(hall, me, "start")
    hall.pass_time(0.2)
    # it was being driven, by somebody who has lost it: it waits for a person
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    page(hall, me, "hand_back")
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_stop_beside_the_robot_is_a_lease_too(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    edge.latch.stop("ros-1", "ros")
    hall.pass_time(30.0)
    assert hall.lease("robot-0") == ("beside the robot", "estop")
    edge.latch.release("ros-1")
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("beside the robot", "estop")
    edge.latch.start()
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_drives_only_what_it_holds(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    rest = (0.0, 0.0, 0.0, 0.0)
    assert "is held by 'main'" in hall.ask(teleoperator, OperatorCommand("robot-0", "take_over")).refused
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 0, 1.0)).lease
    assert lease is not None and lease.priority == 80
    person = Person(hall.clock, lease.number, "forged")
    assert "has not taken" in hall.ask(teleoperator, person("command", *rest)).refused
    teleoperator.send(person("take_over"))
    teleoperator.send(person("command", *rest))
    made_ns = hall.clock.now_ns()
    hall.gateway.poll()
    old = f"lease {lease.number - 1} of 'robot-0' is over; 'teleoperator' holds it by lease {lease.number}"
    for bad, words in (
        (person("command", 9.0, 0.0, 0.0, 0.0), "outside [-1, 1]"),
        (person("command", 0.0), "1 numbers"),
        (person("command", float("nan"), 0.0, 0.0, 0.0), "no number to act on"),
        (person("command", *rest, lease=lease.number - 1), old),
        (person("drop_link"), "kind: a teleoperator cannot ask for 'drop_link'"),
    ):
        assert words in hall.ask(teleoperator, bad).refused
    hall.pass_time(0.4)
    assert [type(m).__name__ for m in hall.received(teleoperator)] == ["EdgeStatus"] * 2  # it sees what it drives
    teleoperator.send(person("scene_ready"))
    # another one cannot, but anybody may stop
    other = hall.peer("teleoperator-2")
    for kind in ("command", "success"):
        assert "is held by 'teleoperator'" in hall.ask(other, OperatorCommand("robot-0", kind, rest)).refused
    hall.ask(teleoperator, ReleaseLease(2, "robot-0", lease.number))
    hall.pass_time(1.0)
    assert commands(edge) == ["take_over", "command", "scene_ready", "hand_back"]
    heard = [m for m in edge.received if isinstance(m, OperatorCommand)]
    assert {(m.operator, m.lease) for m in heard} == {("teleoperator", lease.number)}
    assert heard[1].captured_ns == made_ns and [m.sequence for m in heard] == [2, 3, 9, LAST_SEQUENCE]
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_that_vanishes_leaves_the_robot_holding(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", "take_over", lease=lease.number))
    hall.pass_time(2.0)
    assert commands(edge) == ["take_over", "drop_link"]
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    assert any(isinstance(m, Preempted) for m in hall.received(teleoperator))
    # the next one finds it free for people
    other = hall.peer("teleoperator-2")
    assert hall.ask(other, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0)).lease is not None
    hall.pass_time(3.0)
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    me = hall.desk.join()
    page(hall, me, "hand_back")
    hall.pass_time(5.0)
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_teleoperator_that_comes_back_drives_on(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 1.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", "take_over", lease=lease.number))
    hall.pass_time(3.0)
    lease = hall.ask(teleoperator, AcquireLease(2, "robot-0", "teleoperation", 80, 30.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", "take_over", lease=lease.number))
    hall.pass_time(5.0)
    assert hall.ask(teleoperator, RenewLease(3, "robot-0", lease.number)).refused == ""
    assert commands(edge) == ["take_over", "drop_link", "take_over"]
    # it may stop the robot itself, and let it go on
    teleoperator.send(OperatorCommand("robot-0", "estop"))
    hall.pass_time(5.0)
    assert hall.lease("robot-0") == ("teleoperator", "estop")
    assert "stopped by teleoperator (" in hall.ask(teleoperator, AcquireLease(4, "robot-0", "drive", 80, 1.0)).refused
    (stop,) = edge.latch.state.stops
    teleoperator.send(OperatorCommand("robot-0", "release_estop", stop=stop))
    hall.pass_time(1.0)
    teleoperator.send(OperatorCommand("robot-0", "start"))
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == ("dropped:teleoperator", "operator")
    assert sorted(commands(edge)[3:5]) == ["drop_link", "estop"]
    assert commands(edge)[5:] == ["release_estop", "start"]


def test_a_page_cannot_take_what_a_teleoperator_drives_and_a_console_can_end_it(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator, console, me = hall.peer("teleoperator"), hall.peer(), hall.desk.join()
    lease = hall.ask(teleoperator, AcquireLease(1, "robot-0", "teleoperation", 80, 100.0)).lease
    assert lease is not None
    teleoperator.send(OperatorCommand("robot-0", "take_over", lease=lease.number))
    hall.pass_time(1.0)
    assert hall.desk.control(me) == {"robot-0": "other"}
    with pytest.raises(RejectedError, match=r"held by 'teleoperator' \(teleoperation\)"):
        page(hall, me, "take_over")
    hall.received(teleoperator)
    assert hall.ask(console, ReleaseLease(1, "robot-0", 0)).refused == ""
    (ended,) = [m for m in hall.received(teleoperator) if isinstance(m, Preempted)]
    assert "'console' released it by force" in ended.reason
    hall.pass_time(1.0)
    assert commands(edge)[-1] == "hand_back" and hall.lease("robot-0") == ("main", "rollout")


# --- stops that get lost ----------------------------------------------------------------------------------------------


def test_a_stop_that_was_lost_is_sent_again_until_the_robot_shows_it(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    teleoperator = hall.peer("teleoperator")
    teleoperator.send(OperatorCommand("robot-0", "estop"))
    hall.gateway.poll()
    (stop,) = [m.stop for m in hall.received(edge.channel) if isinstance(m, OperatorCommand)]  # lost on its way
    for _ in range(30):
        # the robot works on and hears nothing
        hall.clock.advance(200_000_000)
        edge.status()
        hall.gateway.poll()
        lost = [m for m in hall.received(edge.channel) if isinstance(m, OperatorCommand)]
        assert [(m.kind, m.operator, m.stop) for m in lost] == [("estop", "teleoperator", stop)]
        assert hall.lease("robot-0") == ("teleoperator", "estop")
    hall.pass_time(0.4)
    assert edge.mode == "estop"
    told = commands(edge)
    hall.pass_time(10.0)
    assert commands(edge) == told and hall.lease("robot-0") == ("teleoperator", "estop")
    # what was shown once may be released beside the robot
    edge.latch.release(stop)
    edge.latch.start()
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout") and commands(edge) == told


def test_a_stop_is_not_sent_faster_than_it_can_be_heard(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.desk.handle_message(hall.desk.join(), b'{"type": "estop", "robot": "robot-0"}')
    hall.gateway.poll()
    hall.received(edge.channel)
    for _ in range(50):
        hall.clock.advance(20_000_000)
        edge.status()
        hall.gateway.poll()
    assert len([m for m in hall.received(edge.channel) if isinstance(m, OperatorCommand)]) == 10


def test_a_page_stops_a_robot_without_a_link_when_it_is_back(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.server.cut.add("robot-0")
    me = hall.desk.join()
    page(hall, me, "estop")
    texts = [event["text"] for event in hall.view.snapshot()["events"]]
    assert any("estop did not reach the robot; it is sent again as soon as the robot is back" in t for t in texts)
    hall.pass_time(60.0)
    assert commands(edge) == [] and hall.lease("robot-0") == (f"web-{me}", "estop")
    hall.server.cut.clear()
    edge.hello()
    hall.gateway.poll()
    edge.poll()
    assert edge.mode == "estop"  # before it has reported anything
    hall.pass_time(5.0)
    assert hall.lease("robot-0") == (f"web-{me}", "estop")
    release(hall, me, edge)
    page(hall, me, "start")
    hall.pass_time(5.0)
    assert edge.mode == "policy" and hall.lease("robot-0") == ("main", "rollout")


def test_a_report_from_before_the_release_does_not_confirm_the_next_stop(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(3.0)
    edge.status()  # on its way while the stop is released and set again
    release(hall, me, edge)
    hall.desk.handle_message(me, b'{"type": "estop", "robot": "robot-0"}')
    hall.gateway.poll()
    hall.received(edge.channel)
    hall.pass_time(5.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == (f"web-{me}", "estop")


def test_stopping_once_more_counts_from_then_on(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(3.0)
    (first,) = edge.latch.state.stops
    edge.latch.release(first)  # beside the robot, and nobody heard of it yet
    hall.desk.handle_message(you, b'{"type": "estop", "robot": "robot-0"}')
    hall.gateway.poll()
    hall.received(edge.channel)
    hall.pass_time(5.0)
    assert list(edge.latch.state.stops.values()) == [f"web-{you}"]
    assert hall.lease("robot-0") == (f"web-{you}", "estop")


def test_a_stop_is_sent_again_after_a_restart_of_the_gateway(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(0.2)
    page(hall, me, "estop")
    first, second = edge.latch.state.stops
    edge.latch.release(first)
    edge.latch.release(second)  # as if it never heard of the second
    edge.latch.start()
    hall = hall.killed()
    hall.pass_time(10.0)
    assert list(edge.latch.state.stops) == [second] and hall.lease("robot-0") == (f"web-{me}", "estop")
    # shown now: it ends where it is released
    edge.latch.release(second)
    edge.latch.start()
    hall.pass_time(10.0)
    assert hall.lease("robot-0") == ("main", "rollout")
    hall.ledger.close()


def test_a_stop_beside_the_robot_that_ended_with_the_gateway_away_is_over(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    edge.latch.stop("ros-1", "ros")
    hall.pass_time(3.0)
    hall = hall.killed()
    edge.latch.release("ros-1")
    edge.latch.start()
    hall.pass_time(10.0)
    assert "estop" not in commands(edge) and hall.lease("robot-0") == ("main", "rollout")
    hall.ledger.close()


def test_a_new_control_process_is_told_of_the_stop(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(3.0)
    edge.pid += 1
    edge.latch = StopLatch()
    edge.mode, edge.job = "reset", None
    edge.hello()
    hall.pass_time(5.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == (f"web-{me}", "estop")


def test_a_teleoperator_stops_a_robot_that_is_not_back_since_a_restart(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall = hall.killed()
    hall.edges = []
    hall.server.cut.add("robot-0")
    teleoperator = hall.peer("teleoperator")
    assert (
        "no link to the gateway now; it hears of it"
        in hall.ask(teleoperator, OperatorCommand("robot-0", "estop")).refused
    )
    assert hall.lease("robot-0") == ("teleoperator", "estop")
    assert "there is no robot 'robot-9'" in hall.ask(teleoperator, OperatorCommand("robot-9", "estop")).refused
    hall = hall.killed()  # the stop is kept
    hall.server.cut.clear()
    hall.edges = [edge]
    hall.pass_time(20.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == ("teleoperator", "estop")
    hall.ledger.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_stop_stands_while_the_ledger_cannot_be_asked(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """Neither the robot's link nor the ledger answers: the stop is kept for when the robot is back."""
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    if restarted:
        hall = hall.killed()
    hall.server.cut.add("robot-0")
    teleoperator = hall.peer("teleoperator")

    def fail(*arguments: object) -> None:
        raise StorageError("the database does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(hall.ledger, "robot", fail)
        refused = hall.ask(teleoperator, OperatorCommand("robot-0", "estop")).refused
        assert "no link to the gateway now; it hears of it" in refused
    hall.server.cut.clear()
    hall.edges = [edge]
    hall.pass_time(20.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == ("teleoperator", "estop")
    hall.ledger.close()


def test_a_teleoperator_stops_a_robot_whose_spec_is_not_known_yet(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall = hall.killed()
    teleoperator = hall.peer("teleoperator")
    assert "said what its actions mean" in hall.ask(teleoperator, OperatorCommand("robot-0", "take_over")).refused
    teleoperator.send(OperatorCommand("robot-0", "estop"))
    hall.gateway.poll()
    assert hall.received(teleoperator) == []
    edge.poll()
    assert edge.mode == "estop" and hall.lease("robot-0") == ("teleoperator", "estop")
    hall.ledger.close()


def test_who_stopped_a_robot_releases_it_by_another_line_and_nobody_else_does(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    first, again, other = hall.peer("teleoperator@4"), hall.peer("teleoperator"), hall.peer("teleoperator-2")
    refused = hall.ask(again, OperatorCommand("robot-0", "release_estop")).refused
    assert refused == "release_estop: 'robot-0' is not stopped."
    assert hall.ask(again, OperatorCommand("robot-0", "start")).refused == "start: 'robot-0' is not stopped."
    first.send(OperatorCommand("robot-0", "estop", stop="teleoperator-a"))
    hall.pass_time(3.0)
    assert hall.lease("robot-0") == ("teleoperator@4", "estop")
    mine = OperatorCommand("robot-0", "release_estop", stop="teleoperator-a")
    refused = hall.ask(other, mine).refused
    assert "is the stop of 'teleoperator@4', not of 'teleoperator-2'. Release it at the page" in refused
    refused = hall.ask(again, OperatorCommand("robot-0", "release_estop")).refused
    assert "It is stopped by teleoperator@4 (teleoperator-a)." in refused
    number = hall.gateway._dispatcher.leases.all()[0].number
    assert "Release the stop" in hall.ask(again, ReleaseLease(1, "robot-0", number)).refused
    assert "until it is released" in hall.ask(again, RenewLease(2, "robot-0", number)).refused
    assert "Release that first" in hall.ask(again, OperatorCommand("robot-0", "start")).refused
    again.send(mine)
    hall.gateway.poll()
    assert "has not shown yet" in hall.ask(again, OperatorCommand("robot-0", "start")).refused
    hall.pass_time(5.0)
    assert edge.mode == "hold" and hall.lease("robot-0") == ("teleoperator@4", "estop")
    other.send(OperatorCommand("robot-0", "start"))  # nobody drives it: whoever may drive may start it
    hall.pass_time(5.0)
    assert edge.mode == "policy" and hall.lease("robot-0") == ("main", "rollout")


# --- several stops ----------------------------------------------------------------------------------------------------


def test_each_stop_is_released_by_its_name_and_the_last_leaves_the_robot_ready(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "estop")
    page(hall, you, "estop")
    edge.latch.stop("cli-1", "cli")
    hall.pass_time(1.0)
    mine, yours, _ = edge.latch.state.stops
    assert shown(hall) == ({mine: f"web-{me}", yours: f"web-{you}", "cli-1": "cli"}, False)
    for wrong in ("", "web-9"):
        page(hall, me, "release_estop", stop=wrong)
        (refused,) = hall.desk.pop_rejections(me)
        assert all(stop in refused for stop in (mine, yours, "cli-1"))
    page(hall, me, "start")
    assert "Release that first" in hall.desk.pop_rejections(me)[0]
    page(hall, me, "release_estop", stop=mine)
    hall.pass_time(1.0)
    assert hall.lease("robot-0") == (f"web-{you}", "estop")
    page(hall, me, "release_estop", stop=yours)
    page(hall, me, "release_estop", stop="cli-1")
    hall.pass_time(1.0)
    assert shown(hall) == ({}, True) and edge.mode == "hold"
    page(hall, you, "start")
    hall.pass_time(5.0)
    assert shown(hall) == ({}, False) and edge.mode == "policy"
    assert hall.lease("robot-0") == ("main", "rollout")


def test_a_late_release_of_an_old_stop_does_not_touch_a_newer_one(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    (old,) = edge.latch.state.stops
    hall.pass_time(1.0)
    late = OperatorCommand("robot-0", "release_estop", stop=old)
    page(hall, me, "release_estop", stop=old)
    page(hall, me, "estop")
    hall.server.send("robot-0", late)  # the robot hears it once more
    page(hall, me, "release_estop", stop=old)
    assert f"'{old}' is no stop" in hall.desk.pop_rejections(me)[0]
    hall.pass_time(5.0)
    assert edge.mode == "estop" and old not in edge.latch.state.stops
    hall = hall.killed()
    me = hall.desk.join()
    hall.pass_time(1.0)
    page(hall, me, "release_estop", stop=old)
    assert f"'{old}' is no stop" in hall.desk.pop_rejections(me)[0]
    hall.pass_time(5.0)
    assert edge.mode == "estop" and hall.lease("robot-0") == ("web-1", "estop")
    hall.ledger.close()


def test_a_release_that_is_lost_leaves_the_stop_standing(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(1.0)
    (stop,) = edge.latch.state.stops
    hall.server.cut.add("robot-0")
    release(hall, me, edge)
    hall.pass_time(10.0)
    hall.server.cut.clear()
    edge.hello()
    hall.pass_time(3.0)
    assert shown(hall) == ({stop: f"web-{me}"}, False) and commands(edge) == ["estop"]
    release(hall, me, edge)
    page(hall, me, "start")
    hall.pass_time(5.0)
    assert edge.mode == "policy" and hall.lease("robot-0") == ("main", "rollout")


def test_all_stops_that_were_lost_outlive_the_gateway(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    hall.server.cut.add("robot-0")
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "estop")
    page(hall, you, "estop")
    hall = hall.killed()
    hall.server.cut.clear()
    hall.pass_time(5.0)
    assert sorted(edge.latch.state.stops.values()) == [f"web-{me}", f"web-{you}"]
    hall.ledger.close()


def test_a_robot_that_waits_to_be_started_waits_for_the_next_gateway_too(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me = hall.desk.join()
    page(hall, me, "estop")
    hall.pass_time(1.0)
    release(hall, me, edge)
    hall = hall.killed()
    hall.pass_time(20.0)
    assert hall.lease("robot-0") == (f"web-{me}", "estop") and shown(hall) == ({}, True)
    page(hall, hall.desk.join(), "start")
    hall.pass_time(5.0)
    assert edge.mode == "policy" and hall.lease("robot-0") == ("main", "rollout")
    hall.ledger.close()


def test_who_drives_a_robot_starts_it(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    me, you = hall.desk.join(), hall.desk.join()
    page(hall, me, "take_over")
    page(hall, you, "estop")
    hall.pass_time(1.0)
    release(hall, you, edge)  # one's own, also while somebody else drives
    hall.pass_time(1.0)
    with pytest.raises(RejectedError, match="driven from another page"):
        page(hall, you, "start")
    teleoperator = hall.peer("teleoperator")
    refused = hall.ask(teleoperator, OperatorCommand("robot-0", "start")).refused
    assert refused == f"start: 'robot-0' is driven by 'web-{me}', who has to start it."
    page(hall, me, "start")
    hall.pass_time(1.0)
    assert edge.mode == "human" and hall.lease("robot-0") == (f"web-{me}", "operator")


def test_the_first_word_of_a_new_control_process_ends_no_stop(hall: Hall) -> None:
    edge = hall.edge("robot-0")
    hall.pass_time(1.0)
    edge.latch.stop("ros-1", "ros")
    hall.pass_time(10.0)
    kept, edge.latch = edge.latch, StopLatch()  # it has not asked the driver yet
    edge.status()
    hall.gateway.poll()
    edge.latch = kept
    assert hall.lease("robot-0") == ("beside the robot", "estop")
    hall.pass_time(5.0)
    assert shown(hall) == ({"ros-1": "ros"}, False)


def release(hall: Hall, operator: int, edge: FakeEdge) -> None:
    """Every stop of the robot, by its name."""
    hall.pass_time(0.2)
    for stop in edge.latch.state.stops:
        page(hall, operator, "release_estop", edge.name, stop=stop)
    hall.pass_time(0.2)


def shown(hall: Hall, robot: str = "robot-0") -> tuple[dict[str, str], bool]:
    """Who stops the robot, by the id of the stop, and whether it waits to be started, as the page has it."""
    hall.pass_time(0.2)
    (model,) = [model for model in hall.view.snapshot()["robots"] if model["name"] == robot]
    return {stop["id"]: stop["who"] for stop in model["stops"]}, model["ready"]
