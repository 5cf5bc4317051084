"""The way of stops in the gateway: out before anything is decided or written, and again until the robot shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_learner.gateway.stop_server import StopServer
from tests.cloud_learner.dispatch.hall import Hall
from wire.errors import RejectedError
from wire.messages import Message
from wire.messages.gateway import Heartbeat, HelloAck, OperatorCommand, StopShown
from wire.stop_state import StopState
from wire.transport.memory_channel import MemoryClient, MemoryServer

SECOND = 1_000_000_000


class Ways:
    """A gateway with one robot, which has both connections."""

    def __init__(self, root: Path) -> None:
        self.apart = MemoryServer()
        self.hall = Hall(root, stops=lambda clock: StopServer(self.apart, clock, 5762))
        self.clock, self.stops = self.hall.clock, self.hall.stops
        self.edge = self.hall.edge("robot-0")
        self.edge.status()
        self.hall.gateway.poll()
        self.line = self.apart.connect("robot-0")
        self.page = self.hall.desk.join()

    def press(self, kind: str, stop: str = "") -> None:
        made = f'"captured_ms": {self.clock.now_ns() / 1e6}'
        self.hall.desk.handle_message(self.page, f'{{"type": "{kind}", "robot": "robot-0", "stop": "{stop}", {made}}}')

    def beat(self) -> None:
        self.line.send(Heartbeat(self.clock.now_ns()))
        self.stops.poll()
        assert any(isinstance(message, HelloAck) and message.stop_port == 5762 for message in self.heard(self.line))

    def heard(self, line: MemoryClient) -> list[Message]:
        return list(iter(line.recv, None))

    def by_stop_way(self) -> list[tuple[str, str]]:
        self.stops.poll()
        return [(m.kind, m.stop) for m in self.heard(self.line) if isinstance(m, OperatorCommand)]

    def by_old_way(self) -> list[tuple[str, str]]:
        self.hall.gateway.poll()
        return [(m.kind, m.stop) for m in self.heard(self.edge.channel) if isinstance(m, OperatorCommand)]

    def shown(self) -> str:
        """The stop that people see."""
        self.hall.gateway.poll()
        (stop,) = self.hall.gateway._dispatcher.operators.stop_states()["robot-0"].stops
        return stop


@pytest.fixture
def ways(tmp_path: Path) -> Iterator[Ways]:
    made = Ways(tmp_path)
    yield made
    made.stops.close()
    made.hall.ledger.close()


def test_a_stop_of_the_page_goes_out_before_the_gateway_looks(ways: Ways) -> None:
    ways.beat()
    ways.press("estop")
    ((kind, stop),) = ways.by_stop_way()
    assert kind == "estop" and stop.startswith("web-1-")
    assert ways.stops.is_up("robot-0")
    ways.line.send(StopShown(StopState({stop: "web-1"}, last=stop)))
    ways.stops.poll()
    assert ways.by_old_way() == [], "its host has answered"
    assert ways.shown() == stop
    lease = ways.hall.gateway._dispatcher.leases.of("robot-0", ways.clock.now_ns())
    assert lease is not None and (lease.holder, lease.purpose) == ("web-1", "estop")


def test_a_stop_that_is_released_before_a_status_shows_it_is_not_sent_again(ways: Ways) -> None:
    ways.beat()
    ways.press("estop")
    ((_, stop),) = ways.by_stop_way()
    ways.line.send(StopShown(StopState({stop: "web-1"}, last=stop)))
    ways.stops.poll()
    ways.hall.gateway.poll()
    ways.clock.advance(2 * SECOND)
    # beside the robot, and started again
    ways.edge.status()
    ways.beat()
    assert ways.by_old_way() == ways.by_stop_way() == []


def test_a_stop_is_sent_again_by_both_ways_until_the_robot_shows_it(ways: Ways) -> None:
    ways.beat()
    ways.press("estop")
    ((_, stop),) = ways.by_stop_way()
    assert ways.by_old_way() == [], "an answer may be on its way"
    ways.clock.advance(SECOND // 20)
    assert ways.by_stop_way() == []
    ways.clock.advance(SECOND // 20)
    assert ways.by_stop_way() == [("estop", stop)]
    ways.edge.status()
    assert ways.by_old_way() == []
    ways.clock.advance(SECOND // 2)
    ways.edge.status()
    assert ways.by_old_way() == [("estop", stop)], "nobody has answered"
    ways.edge.latch.stop(stop, "web-1")
    ways.edge.status()
    ways.hall.gateway.poll()
    ways.clock.advance(SECOND)
    ways.beat()
    assert ways.by_stop_way() == []


def test_a_robot_that_comes_back_on_either_way_hears_what_it_missed(ways: Ways) -> None:
    ways.press("estop")
    assert ways.by_stop_way() == []
    ((_, stop),) = ways.by_old_way()
    ways.clock.advance(30 * SECOND)
    ways.line.send(Heartbeat(1))
    assert ways.by_stop_way() == [("estop", stop)]
    ways.clock.advance(30 * SECOND)
    ways.edge.hello()
    assert ("estop", stop) in ways.by_old_way()


def test_releases_and_starts_take_the_way_of_stops_where_there_is_one(ways: Ways) -> None:
    ways.beat()
    ways.press("estop")
    ((_, stop),) = ways.by_stop_way()
    ways.hall.gateway.poll()
    ways.edge.latch.stop(stop, "web-1")
    ways.edge.status()
    ways.by_old_way()
    ways.press("release_estop", stop)
    assert ways.by_old_way() == []
    assert ways.by_stop_way() == [("release_estop", stop)]
    ways.edge.latch.release(stop)
    ways.edge.status()
    ways.hall.gateway.poll()
    ways.press("start")
    assert ways.by_old_way() == []
    # the start found no connection after all
    ways.apart.cut.add("robot-0")
    assert ways.by_stop_way() == []
    assert ways.by_old_way() == [("start", stop)], "and says after which stop it was given"


def test_a_start_never_goes_out_after_a_stop(ways: Ways) -> None:
    ways.beat()
    ways.edge.latch.stop("ros-1", "ros")
    ways.edge.latch.release("ros-1")
    ways.edge.status()
    ways.hall.gateway.poll()
    start = OperatorCommand("robot-0", "start", operator="web-1", stop="ros-1")
    ways.stops.give(OperatorCommand("robot-0", "estop", operator="web-2", stop="b"))
    with pytest.raises(RejectedError, match="somebody has just stopped 'robot-0'"):
        ways.stops.send(start)
    ways.press("start")
    assert ways.by_old_way() == []
    assert ways.by_stop_way() == [("estop", "b")]
    assert "Release that first" in " ".join(ways.hall.desk.pop_rejections(ways.page))


def test_a_start_that_waited_is_refused(ways: Ways) -> None:
    ways.edge.latch.stop("ros-1", "ros")
    ways.edge.latch.release("ros-1")
    ways.edge.status()
    ways.hall.gateway.poll()
    ways.press("start")
    ways.clock.advance(3 * SECOND // 2)
    assert ways.by_old_way() == []
    assert "it came 1.5 s after it was made" in " ".join(ways.hall.desk.pop_rejections(ways.page))
    ways.press("start")
    assert ways.by_old_way() == [("start", "ros-1")]


def test_a_teleoperator_stops_by_the_way_of_stops_and_nobody_else_commands_there(ways: Ways) -> None:
    ways.beat()
    person = ways.apart.connect("teleoperator-2")
    person.send(OperatorCommand("robot-0", "estop", operator="somebody else", stop="t-1"))
    person.send(OperatorCommand("robot-0", "start"))
    ways.line.send(OperatorCommand("robot-0", "estop", stop="of a robot"))
    assert ways.by_stop_way() == [("estop", "t-1")]
    ways.hall.gateway.poll()
    state = ways.hall.gateway._dispatcher.operators.stop_states()["robot-0"]
    assert state.stops == {"t-1": "teleoperator-2"}
    person.send(OperatorCommand("robot-9", "estop", stop="t-2"))
    ways.stops.poll()
    ways.hall.gateway.poll()
    nine = ways.apart.connect("robot-9")
    nine.send(Heartbeat(1))
    ways.clock.advance(SECOND)
    ways.stops.poll()
    assert [m for m in ways.heard(nine) if isinstance(m, OperatorCommand)] == [], "there was no such robot"


def test_people_hear_of_a_robot_that_the_way_of_stops_does_not_reach(ways: Ways) -> None:
    def said() -> list[str]:
        return [event["text"] for event in ways.hall.view.snapshot()["events"] if "port 5762" in event["text"]]

    ways.beat()
    ways.hall.pass_time(1)
    assert said() == []
    ways.hall.pass_time(15)
    (text,) = said()
    assert "has no connection for stops" in text
    ways.hall.pass_time(60)
    assert len(said()) == 1


def test_a_stop_counts_whatever_it_is_called(ways: Ways) -> None:
    ways.beat()
    teleoperator = ways.apart.connect("teleoperator")
    teleoperator.send(OperatorCommand("robot-0", "estop", stop="x" * 10_000))
    ((kind, stop),) = ways.by_stop_way()
    assert kind == "estop" and stop.startswith("teleoperator-") and len(stop) < 100
    teleoperator.send(OperatorCommand("r" * 10_000, "estop", stop="1"))
    assert ways.by_stop_way() == [] and ways.stops.refused == {"rejected": 1}


def test_what_hosts_answer_and_connections_that_are_gone_take_no_more_and_more_room(ways: Ways) -> None:
    for number in range(300):
        ways.line.send(StopShown(StopState({f"{number}-{stop}": "who" for stop in range(100)})))
        ways.apart.connect(f"robot-0@{number + 2}").send(Heartbeat(1))
        ways.clock.advance(SECOND)
        ways.stops.poll()
    assert len(ways.stops._answered_ns) <= 4096
    assert len(ways.stops._heard_ns["robot-0"]) <= 3


# --- floods -----------------------------------------------------------------------------------------------------------


def flood(ways: Ways, keys: int, stops: int) -> None:
    """Each key stops so many robots that do not exist, as fast as it is let."""
    lines = [ways.apart.connect(f"console-{key}") for key in range(keys)]
    for number in range(stops):
        for key, line in enumerate(lines):
            line.send(OperatorCommand(f"nobody-{key}-{number}", "estop", stop=f"{key}-{number}"))
        ways.clock.advance(SECOND // 20)
        if number % 20 == 0:
            ways.beat()
    ways.stops.poll()


def test_robots_that_nobody_has_take_no_more_and_more_room(ways: Ways) -> None:
    # as while the gateway waits for its database: nobody asks what was given
    away = OperatorCommand("robot-away", "estop", operator="web-1", stop="a")
    ways.stops.give(away)
    flood(ways, 5, 1000)
    assert len(ways.stops._unshown) <= 1000 and len(ways.stops._given) <= 4096
    # Room is made by those who take it: a robot that is away hears of its stop when it is back.
    assert ("", away) in ways.stops.pop_given()
    line = ways.apart.connect("robot-away")
    line.send(Heartbeat(1))
    ways.clock.advance(SECOND)
    ways.stops.poll()
    assert [m.stop for m in ways.heard(line) if isinstance(m, OperatorCommand)] == ["a"]


def test_a_key_stops_robots_as_often_as_people_press(ways: Ways) -> None:
    bad = ways.apart.connect("console")
    for number in range(1000):
        bad.send(OperatorCommand(f"nobody-{number}", "estop", stop=f"{number}"))
    while len(ways.stops._given) + ways.stops.refused["too_often"] < 1000:
        ways.stops.poll()
    assert ways.stops.refused == {"too_often": 950}
    ways.clock.advance(SECOND)
    for number in range(1000):
        bad.send(OperatorCommand(f"nobody-{number}", "estop", stop=f"again-{number}"))
    while len(ways.stops._given) + ways.stops.refused["too_often"] < 2000:
        ways.stops.poll()
    assert ways.stops.refused == {"too_often": 950 + 980}


@pytest.mark.parametrize("who", ["console", "teleoperator-2"])
def test_a_robot_that_is_connected_is_stopped_whatever_else_is_stopped(ways: Ways, who: str) -> None:
    ways.beat()
    bad = ways.apart.connect("console")
    for number in range(400):
        bad.send(OperatorCommand(f"nobody-{number}", "estop", stop=f"{number}"))
    ways.stops.poll()
    # Also by the key that has used up what it may.
    line = bad if who == "console" else ways.apart.connect(who)
    line.send(OperatorCommand("robot-0", "estop", stop="real"))
    assert ways.by_stop_way() == [("estop", "real")]
    ways.hall.gateway.poll()
    assert ways.hall.gateway._dispatcher.operators.stop_states()["robot-0"].stops == {"real": who}


def test_a_whole_fleet_is_stopped_at_once_by_one_key(ways: Ways) -> None:
    robots = [ways.apart.connect(f"robot-{number}") for number in range(1200)]
    for robot in robots:
        robot.send(Heartbeat(1))
    for _ in range(3):
        ways.stops.poll()
    console = ways.apart.connect("console")
    for number in range(1200):
        console.send(OperatorCommand(f"robot-{number}", "estop", stop=f"s{number}"))
    for _ in range(3):
        ways.stops.poll()
    stopped = [m.stop for robot in robots for m in ways.heard(robot) if isinstance(m, OperatorCommand)]
    assert stopped == [f"s{number}" for number in range(1200)] and not ways.stops.refused
