from __future__ import annotations

import contextlib
import json

import pytest

from cloud_learner.operator.command_queue import MAX_COMMANDS, MAX_VERSION_CHANGES, VersionChange
from cloud_learner.operator.sessions import OperatorSessions
from cloud_learner.operator.view import FleetView
from tests.cloud_learner.operator.fakes import arm_spec, edge_status, robot_state
from wire.clock import ManualClock
from wire.errors import ProtocolError, RejectedError
from wire.messages.gateway import OperatorCommand
from wire.types import CommandType


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def view(clock: ManualClock) -> FleetView:
    view = FleetView(clock)
    for name in ("r1", "r2"):
        view.add_robot(name, arm_spec())
        view.update_status(edge_status(name))
    return view


@pytest.fixture
def desk(view: FleetView, clock: ManualClock) -> OperatorSessions:
    return OperatorSessions(view, clock=clock)


def say(desk: OperatorSessions, operator: int, kind: str, robot: str = "r1", **more: object) -> str:
    return desk.handle_message(operator, json.dumps({"type": kind, "robot": robot, "captured_ms": 5.0, **more}))


def kinds(view: FleetView) -> list[tuple[str, str]]:
    return [(command.robot, command.kind) for command in view.pop_commands()]


def test_the_whole_way_of_one_intervention(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    say(desk, me, "take_over")
    assert desk.control(me) == {"r1": "you"}
    assert desk.control() == {"r1": "other"}
    say(desk, me, "command", action=[0, 0.5, -1, 1], sequence=4)
    say(desk, me, "hand_back")
    take, command, back = view.pop_commands()
    assert command.captured_ns == 5_000_000, "as the page says"
    assert (take.kind, command.kind, back.kind) == ("take_over", "command", "hand_back")
    assert (command.action, command.sequence, command.operator) == ((0.0, 0.5, -1.0, 1.0), 4, f"web-{me}")
    assert desk.control(me) == {}


def test_whoever_drives_says_what_they_do(desk: OperatorSessions, view: FleetView):
    me, other = desk.join(), desk.join()
    say(desk, me, "take_over")
    say(desk, me, "recover")
    with pytest.raises(RejectedError, match="another page"):
        say(desk, other, "correct")
    with pytest.raises(ProtocolError, match="does not say when"):
        say(desk, me, "correct", captured_ms=0.0)
    say(desk, me, "correct")
    assert kinds(view) == [("r1", "take_over"), ("r1", "recover"), ("r1", "correct")]


@pytest.mark.parametrize("captured_ms", [0.0, -1.0, 1e300])
def test_a_command_says_when_it_was_made(desk: OperatorSessions, view: FleetView, captured_ms: float):
    me = desk.join()
    say(desk, me, "take_over")
    with pytest.raises(ProtocolError, match="does not say when it was made"):
        say(desk, me, "command", action=[0, 0, 0, 0], captured_ms=captured_ms)
    assert kinds(view) == [("r1", "take_over")]


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ([0, 0, 0], "3 numbers for r1, whose actions have 4"),
        ([0] * 5, "5 numbers"),
        ([0, 1.01, 0, 0], "'dy' = 1.01, outside [-1, 1] cm/step"),
        ([0, -1e300, 0, 0], "outside"),
    ],
)
def test_commands_outside_the_spec_are_refused(desk: OperatorSessions, view: FleetView, action: list, words: str):
    me = desk.join()
    say(desk, me, "take_over")
    view.pop_commands()
    with pytest.raises(RejectedError) as caught:
        say(desk, me, "command", action=action)
    assert words in str(caught.value)
    assert view.pop_commands() == []


@pytest.mark.parametrize(
    "data",
    [
        "",
        "hello",
        "[]",
        "{}",
        '{"type": "explode", "robot": "r1"}',
        '{"type": "estop"}',
        '{"type": "estop", "robot": 3}',
        '{"type": "estop", "robot": "r1", "also": 1}',
        '{"type": "command", "robot": "r1", "action": [NaN, 0, 0, 0]}',
        '{"type": "command", "robot": "r1", "action": [1e999, 0, 0, 0]}',
        '{"type": "command", "robot": "r1", "action": ["1", 0, 0, 0]}',
        '{"type": "command", "robot": "r1", "action": null}',
        b"\xff\xfe",
        "[" * 10_000,
        '{"type": "estop", "robot": "' + "r" * 20_000 + '"}',
    ],
)
def test_what_is_no_message_does_nothing(desk: OperatorSessions, view: FleetView, data: str | bytes):
    me = desk.join()
    say(desk, me, "take_over")
    view.pop_commands()
    with pytest.raises(ProtocolError):
        desk.handle_message(me, data)
    assert view.pop_commands() == []


