"""A stop from the page to the driver by its own way, while everything else is busy, cut, killed or plays tricks."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

from cloud_learner.buffer.location import BufferLocation
from cloud_learner.gateway.server import Gateway
from cloud_learner.gateway.stop_server import StopServer
from cloud_learner.gateway.storage.ingest import Ingest
from cloud_learner.gateway.storage.weight_store import WeightStore
from cloud_learner.operator.app import serve
from cloud_learner.operator.view import FleetView
from hal.driver_host.stop_line import ANSWER_S, StopOrder, send_order
from hal.resource.admitted_robots import AdmittedRobots
from hal.safety.stop_latch import StopLatch
from robot_edge.uplink.stop_link import StopLink
from robot_edge.uplink.stop_orders import StopOrders
from tests.cloud_learner.dispatch.hall import Hall
from tests.cloud_learner.fake_edge import SPEC, FakeEdge
from tests.hal.driver_host.test_proxy import place  # noqa: F401
from tests.hal.driver_host.test_stop_line import MOVE, Arm, hosted
from wire.clock import ManualClock, MonotonicClock
from wire.messages import Message
from wire.messages.gateway import Heartbeat, OperatorCommand
from wire.stop_state import StopState
from wire.transport.channel import Channel
from wire.transport.keys import make_keys
from wire.transport.memory_channel import MemoryServer
from wire.transport.stop_connection import StopConnection
from wire.transport.zmq_channel import ZmqClient, ZmqServer

BOUND_S = 0.5
"""far above what it takes (benchmarks.stop_latency), far below what anything here is blocked for"""


class Cloud:
    """A gateway with its page and real sockets, whose loop turns only when the test says so: it may be blocked in a
    write for ever."""

    def __init__(self, root: Path, port: int = 0, stop_port: int = 0) -> None:
        make_keys(root / "keys", ["gateway", "robot-0"])
        self.channel = ZmqServer(f"tcp://127.0.0.1:{port or '*'}", root / "keys", apart=True)
        apart = ZmqServer(f"tcp://127.0.0.1:{stop_port or '*'}", root / "keys", apart=True)
        self.stops = StopServer(apart, MonotonicClock(), int(apart.endpoint.rpartition(":")[2]))
        self.ledger, store = BufferLocation(root).open_writer()
        ingest = Ingest(self.ledger, store)
        ingest.open()
        self.view = FleetView()
        weights = WeightStore.open(root / "weights", self.ledger)
        clock, robots = MonotonicClock(), AdmittedRobots.of_one(SPEC, ("reach", "push"))
        self.gateway = Gateway(self.channel, self.ledger, ingest, weights, self.view, robots, clock, stops=self.stops)
        self.page = serve(self.view, port=0, stop=self.stops.give)
        self.stops.start()

    def close(self) -> None:
        self.page.close()
        self.stops.close()
        self.channel.close()
        self.ledger.close()


class Robot:
    """A host with a driver, and the uplink's process without an uplink: nothing but its thread for stops runs."""

    def __init__(self, cloud: Cloud, keys: Path, host: Path) -> None:
        clock = MonotonicClock()
        self.edge = FakeEdge("robot-0", ZmqClient(cloud.channel.endpoint, "robot-0", keys), clock)
        apart = StopConnection(cloud.channel.endpoint, lambda address: ZmqClient(address, "robot-0", keys), clock)
        orders = StopOrders("robot-0", lambda order: send_order(host, order, ANSWER_S), clock)
        self.link = StopLink("robot-0", orders, apart)
        self.link.follow(cloud.stops.port)
        self.link.start()

    def close(self) -> None:
        self.link.close()
        self.edge.channel.close()


def until(true: Callable[[], object], seconds: float = 60.0) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds
        time.sleep(0.002)
    return time.monotonic() - begun


def introduced(cloud: Cloud, robot: Robot) -> None:
    """Both connections stand, and people see the robot."""

    def done() -> bool:
        robot.edge.hello()
        cloud.gateway.poll()
        robot.edge.poll()
        return robot.edge.welcomed and cloud.stops.is_up("robot-0")

    until(done)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    made = Cloud(tmp_path)
    yield made
    made.close()


def test_a_stop_of_the_page_is_at_the_driver_while_gateway_and_uplink_are_blocked(
    cloud: Cloud,
    tmp_path: Path,
    place: Path,  # noqa: F811
) -> None:
    arm = Arm()
    with hosted(arm, place) as driven, contextlib.closing(Robot(cloud, tmp_path / "keys", place)) as robot:
        introduced(cloud, robot)
        driven.connect()
        driven.reset("go-left", 1)
        for _ in range(5):
            driven.write(MOVE)
        # From here on neither the gateway's loop turns nor the uplink's: as in a write that does not come back.
        address = cloud.page.url.replace("http", "ws") + "/ws"
        with connect(address, origin=cloud.page.url) as page:  # type: ignore[arg-type]
            page.send(json.dumps({"type": "estop", "robot": "robot-0"}))
            assert until(lambda: driven.stop_state().stops) < BOUND_S
            until(lambda: not arm.executed[-1][0], BOUND_S)
            (stop,) = driven.stop_state().stops
            assert stop.startswith("web-")
            # Now it turns again, and what has happened is noted: the lease, the ledger, what people see.
            cloud.gateway.poll()
            assert cloud.gateway._dispatcher.operators.stop_states()["robot-0"].stops.keys() == {stop}


