"""What the gateway makes of what a robot shows."""

from __future__ import annotations

from cloud_learner.dispatch.robot_stops import BESIDE, RobotStops
from wire.stop_state import StopState

SECOND = 1_000_000_000


def test_a_stop_that_was_released_beside_the_robot_ends_as_soon_as_it_shows_what_is_left() -> None:
    stops = RobotStops()
    stops.add("a", "web-1", 0)
    stops.show(StopState({"a": "web-1", "b": "ros"}), SECOND)
    assert stops.state == StopState({"a": "web-1", "b": "ros"})
    assert stops.holder == "web-1"
    stops.show(StopState({"b": "ros"}), 2 * SECOND)
    assert stops.state == StopState({"b": "ros"})
    assert stops.holder == BESIDE
    stops.show(StopState(ready=True), 3 * SECOND)
    assert stops.state == StopState(ready=True)
    assert not stops.over
    stops.show(StopState(), 4 * SECOND)
    assert stops.over


def test_that_nothing_stops_the_robot_has_to_last_before_it_is_believed() -> None:
    stops = RobotStops()
    stops.show(StopState({"b": "ros"}), SECOND)
    stops.show(StopState(), 2 * SECOND)
    stops.show(StopState(), 4 * SECOND - 1)
    assert not stops.over
    stops.show(StopState({"b": "ros"}), 4 * SECOND)
    stops.show(StopState(), 5 * SECOND)
    assert stops.state == StopState({"b": "ros"})
    stops.show(StopState(), 7 * SECOND)
    assert stops.over


def test_a_stop_that_was_released_before_it_was_shown_is_waited_for() -> None:
    """It may be on its way, with its release behind it."""
    stops = RobotStops()
    stops.add("a", "web-1", SECOND)
    stops.release("a", SECOND)
    assert stops.resend(2 * SECOND) == {}
    stops.show(StopState(), 2 * SECOND)
    assert not stops.over
    stops.show(StopState(), 3 * SECOND)
    assert stops.over