def test_an_unknown_robot_is_named_with_the_nearest(desk: OperatorSessions, view: FleetView):
    with pytest.raises(RejectedError, match=r"no robot 'r11'. Did you mean 'r1'\?"):
        say(desk, desk.join(), "estop", "r11")
    assert view.pop_commands() == []


def test_one_operator_per_robot(desk: OperatorSessions, view: FleetView):
    me, you = desk.join(), desk.join()
    say(desk, me, "take_over")
    view.pop_commands()
    for kind, more in (
        ("take_over", {}),
        ("hand_back", {}),
        ("release_estop", {}),
        ("command", {"action": [0, 0, 0, 0]}),
    ):
        with pytest.raises(RejectedError, match="driven from another page"):
            say(desk, you, kind, **more)
    assert view.pop_commands() == []
    say(desk, you, "estop")  # anybody may stop
    say(desk, you, "take_over", "r2")
    assert desk.control(you) == {"r1": "other", "r2": "you"}
    say(desk, me, "hand_back")
    say(desk, you, "take_over")
    assert desk.control(you)["r1"] == "you"


def test_commands_need_a_take_over(desk: OperatorSessions, view: FleetView):
    with pytest.raises(RejectedError, match="not under your control"):
        say(desk, desk.join(), "command", action=[0, 0, 0, 0])
    assert view.pop_commands() == []


def test_a_silent_page_loses_its_robots(desk: OperatorSessions, view: FleetView, clock: ManualClock):
    me, you = desk.join(), desk.join()
    say(desk, me, "take_over")
    say(desk, me, "take_over", "r2")
    clock.advance(200_000_000)
    desk.handle_message(me, '{"type": "heartbeat"}')
    clock.advance(300_000_000)
    assert desk.expire() == {}
    clock.advance(1)
    view.pop_commands()
    assert desk.expire() == {me: ["r1", "r2"]}
    assert kinds(view) == [("r1", "drop_link"), ("r2", "drop_link")]
    assert desk.expire() == {}
    assert desk.control(me) == {"r1": "dropped", "r2": "dropped"}
    with pytest.raises(RejectedError, match="not under your control"):
        say(desk, me, "command", action=[0, 0, 0, 0])
    say(desk, you, "hand_back")  # somebody must be able to let the policy go on
    assert desk.control(me) == {"r2": "dropped"}
    say(desk, me, "take_over", "r2")
    assert desk.control(me) == {"r2": "you"}


