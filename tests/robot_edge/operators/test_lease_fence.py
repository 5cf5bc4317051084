"""Whose messages drive a robot: rule by rule, and over random interleavings of people, replays, delays and restarts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from robot_edge.control.command_inbox import CommandInbox
from robot_edge.control.operator_override import CLOCK_ERROR_S, OperatorOverride
from robot_edge.operators.lease_fence import LeaseFence, Refusal
from robot_edge.operators.sticky_commands import StickyCommands
from tests import samples
from tests.people import Person
from wire.clock import ManualClock
from wire.messages.gateway import COMMAND_FRESH_S, LAST_SEQUENCE, OperatorCommand

MS = 1_000_000
HELD = np.array([0, 0, 0, 1], np.float32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10**9)


def test_only_who_has_taken_over_commands_and_each_command_once(clock: ManualClock) -> None:
    fence, anna, bert = LeaseFence(), Person(clock, 5, "web-1"), Person(clock, 5, "web-2")
    assert fence.admit(anna("command", 1)) is Refusal.not_taken_over
    assert fence.admit(anna("take_over", lease=0)) is Refusal.no_lease
    took = anna("take_over")
    assert fence.admit(took) is Refusal.none
    assert fence.admit(took) is Refusal.replayed
    bert.sequence = 10
    assert fence.admit(bert("command", 1)) is Refusal.other_operator
    assert fence.admit(bert("take_over")) is Refusal.other_operator
    assert fence.admit(bert("hand_back")) is Refusal.other_operator
    command = anna("command", 1)
    assert fence.admit(command) is Refusal.none
    assert fence.admit(command) is Refusal.replayed
    assert fence.admit(anna("command", 1, lease=4)) is Refusal.old_lease
    assert fence.admit(anna("command", 1, lease=6)) is Refusal.not_taken_over
    assert fence.holder is took


def test_a_newer_lease_takes_over_and_the_older_one_is_over(clock: ManualClock) -> None:
    fence, anna, bert = LeaseFence(), Person(clock, 5, "web-1"), Person(clock, 6, "web-2")
    fence.admit(anna("take_over"))
    assert fence.admit(bert("take_over")) is Refusal.none
    for kind in ("command", "take_over", "hand_back", "drop_link"):
        assert fence.admit(anna(kind)) is Refusal.old_lease
    assert fence.holder is not None and fence.holder.operator == "web-2"


def test_a_lease_that_was_handed_back_may_take_over_again_but_not_by_what_was_said_before(clock: ManualClock) -> None:
    fence, anna = LeaseFence(), Person(clock, 5)
    took = anna("take_over")
    fence.admit(took)
    back = anna("hand_back")
    assert fence.admit(back) is Refusal.none and fence.holder is None
    assert fence.admit(took) is Refusal.replayed
    assert fence.admit(anna("take_over")) is Refusal.none
    assert fence.admit(back) is Refusal.replayed and fence.holder is not None
    assert fence.admit(anna("hand_back", sequence=LAST_SEQUENCE)) is Refusal.none
    assert fence.admit(anna("take_over")) is Refusal.replayed, "that was the last of the lease"


def test_somebody_beside_the_robot_outranks_everybody_from_afar(clock: ManualClock) -> None:
    fence, anna, ros = LeaseFence(), Person(clock, 5), Person(clock, 10**15, "ros")
    fence.admit(anna("take_over"))
    assert fence.admit(ros("take_over", beside=True)) is Refusal.none
    assert fence.admit(anna("command", 1)) is Refusal.beside
    assert fence.admit(anna("take_over", lease=7)) is Refusal.beside
    assert fence.admit(anna("hand_back")) is Refusal.beside
    assert fence.admit(ros("command", 1, beside=True)) is Refusal.none
    assert fence.admit(ros("hand_back", beside=True)) is Refusal.none
    assert fence.admit(anna("command", 1)) is Refusal.not_taken_over
    assert fence.admit(anna("take_over")) is Refusal.none
    # the count beside the robot is another one than the gateway's
    assert fence.admit(anna("command", 1)) is Refusal.none


def test_what_another_fence_knew_is_taken_over_unless_it_began_later(clock: ManualClock) -> None:
    fence, anna = LeaseFence(), Person(clock, 5)
    fence.admit(anna("take_over"))
    last = anna("command", 1)
    fence.admit(last)
    again = LeaseFence()
    assert again.restore(fence.state(linked=True))
    assert again.admit(last) is Refusal.replayed
    assert again.admit(anna("command", 1)) is Refusal.none
    assert not again.restore(LeaseFence().state(linked=True))
    assert again.admit(anna("command", 1)) is Refusal.none


Told = list[tuple[str, str]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def human(clock: ManualClock, told: Told) -> OperatorOverride:
    return OperatorOverride(samples.spec(), clock, notify=lambda kind, detail: told.append((kind, detail)))


@pytest.mark.parametrize(
    ("age_s", "refusal"),
    [
        (0.0, None),
        (COMMAND_FRESH_S - 0.001, None),
        (COMMAND_FRESH_S + 0.001, Refusal.stale),
        (-CLOCK_ERROR_S + 0.001, None),
        (-CLOCK_ERROR_S - 0.001, Refusal.future),
        (1.0, Refusal.untimed),  # the clock's origin
    ],
)
def test_a_command_moves_only_while_it_is_fresh(
    human: OperatorOverride, clock: ManualClock, told: Told, age_s: float, refusal: Refusal | None
) -> None:
    anna = Person(clock)
    human.handle_command(anna("take_over"))
    human.handle_command(anna("command", 1, 0, 0, 0, captured_ns=10**9 - round(age_s * 1e9)))
    assert (human.action(HELD) is None) == (refusal is not None)
    assert [detail for _, detail in told] == ([f"command of 'web-1' (lease 1): {refusal}."] if refusal else [])


def test_a_stalled_links_burst_moves_nothing_and_is_told_once(
    human: OperatorOverride, clock: ManualClock, told: Told
) -> None:
    anna = Person(clock)
    human.handle_command(anna("take_over"))
    burst = []
    for _ in range(100):
        burst.append(anna("command", 1, 0, 0, 0))
        clock.advance(20 * MS)
    clock.advance(round(COMMAND_FRESH_S * 1e9))
    for command in burst:
        human.handle_command(command)
        assert human.action(HELD) is None
    assert len(told) == 1 and "the link stalls" in told[0][1]
    human.handle_command(anna("command", 1, 0, 0, 0))
    assert human.action(HELD) is not None, "a fresh one moves it again"


class World:
    """Two people at the gateway and one beside the robot, a link that delays and repeats, and a control process that
    is started again now and then; and a model of who holds the robot, in words of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.clock = ManualClock(10**9)
        self.sticky = StickyCommands()
        self.inbox = self._control()
        self.people = [Person(self.clock, 0, name) for name in ("web-1", "web-2", "ros")]
        self.newest = 0
        self.sent: list[OperatorCommand] = []
        self.under_way: list[OperatorCommand] = []
        self.holder: tuple[int, str, bool] | None = None
        self.high: dict[bool, tuple[int, int]] = {False: (0, 0), True: (0, 0)}
        self.may_move: OperatorCommand | None = None
        self.moved = 0

    def _control(self) -> CommandInbox:
        self.human = OperatorOverride(samples.spec(), self.clock)
        return CommandInbox("robot-0", self.human)

    def step(self) -> None:
        rng = self.rng
        self.clock.advance(int(rng.integers(1, 60)) * MS)
        who = self.people[int(rng.choice(3, p=[0.45, 0.45, 0.1]))]
        beside = who.operator == "ros"
        kind = str(rng.choice(["take_over", "command", "hand_back", "drop_link"], p=[0.12, 0.75, 0.08, 0.05]))
        if kind == "take_over" and (who.lease == 0 or rng.random() < 0.5):
            self.newest += 1
            who.lease, who.sequence = self.newest + (10**15 if beside else 0), 0
        # which command it is can be seen from what the robot does
        number = float(rng.uniform(0.1, 1)) if kind == "command" else 0.0
        message = who(kind, *((number, 0, 0, 0) if kind == "command" else ()), beside=beside)
        if kind == "drop_link":
            message = msgspec.structs.replace(message, sequence=0)
        self.sent = [*self.sent, message][-60:]
        self.under_way.append(message)
        if rng.random() < 0.2:
            old = self.sent[int(rng.integers(len(self.sent)))]
            forged = msgspec.structs.replace(old, operator=str(rng.choice(["web-1", "web-2"])))
            self.under_way.append(forged if rng.random() < 0.3 else old)
        if rng.random() < 0.03:
            self.inbox = self._control()
            self.inbox.handle_message(self.sticky.state())
            self.may_move = None
        if rng.random() < 0.6:  # else the link stalls
            if rng.random() < 0.2:
                rng.shuffle(self.under_way)  # type: ignore[arg-type]
            for arriving in self.under_way:
                self._arrive(arriving)
            self.under_way = []
        action = self.human.action(HELD)
        if action is not None:
            self.moved += 1
            assert self.holder is not None and self.may_move is not None
            assert action[0] == np.float32(self.may_move.action[0])
            assert self.clock.now_ns() - self.may_move.captured_ns <= COMMAND_FRESH_S * 1e9
            assert (self.may_move.lease, self.may_move.operator, self.may_move.beside) == self.holder

    def _arrive(self, message: OperatorCommand) -> None:
        self.sticky.remember(message)
        self.inbox.handle_message(message)
        number = message.lease, message.sequence
        who = message.lease, message.operator, message.beside
        new = number > self.high[message.beside]
        local = self.holder is not None and self.holder[2]
        if message.kind == "take_over" and new and (message.beside or not local):
            if self.holder is not None and self.holder[::2] == who[::2] and self.holder != who:
                return  # another operator of the same lease
            self.may_move = self.may_move if self.holder == who and self.human.linked else None
            self.holder, self.high[message.beside] = who, number
        elif message.kind == "hand_back" and new and self.holder is not None and self.holder[2] == message.beside:
            if self.holder == who or self.holder[0] < message.lease:
                self.holder, self.may_move, self.high[message.beside] = None, None, number
        elif message.kind == "hand_back" and new and self.holder is None:
            self.high[message.beside] = number
        elif message.kind == "command" and new and self.holder == who:
            self.high[message.beside] = number
            if self.clock.now_ns() - message.captured_ns <= COMMAND_FRESH_S * 1e9:
                self.may_move = message
        elif message.kind == "drop_link" and self.holder is not None and self.holder[2] == message.beside:
            self.may_move = None if self.holder[0] <= message.lease else self.may_move


@pytest.mark.parametrize("seed", range(20))
def test_nothing_but_fresh_unrepeated_commands_of_the_newest_holder_ever_move_the_robot(seed: int) -> None:
    world = World(seed)
    for _ in range(1500):
        world.step()
    assert world.moved > 50
