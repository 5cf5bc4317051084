"""What one computer stamped, by the clock of another: never later than it was."""

from __future__ import annotations

import numpy as np

from wire.clock import clock_name
from wire.messages.gateway import HelloAck
from wire.transport.gateway_clock import WINDOW_NS, GatewayClock

MS, SECOND = 1_000_000, 1_000_000_000
AHEAD = 100 * SECOND
"""of the gateway"""


def measured(clock: GatewayClock, sent_ns: int, there_ns: int, back_ns: int, ahead_ns: int = AHEAD) -> None:
    answer = HelloAck("monotonic:elsewhere", sent_ns + there_ns + ahead_ns, sent_ns)
    clock.measure(answer, sent_ns + there_ns + back_ns)


def test_on_one_machine_the_clocks_are_one() -> None:
    clock = GatewayClock()
    assert (clock.ours(5 * SECOND), clock.theirs(5 * SECOND)) == (0, 0), "nothing is known before an answer"
    clock.measure(HelloAck(clock_name(), 9 * SECOND, 8 * SECOND), 10 * SECOND)
    assert (clock.ours(5 * SECOND), clock.theirs(5 * SECOND)) == (5 * SECOND, 5 * SECOND)


def test_the_messages_that_waited_least_tell_the_difference() -> None:
    clock = GatewayClock()
    for there_ns, back_ns in ((3 * SECOND, 5 * MS), (20 * MS, SECOND), (2 * SECOND, 2 * SECOND)):
        measured(clock, 10 * SECOND, there_ns, back_ns)
    assert clock.ours(107 * SECOND) == 7 * SECOND - 20 * MS
    assert clock.theirs(7 * SECOND) == 107 * SECOND - 5 * MS


def test_another_clock_is_measured_anew() -> None:
    """The gateway's computer was restarted, or is another one."""
    for ahead_ns in (5 * SECOND, 500 * SECOND):
        clock = GatewayClock()
        measured(clock, 10 * SECOND, MS, MS)
        clock.measure(HelloAck("monotonic:anew", 11 * SECOND + ahead_ns + MS, 11 * SECOND), 11 * SECOND + 2 * MS)
        assert clock.ours(12 * SECOND + ahead_ns) == 12 * SECOND - MS
        assert clock.theirs(12 * SECOND) == 12 * SECOND + ahead_ns - MS


def test_a_time_is_never_later_than_it_was_however_the_line_stalls() -> None:
    clock, rng = GatewayClock(), np.random.default_rng(0)
    for second in range(200):
        measured(clock, second * SECOND, int(rng.exponential(50 * MS)), int(rng.exponential(50 * MS)))
        assert clock.ours(AHEAD) <= 0
        assert clock.theirs(0) <= AHEAD


def test_clocks_that_drift_apart_are_measured_anew() -> None:
    """By 100 ppm, for three hours: more than a second in all."""
    for drift in (1e-4, -1e-4):
        clock = GatewayClock()
        for second in range(10_800):
            now_ns = second * SECOND
            ahead_ns = AHEAD + round(drift * now_ns)
            measured(clock, now_ns, 10 * MS, 10 * MS, ahead_ns)
            assert abs(clock.ours(now_ns + ahead_ns) - now_ns + 10 * MS) <= 2 * WINDOW_NS * 1e-4
            assert abs(clock.theirs(now_ns) - now_ns - ahead_ns + 10 * MS) <= 2 * WINDOW_NS * 1e-4


def test_whatever_a_gateway_says_a_message_can_carry_what_comes_of_it() -> None:
    clock = GatewayClock()
    clock.measure(HelloAck("elsewhere", 0, 2**64 - 1), 0)
    clock.measure(HelloAck("elsewhere", 2**64 - 1, -(2**63)), 0)
    for time_ns in (clock.ours(2**64 - 1), clock.ours(-(2**63)), clock.theirs(2**64 - 1), clock.theirs(-(2**63))):
        assert -(2**63) <= time_ns < 2**63