def test_a_page_that_leaves_drops_its_robots(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    say(desk, me, "take_over")
    view.pop_commands()
    assert desk.leave(me) == ["r1"]
    assert kinds(view) == [("r1", "drop_link")]
    assert desk.leave(desk.join()) == []


def test_a_lost_robot_cannot_be_taken_and_a_stop_warns(desk: OperatorSessions, view: FleetView, clock: ManualClock):
    me = desk.join()
    clock.advance(3_000_000_000)
    with pytest.raises(RejectedError, match="no link"):
        say(desk, me, "take_over")
    assert "may not reach it" in say(desk, me, "estop")
    assert kinds(view) == [("r1", "estop")]


def test_robots_that_keys_cannot_drive(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    view.add_robot("r3", arm_spec(CommandType.absolute))
    view.update_status(edge_status("r4"))
    view.update_status(edge_status("r3"))
    with pytest.raises(RejectedError, match="absolute target"):
        say(desk, me, "take_over", "r3")
    with pytest.raises(RejectedError, match="not said what its actions mean"):
        say(desk, me, "take_over", "r4")


def test_a_gateway_that_does_not_listen_is_named(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    for i in range(MAX_COMMANDS):
        view.submit_command(OperatorCommand(f"x{i}", "take_over"))
    with pytest.raises(RejectedError, match="takes no commands now"):
        say(desk, me, "take_over")
    assert desk.control(me) == {}


def test_what_the_gateway_refuses_is_let_go_without_a_word_to_the_robot(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    say(desk, me, "take_over")
    (command,) = view.pop_commands()
    view.reject_command(command, "r1 is held by somebody else.")
    assert desk.pop_rejections(me) == ["r1 is held by somebody else."]
    assert desk.control(me) == {}
    assert view.pop_commands() == []


def test_robots_that_are_driven_elsewhere_or_were_dropped_are_known(desk: OperatorSessions, view: FleetView):
    me = desk.join()
    view.update_fleet(
        (robot_state("r1", "teleoperator", "teleoperation"), robot_state("r2", "dropped:web-9", "operator")), ()
    )
    assert desk.control(me) == {"r1": "other", "r2": "dropped"}
    with pytest.raises(RejectedError, match=r"r1 is held by 'teleoperator' \(teleoperation\)"):
        say(desk, me, "take_over")
    say(desk, me, "take_over", "r2")
    assert desk.control(me) == {"r1": "other", "r2": "you"}
    view.update_fleet((robot_state("r1", "main"), robot_state("r2", f"web-{me}", "operator")), ())
    assert desk.control(me) == {"r2": "you"}
    say(desk, me, "take_over")  # a job gives way to a person


@pytest.mark.parametrize("sequence", [-1, 2**63 - 1, 2**63, 10**30])
def test_a_number_that_no_message_can_carry_is_refused(desk: OperatorSessions, view: FleetView, sequence: int):
    with pytest.raises(ProtocolError, match="sequence"):
        say(desk, desk.join(), "take_over", sequence=sequence)
    assert kinds(view) == []
    assert desk.refused == {"malformed": 1}


def test_a_page_wishes_as_often_as_a_person_does_and_stops_and_drives_as_often_as_it_likes(
    desk: OperatorSessions, view: FleetView, clock: ManualClock
):
    me, you = desk.join(), desk.join()

    def wishes(count: int) -> int:
        granted = 0
        for number in range(count):
            with contextlib.suppress(RejectedError):
                say(desk, me, "hand_back" if number % 2 else "take_over")
                granted += 1
            view.pop_commands()
        return granted

    assert wishes(1000) == 100
    assert desk.refused == {"too_often": 900}
    with pytest.raises(RejectedError, match="asks for too much at once, so r1 did not get 'take_over'"):
        say(desk, me, "take_over")
    clock.advance(1_000_000_000)
    assert wishes(1000) == 20
    # Others, stops and what drives are none of the matter.
    say(desk, you, "take_over", "r2")
    say(desk, you, "hand_back", "r2")
    clock.advance(50_000_000)
    say(desk, me, "take_over")
    view.pop_commands()
    for number in range(1, 500):
        say(desk, me, "command", action=[0, 0, 0, 0], sequence=number)
        say(desk, me, "estop")
        assert kinds(view) == [("r1", "command"), ("r1", "estop")]


def test_versions_are_changed_by_any_page(desk: OperatorSessions, view: FleetView):
    me, other = desk.join(), desk.join()
    say(desk, other, "take_over")
    for more in (
        {"change": "promote", "number": 7},
        {"change": "pin", "number": 3, "robot": "r1"},
        {"change": "pin", "robot": "gone"},
        {"change": "freeze"},
    ):
        say(desk, me, "versions", **{"robot": "", **more})
    assert view.pop_version_changes() == [
        VersionChange(f"web-{me}", "promote", 7),
        VersionChange(f"web-{me}", "pin", 3, "r1"),
        VersionChange(f"web-{me}", "pin", 0, "gone"),
        VersionChange(f"web-{me}", "freeze"),
    ]
    assert kinds(view) == [("r1", "take_over")]


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({}, ProtocolError, "does not say what to do with versions"),
        ({"change": "list"}, ProtocolError, "does not say what to do with versions"),
        ({"change": "delete"}, ProtocolError, "not a message"),
        ({"change": "promote", "number": -1}, ProtocolError, "not a message"),
        ({"change": "promote", "number": 2**63}, ProtocolError, "not a message"),
        ({"change": "promote", "number": "7"}, ProtocolError, "not a message"),
        ({"change": "pin", "number": 3, "robot": "r3"}, RejectedError, "no robot 'r3'"),
    ],
)
def test_what_is_no_change_of_versions_is_refused(
    desk: OperatorSessions, view: FleetView, more: dict, error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        say(desk, desk.join(), "versions", **{"robot": "", **more})
    assert view.pop_version_changes() == []


def test_changes_of_versions_that_nobody_pops_are_refused(desk: OperatorSessions):
    me = desk.join()
    for _ in range(MAX_VERSION_CHANGES):
        say(desk, me, "versions", robot="", change="freeze")
    with pytest.raises(RejectedError, match="takes no commands now, so 'freeze'"):
        say(desk, me, "versions", robot="", change="freeze")
    for _ in range(100 - MAX_VERSION_CHANGES - 1):
        with pytest.raises(RejectedError, match="takes no commands now"):
            say(desk, me, "versions", robot="", change="thaw")
    with pytest.raises(RejectedError, match="asks for too much at once, so 'thaw'"):
        say(desk, me, "versions", robot="", change="thaw")