def test_either_side_is_killed_and_comes_back(cloud: Cloud, tmp_path: Path, place: Path) -> None:  # noqa: F811
    with hosted(Arm(), place) as driven:
        robot = Robot(cloud, tmp_path / "keys", place)
        introduced(cloud, robot)
        robot.close()
        cloud.stops.give(OperatorCommand("robot-0", "estop", operator="web-1", stop="a"))
        cloud.gateway.poll()
        robot = Robot(cloud, tmp_path / "keys", place)
        until(lambda: driven.stop_state().stops, 30)
        # The gateway goes; another one is there, on another port for stops, and knows what nobody had shown it.
        robot.edge.latch.stop("a", "web-1")
        cloud.stops.give(OperatorCommand("robot-0", "estop", operator="web-1", stop="b"))
        until(lambda: "b" in driven.stop_state().stops, 30)
        assert driven.stop_state().stops == {"a": "web-1", "b": "web-1"}
        robot.close()


# --- tricks -----------------------------------------------------------------------------------------------------------


class Unreliable:
    """A robot's end of a connection that loses, doubles and delays what comes to it."""

    def __init__(self, inner: Channel, dice: random.Random) -> None:
        self.inner, self.dice, self.down, self.honest = inner, dice, False, False
        self.late: deque[Message] = deque()

    def send(self, message: Message) -> bool:
        return not self.down and self.inner.send(message)

    def recv(self) -> Message | None:
        if not self.honest and self.late and self.dice.random() < 0.1:
            return self.late.popleft()
        while (message := self.inner.recv()) is not None:
            if self.down or (not self.honest and self.dice.random() < 0.2):
                continue
            if not self.honest and self.dice.random() < 0.3:
                self.late.append(message)
            return message
        return None

    def close(self) -> None:
        self.inner.close()


class Tricks:
    """A page, a gateway, two unreliable ways and a robot; what people did is noted beside."""

    def __init__(self, root: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.apart = MemoryServer()
        self.hall = Hall(root, stops=lambda clock: StopServer(self.apart, clock, 1))
        self.page = self.hall.desk.join()
        self.fast = Unreliable(self.apart.connect("robot-0"), self.dice)
        self.latch = StopLatch()
        self.clock: ManualClock = self.hall.clock
        self.link = StopLink("robot-0", StopOrders("robot-0", self.obey, self.clock), self.fast)
        self.edge = FakeEdge("robot-0", self.hall.server.connect("robot-0"), self.clock)
        self.edge.latch = self.latch
        self.edge._obey = self.link.take  # type: ignore[method-assign, assignment]
        self.old = self.edge.channel = Unreliable(self.edge.channel, self.dice)
        self.edge.hello()
        self.hall.gateway.poll()
        self.given: set[str] = set()
        self.released: set[str] = set()
        self.seen: set[str] = set()
        self.before_start: set[str] = set()
        """stops that had been given when a start was given last"""
        give = self.hall.stops.give

        def noted(command: OperatorCommand) -> None:
            self.given.add(command.stop)
            give(command)

        self.hall.desk._stop = noted

    def obey(self, order: StopOrder) -> StopState:
        was = self.latch.state
        match order.kind:
            case "stop":
                self.seen.add(order.stop)
                self.latch.stop(order.stop, order.who)
            case "release":
                self.latch.release(order.stop)
            case "start":
                self.latch.start(order.stop)
                if was.ready and self.latch.state.free:
                    assert self.before_start - self.released <= self.seen, (
                        "a start came before a stop that it was given after"
                    )
        return self.latch.state

    def press(self, kind: str, stop: str = "") -> None:
        self.hall.desk.handle_message(self.page, f'{{"type": "{kind}", "robot": "robot-0", "stop": "{stop}"}}')

    def step(self) -> None:
        """People, the network and both computers do something."""
        match self.dice.randrange(12):
            case 0 if len(self.given) < 20:
                self.press("estop")
            case 1 | 2:
                if known := sorted(self.hall.view.stops("robot-0")):
                    self.press("release_estop", stop := self.dice.choice(known))
                    self.released.add(stop)
            case 3 | 4:
                self.before_start = set(self.given)
                self.press("start")
            case 5:
                way = self.dice.choice((self.fast, self.old))
                way.down = not way.down
                (self.hall.server if way is self.old else self.apart).cut ^= {"robot-0"}
            case _:
                self.turn()

    def turn(self) -> None:
        self.clock.advance(self.dice.randrange(1, 150) * 1_000_000)
        for part in self.dice.sample((self.robot, self.hall.stops.poll, self.hall.gateway.poll), 3):
            part()

    def robot(self) -> None:
        self.fast.send(Heartbeat(self.clock.now_ns()))
        self.edge.poll()
        self.link.poll()
        if self.edge.welcomed:
            self.edge.status()
        else:
            self.edge.hello()

    def end(self, fast: bool, old: bool) -> None:
        """From now on those ways work, and the other does not."""
        for way, server, up in ((self.fast, self.apart, fast), (self.old, self.hall.server, old)):
            way.honest, way.down = True, not up
            way.late.clear()
            server.cut = set() if up else {"robot-0"}
        for _ in range(40):
            self.clock.advance(110_000_000)
            self.robot()
            self.hall.stops.poll()
            self.hall.gateway.poll()
        self.robot()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), ways=st.sampled_from([(True, False), (False, True), (True, True)]))
def test_no_stop_is_lost_and_no_start_overtakes_one(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ways: tuple[bool, bool]
) -> None:
    tricks = Tricks(tmp_path_factory.mktemp("cloud"), seed)
    try:
        for _ in range(120):
            tricks.step()
        tricks.end(*ways)
        left = tricks.given - tricks.released
        assert left <= tricks.latch.state.stops.keys(), "a stop that nobody released does not stand"
    finally:
        tricks.link.close()
        tricks.hall.stops.close()
        tricks.hall.ledger.close()
