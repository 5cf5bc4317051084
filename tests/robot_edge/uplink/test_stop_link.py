"""The way of stops on a robot's computer: by whichever way a stop comes, the host hears it at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hal.driver_host.stop_line import StopOrder
from hal.safety.stop_latch import StopLatch
from robot_edge.uplink.stop_link import OperatorInbox, StopLink
from robot_edge.uplink.stop_orders import StopOrders
from wire.clock import ManualClock, clock_name
from wire.messages import Message
from wire.messages.gateway import HelloAck, OperatorCommand, StopShown
from wire.stop_state import StopState
from wire.transport.memory_channel import memory_pair
from wire.transport.shared_channel import SharedChannel

SECOND = 1_000_000_000
STOP = OperatorCommand("robot-0", "estop", operator="web-1", stop="a")


class Line:
    """A link that nobody runs but the test."""

    def __init__(self, operator: OperatorInbox | None = None) -> None:
        self.clock, self.latch = ManualClock(100 * SECOND), StopLatch()
        self.gateway, ours = memory_pair()
        self.link = StopLink("robot-0", StopOrders("robot-0", self.give, self.clock), ours, operator)

    def give(self, order: StopOrder) -> StopState:
        match order.kind:
            case "stop":
                self.latch.stop(order.stop, order.who)
            case "release":
                self.latch.release(order.stop)
            case "start":
                self.latch.start(order.stop)
        return self.latch.state

    def send(self, *commands: Message) -> list[Message]:
        """What the gateway hears of it."""
        for command in commands:
            self.gateway.send(command)
        self.link.poll()
        return list(iter(self.gateway.recv, None))


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.link.close()


def test_the_gateway_hears_what_the_host_answered(line: Line) -> None:
    (shown,) = line.send(STOP)
    assert isinstance(shown, StopShown) and shown.stop == line.latch.state == StopState({"a": "web-1"}, last="a")
    assert line.send() == []
    assert line.send(OperatorCommand("robot-1", "release_estop", stop="a")) == []
    assert line.send(OperatorCommand("robot-0", "take_over")) == []
    assert line.latch.state.stops, "what is for another robot, or is no matter of stopping, changes nothing"


def test_what_comes_by_both_ways_counts_once(line: Line) -> None:
    assert line.link.take(STOP)
    line.send(STOP)
    line.send(OperatorCommand("robot-0", "release_estop", stop="a"))
    assert line.latch.state == StopState(ready=True, last="a")
    assert not line.link.take(OperatorCommand("robot-0", "take_over"))


def test_a_start_that_was_long_on_its_way_is_left_out(line: Line) -> None:
    line.send(STOP, OperatorCommand("robot-0", "release_estop", stop="a"))
    # the gateway's clock is 50 s behind ours
    line.send(HelloAck("another-clock", 49 * SECOND, 99 * SECOND))
    line.send(OperatorCommand("robot-0", "start", stop="a", captured_ns=48 * SECOND))
    assert line.latch.state.ready
    line.send(OperatorCommand("robot-0", "start", stop="b", captured_ns=round(49.5 * SECOND)))
    assert line.latch.state.ready, "it was given after a stop that has not been here"
    line.send(OperatorCommand("robot-0", "start", stop="a", captured_ns=round(49.6 * SECOND)))
    assert line.latch.state.free and clock_name() != "another-clock"


def test_an_operator_beside_the_robot_waits_for_no_uplink(tmp_path: Path) -> None:
    inbox = OperatorInbox(SharedChannel(tmp_path / "operator", bind=True))
    beside = SharedChannel(tmp_path / "operator", bind=False)
    line = Line(inbox)
    try:
        beside.send(OperatorCommand("robot-0", "take_over", operator="ros"))
        beside.send(OperatorCommand("robot-0", "estop", operator="ros", stop="ros-1"))
        beside.send(OperatorCommand("robot-1", "estop", operator="ros", stop="ros-2"))
        line.link.poll()
        assert line.latch.state.stops == {"ros-1": "ros"}
        left = list(iter(inbox.recv, None))
        assert [(m.robot, m.kind) for m in left if isinstance(m, OperatorCommand)] == [
            ("robot-0", "take_over"),
            ("robot-1", "estop"),
        ], "the rest is the uplink's, in its order"
        assert inbox.send(STOP) and isinstance(beside.recv(), OperatorCommand)
    finally:
        line.link.close()
        beside.close()
        inbox.close()
