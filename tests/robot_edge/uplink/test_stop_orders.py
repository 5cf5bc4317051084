"""Orders to a host that does not answer."""

from __future__ import annotations

import msgspec

from hal.driver_host.stop_line import StopOrder
from robot_edge.uplink.stop_orders import StopOrders
from wire.clock import ManualClock
from wire.errors import RejectedError, RobotError
from wire.messages.gateway import OperatorCommand
from wire.stop_state import StopState
from wire.types import OperatorCommandKind

MS = 1_000_000


class Host:
    """Hears nothing while it is deaf."""

    def __init__(self) -> None:
        self.deaf = True
        self.asked, self.heard = 0, []

    def give(self, order: StopOrder) -> StopState:
        self.asked += 1
        if self.deaf:
            raise RobotError("no host of a robot answers")
        self.heard.append(order)
        return StopState()


def test_a_host_that_does_not_answer_is_told_again_until_it_does_and_then_no_more() -> None:
    clock, host = ManualClock(10**9), Host()
    orders = StopOrders("robot-0", host.give, clock)
    stop, release = StopOrder("stop", "a", "web-1"), StopOrder("release", "b", "web-1")
    orders.add(stop)
    orders.add(stop)  # as a gateway does that has not seen it yet
    orders.add(release)
    for _ in range(100):
        clock.advance(10 * MS)
        orders.poll()
    assert 9 <= host.asked <= 11  # it may cost its time to ask
    host.deaf = False
    clock.advance(100 * MS)
    orders.poll()
    assert host.heard == [stop, release]
    clock.advance(10_000 * MS)
    orders.poll()
    assert host.heard == [stop, release]
    orders.add(stop)
    assert host.heard == [stop, release, stop]


def test_a_start_that_was_not_heard_is_not_given_later() -> None:
    clock, host = ManualClock(10**9), Host()
    orders = StopOrders("robot-0", host.give, clock)
    orders.add(StopOrder("start", who="web-1"))
    stop = StopOrder("stop", "a", "web-1")
    orders.add(stop)
    host.deaf = False
    clock.advance(100 * MS)
    orders.poll()
    assert host.heard == [stop]


def test_a_start_does_not_wait_behind_what_is_not_heard() -> None:
    clock, host = ManualClock(10**9), Host()
    orders = StopOrders("robot-0", host.give, clock)
    orders.add(StopOrder("release", "a", "web-1"))
    orders.add(StopOrder("start", who="web-1"))
    host.deaf = False
    clock.advance(5_000 * MS)
    orders.poll()
    assert [order.kind for order in host.heard] == ["release"]


def test_a_speed_limit_comes_from_beside_the_robot_and_is_given_once() -> None:
    clock, host = ManualClock(10**9), Host()
    orders = StopOrders("robot-0", host.give, clock)
    command = OperatorCommand("robot-0", OperatorCommandKind.speed_limit, (0.25,), operator="ros", beside=True)
    slow = StopOrder("slow", who="ros", share=0.25)
    assert orders.take(command)
    host.deaf = False
    clock.advance(1000 * MS)
    orders.poll()
    assert host.heard == [], "a late one might make the robot faster"
    assert orders.take(msgspec.structs.replace(command, beside=False))
    assert orders.take(msgspec.structs.replace(command, action=()))
    assert host.heard == []
    assert orders.take(command)
    assert host.heard == [slow]


def test_an_order_that_the_host_does_not_follow_is_not_given_again() -> None:
    asked = list[StopOrder]()

    def refuse(order: StopOrder) -> StopState:
        asked.append(order)
        raise RejectedError("it cannot be slowed")

    clock = ManualClock(10**9)
    orders = StopOrders("robot-0", refuse, clock)
    orders.add(StopOrder("stop", "a", "web-1"))
    clock.advance(1000 * MS)
    orders.poll()
    assert len(asked) == 1
