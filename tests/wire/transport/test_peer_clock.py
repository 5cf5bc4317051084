"""What one computer stamped, by the clock of another: never later than it was, and right within what is said."""

from __future__ import annotations

import math
import random

import pytest

from wire.clock import clock_name
from wire.messages.gateway import Heartbeat, HelloAck
from wire.transport.peer_clock import MOST_DRIFT_PPM, PeerClock
from wire.transport.session import BEAT_S

MS, SECOND, YEAR = 1_000_000, 1_000_000_000, 365 * 86_400 * 1_000_000_000
AHEAD = 100 * SECOND
"""of the gateway"""


def measured(clock: PeerClock, sent_ns: int, there_ns: int, back_ns: int, ahead_ns: int = AHEAD) -> int:
    answer = HelloAck("monotonic:elsewhere", sent_ns + there_ns + ahead_ns, sent_ns)
    return clock.on_answer(answer, sent_ns + there_ns + back_ns)


class TwoSides:
    """A robot and a gateway a world apart, that beat and answer; true time is the gateway's."""

    def __init__(self, ahead_ns: int, drift_ppm: float, seed: int = 0) -> None:
        self.now_ns = 3 * SECOND
        self.ahead_ns, self.drift_ppm = ahead_ns, drift_ppm
        """the robot's clock, at first, and how much faster it runs"""
        self.robot, self.gateway = PeerClock(), PeerClock()
        self._draw = random.Random(seed)
        self._answer = 0, 0

    def true_ns(self, now_ns: int) -> int:
        """By how much the robot is ahead."""
        return self.ahead_ns + round((now_ns - 3 * SECOND) * self.drift_ppm / 1e6)

    def beat(self, there_ns: int, back_ns: int) -> tuple[int, int]:
        """A second passes and a heartbeat is answered; (jump by the gateway, by the robot)."""
        self.now_ns += round(BEAT_S * SECOND)
        sent_ns = self.now_ns + self.true_ns(self.now_ns)
        self.now_ns += there_ns
        beaten = self.gateway.on_heartbeat("the robot's", Heartbeat(sent_ns, *self._answer), self.now_ns)
        answer = HelloAck("the gateway's", self.now_ns, sent_ns)
        self.now_ns += back_ns
        robot_ns = self.now_ns + self.true_ns(self.now_ns)
        self._answer = answer.received_ns, robot_ns
        return beaten, self.robot.on_answer(answer, robot_ns)

    def delay_ns(self) -> int:
        return int(self._draw.expovariate(1 / (20 * MS))) + 50_000

    def check(self) -> None:
        """The truth is within the bounds that each side states."""
        true_ns = self.true_ns(self.now_ns)
        offset = self.gateway.offset(self.now_ns)
        assert offset is not None
        if offset.uncertainty_ns is not None:
            assert abs(offset.ns - true_ns) <= offset.uncertainty_ns
        robot_ns = self.now_ns + true_ns
        offset = self.robot.offset(robot_ns)
        assert offset is not None and offset.uncertainty_ns is not None
        assert abs(-offset.ns - true_ns) <= offset.uncertainty_ns
        assert self.robot.ours(self.now_ns) <= robot_ns
        assert self.robot.theirs(robot_ns) <= self.now_ns


def test_on_one_machine_the_clocks_are_one() -> None:
    clock = PeerClock()
    assert (clock.ours(5 * SECOND), clock.theirs(5 * SECOND)) == (0, 0), "nothing is known before an answer"
    assert clock.offset(0) is None
    clock.on_answer(HelloAck(clock_name(), 9 * SECOND, 8 * SECOND), 10 * SECOND)
    assert (clock.ours(5 * SECOND), clock.theirs(5 * SECOND)) == (5 * SECOND, 5 * SECOND)
    assert clock.offset(0) == (0, 0)


def test_the_messages_that_waited_least_tell_the_difference() -> None:
    clock = PeerClock()
    for there_ns, back_ns in ((3 * SECOND, 5 * MS), (20 * MS, SECOND), (2 * SECOND, 2 * SECOND)):
        measured(clock, 10 * SECOND, there_ns, back_ns)
    tolerance_ns = 20 * SECOND * MOST_DRIFT_PPM // 1_000_000
    assert 0 <= 7 * SECOND - 20 * MS - clock.ours(107 * SECOND) <= tolerance_ns
    assert 0 <= 107 * SECOND - 5 * MS - clock.theirs(7 * SECOND) <= tolerance_ns


def test_another_clock_is_measured_anew() -> None:
    """The gateway's computer was restarted, or is another one."""
    for ahead_ns in (5 * SECOND, 500 * SECOND):
        clock = PeerClock()
        measured(clock, 10 * SECOND, MS, MS)
        clock.on_answer(HelloAck("monotonic:anew", 11 * SECOND + ahead_ns + MS, 11 * SECOND), 11 * SECOND + 2 * MS)
        assert 0 <= 12 * SECOND - MS - clock.ours(12 * SECOND + ahead_ns) < MS
        assert 0 <= 12 * SECOND + ahead_ns - MS - clock.theirs(12 * SECOND) < MS


