"""What a robot makes of a person's messages."""

from __future__ import annotations

import numpy as np
import pytest

from robot_edge.control.operator_override import OperatorOverride
from tests import samples
from tests.people import Person
from wire.clock import ManualClock

MS = 1_000_000
EXECUTED = np.array([0, 0, 0, 1], np.float32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10**9)


@pytest.fixture
def human(clock: ManualClock) -> OperatorOverride:
    return OperatorOverride(samples.spec(), clock)


@pytest.fixture
def person(clock: ManualClock) -> Person:
    return Person(clock)


def test_a_key_moves_and_its_release_holds(human: OperatorOverride, person: Person) -> None:
    assert human.handle_command(person("take_over"))
    assert not human.handle_command(person("take_over"))
    human.handle_command(person("command", 0.5, 0, 0, -1))
    command = human.action(EXECUTED)
    assert command is not None
    # the gripper stays as it is until the person changes it
    assert command.tolist() == [0.5, 0, 0, 1]
    human.handle_command(person("command", 0, 0, 0, -1))
    assert human.action(EXECUTED) is None
    human.handle_command(person("command", 0, 0, 0, 0.5))
    command = human.action(EXECUTED)
    assert command is not None
    assert command.tolist() == [0, 0, 0, 0.5]
    human.handle_command(person("command"))
    assert human.action(EXECUTED) is None, "nothing is pressed"


def test_an_old_command_is_a_released_key(human: OperatorOverride, person: Person, clock: ManualClock) -> None:
    human.handle_command(person("take_over"))
    human.handle_command(person("command", 1, 0, 0, 0))
    clock.advance(240 * MS)
    assert human.action(EXECUTED) is not None
    clock.advance(20 * MS)
    assert human.action(EXECUTED) is None


def test_a_lost_link_holds_until_the_person_is_back(human: OperatorOverride, person: Person) -> None:
    human.handle_command(person("take_over"))
    human.handle_command(person("command", 1, 0, 0, 0))
    human.handle_command(person("drop_link", sequence=0))
    assert human.in_control
    assert not human.linked
    assert human.action(EXECUTED) is None
    human.handle_command(person("command", 1, 0, 0, 0))
    assert human.linked


def test_a_takeover_that_is_said_again_changes_nothing_but_after_a_lost_link(
    human: OperatorOverride, person: Person
) -> None:
    human.handle_command(person("take_over"))
    human.handle_command(person("command", 0.5, 0, 0, 0.5))
    human.handle_command(person("command", 0.5, 0, 0, -0.5))
    human.handle_command(person("take_over"))
    command = human.action(EXECUTED)
    # its gripper too stays what the person has set
    assert command is not None and command.tolist() == [0.5, 0, 0, -0.5]
    human.handle_command(person("drop_link"))
    human.handle_command(person("take_over"))
    assert human.linked and human.action(EXECUTED) is None


def test_who_takes_over_from_another_begins_with_no_command(
    human: OperatorOverride, person: Person, clock: ManualClock
) -> None:
    assert human.handle_command(person("take_over"))
    human.handle_command(person("command", 1, 0, 0, 0))
    assert not human.handle_command(Person(clock, 2, "web-2")("take_over")), "it is one takeover of the robot"
    assert human.operator == "web-2" and human.action(EXECUTED) is None


def test_nobody_moves_a_robot_without_taking_over(human: OperatorOverride, person: Person) -> None:
    human.handle_command(person("command", 1, 0, 0, 0))
    assert human.action(EXECUTED) is None


@pytest.mark.parametrize("action", [(1.0,), (float("nan"), 0, 0, 0)])
def test_bad_commands_are_refused(human: OperatorOverride, person: Person, action: tuple[float, ...]) -> None:
    human.handle_command(person("take_over"))
    human.handle_command(person("command", *action))
    assert human.action(EXECUTED) is None
