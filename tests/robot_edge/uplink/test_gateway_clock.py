"""What the gateway stamped, by the robot's own clock: never later than it was."""

from __future__ import annotations

from robot_edge.uplink.gateway_clock import GatewayClock
from wire.clock import clock_name
from wire.messages.gateway import HelloAck

SECOND = 1_000_000_000


def test_on_one_machine_the_clocks_are_one() -> None:
    clock = GatewayClock()
    assert clock.ours(5 * SECOND) == 0, "nothing is known before an answer"
    clock.measure(HelloAck(clock_name(), 9 * SECOND, 8 * SECOND))
    assert clock.ours(5 * SECOND) == 5 * SECOND


def test_the_message_that_waited_least_tells_the_difference() -> None:
    """The gateway's clock is 100 s ahead; messages take 20 ms, or 3 s where the link stalls."""
    clock = GatewayClock()
    for way_ns in (3 * SECOND, 20_000_000, 2 * SECOND):
        clock.measure(HelloAck("monotonic:elsewhere", 110 * SECOND + way_ns, 10 * SECOND))
    assert clock.ours(107 * SECOND) == 7 * SECOND - 20_000_000