@pytest.mark.parametrize("drift_ppm", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("ahead_ns", [-2 * SECOND, 0, YEAR])
def test_the_truth_is_within_the_bounds_however_clocks_drift_and_the_line_stalls(
    ahead_ns: int, drift_ppm: float
) -> None:
    for seed in range(4):
        sides = TwoSides(ahead_ns, drift_ppm, seed)
        for second in range(600):
            if second % 97 == 50:
                sides.now_ns += 40 * SECOND  # nothing passes
            assert sides.beat(sides.delay_ns(), sides.delay_ns()) == (0, 0), "no jump is seen where there is none"
            sides.check()


def test_the_drift_is_told_with_what_it_is_worth() -> None:
    for drift_ppm in (-100.0, 40.0):
        sides = TwoSides(YEAR, drift_ppm)
        assert sides.gateway.drift_ppm(sides.now_ns) is None
        for _ in range(900):
            sides.beat(sides.delay_ns() // 20, sides.delay_ns() // 20)
        found = sides.gateway.drift_ppm(sides.now_ns)
        assert found is not None
        assert abs(found[0] - drift_ppm) <= found[1] < 10


def test_a_way_that_is_slow_in_one_direction_shifts_the_offset_by_no_more_than_is_said() -> None:
    for there_ns, back_ns in ((200 * MS, MS), (MS, 200 * MS)):
        sides = TwoSides(5 * SECOND, 100.0)
        for _ in range(50):
            sides.beat(there_ns, back_ns)
            sides.check()
        offset = sides.gateway.offset(sides.now_ns)
        assert offset is not None and offset.uncertainty_ns is not None
        assert 99 * MS < abs(offset.ns - sides.true_ns(sides.now_ns)) <= offset.uncertainty_ns < 110 * MS


@pytest.mark.parametrize("jump_ns", [-YEAR, -SECOND, -200 * MS, 200 * MS, SECOND, YEAR])
def test_a_jump_is_noticed_within_two_beats_by_both_sides_and_told_once(jump_ns: int) -> None:
    sides = TwoSides(5 * SECOND, 100.0)
    for _ in range(30):
        sides.beat(MS, MS)
    sides.ahead_ns += jump_ns
    jumps = [sides.beat(MS, MS) for _ in range(20)]
    for side, sign in ((0, 1), (1, -1)):
        (at,) = [number for number, found in enumerate(jumps) if found[side]]
        assert at < 2
        assert math.isclose(jumps[at][side], sign * jump_ns, abs_tol=20 * MS)
    sides.check()


def test_answers_that_come_late_twice_and_out_of_order_do_no_harm() -> None:
    clock, draw = PeerClock(), random.Random(1)
    arrivals = []
    for second in range(300):
        sent_ns, there_ns = second * SECOND, int(draw.expovariate(1 / (50 * MS)))
        answer = HelloAck("elsewhere", sent_ns + there_ns + AHEAD, sent_ns)
        for _ in range(draw.choice((0, 1, 1, 2))):
            back_ns = int(draw.expovariate(1 / (50 * MS))) + draw.choice((0, 0, 0, 5 * SECOND))
            arrivals.append((sent_ns + there_ns + back_ns, answer))
    for now_ns, answer in sorted(arrivals, key=lambda one: one[0]):
        assert clock.on_answer(answer, now_ns) == 0
        assert clock.ours(now_ns + AHEAD) <= now_ns
        assert clock.theirs(now_ns) <= now_ns + AHEAD


def test_one_way_is_known_before_the_first_round_trip() -> None:
    clock = PeerClock()
    clock.on_sent("elsewhere", 5 * SECOND, 7 * SECOND)
    clock.on_sent("elsewhere", 7 * SECOND, 8 * SECOND)
    assert clock.offset(8 * SECOND) == (-SECOND, None)
    assert (clock.ours(1), clock.theirs(1)) == (0, 0)


def test_whatever_a_gateway_says_a_message_can_carry_what_comes_of_it() -> None:
    clock = PeerClock()
    clock.on_answer(HelloAck("elsewhere", 0, 2**64 - 1), 0)
    clock.on_answer(HelloAck("elsewhere", 2**64 - 1, -(2**63)), 0)
    clock.on_heartbeat("elsewhere", Heartbeat(-(2**63), 2**64 - 1, -(2**63)), 0)
    for time_ns in (clock.ours(2**64 - 1), clock.ours(-(2**63)), clock.theirs(2**64 - 1), clock.theirs(-(2**63))):
        assert -(2**63) <= time_ns < 2**63
