"""A stop that the ROS 2 node is asked for counts whatever the node is doing, and nothing moves after it by itself."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.driver_host.stop_line import StopListener, StopOrder, send_order
from hal.drivers.fake import FakeRobot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.stop_latch import StopLatch
from robot_edge.ros2 import stops as stops_module
from robot_edge.ros2.stops import NodeStops
from robot_edge.runtime.robot_host import HOST, STOP_FILE
from tests.hal.driver_host.test_motion_stopper import LONG_S, SPEC, Arm, halts
from tests.ros import needs_ros, ros  # noqa: F401
from wire.errors import RobotError
from wire.stop_state import StopState


class Edge:
    """Where an edge runs, if it does, and what keeps its robot's stops."""

    def __init__(self, home: Path) -> None:
        self.home: Path | None = home
        self.directory: Path | None = None
        self.stops = NodeStops(lambda: self.directory, lambda: self.home)

    @property
    def kept(self) -> StopState:
        assert self.home is not None
        return StopLatch(self.home / STOP_FILE).state

    @contextlib.contextmanager
    def host(self) -> Iterator[LimitedRobot]:
        """The robot's host hears stops."""
        assert self.directory is not None
        robot = LimitedRobot(FakeRobot(), latch=StopLatch(self.home / STOP_FILE if self.home else None))
        with contextlib.closing(StopListener(self.directory / HOST, robot, robot._latch.save)):
            yield robot


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edge]:
    monkeypatch.setattr(stops_module, "ANSWER_S", LONG_S)
    yield Edge(tmp_path / "home")


@pytest.fixture
def short() -> Iterator[Path]:
    """A path for a socket."""
    with tempfile.TemporaryDirectory(prefix="node-") as directory:
        yield Path(directory)


def test_before_the_edge_runs_it_is_what_the_next_host_begins_with(edge: Edge) -> None:
    assert edge.stops.stop(0.0) == ""
    assert list(edge.kept.stops.values()) == ["ros"] and not edge.stops.waits
    assert edge.stops.shown == edge.kept
    assert edge.stops.release(0.0) == ""
    assert edge.kept.ready and not edge.kept.stops, "a start is another act"


def test_before_the_node_is_configured_it_waits_for_that(edge: Edge) -> None:
    home, edge.home = edge.home, None
    assert edge.stops.stop(0.0) == edge.stops.release(0.0) == edge.stops.stop(0.0) == ""
    assert edge.stops.waits
    edge.home = home
    edge.stops.settle()
    assert len(edge.kept.stops) == 1 and not edge.stops.waits


def test_while_an_edge_starts_or_ends_its_host_is_told(edge: Edge, short: Path) -> None:
    edge.directory = short
    with edge.host() as robot:
        assert edge.stops.stop(0.0) == ""
        assert list(robot.stop_state().stops.values()) == ["ros"]
        assert edge.stops.release(0.0) == ""
        assert robot.stop_state().ready
    assert not edge.stops.waits


def test_a_host_that_does_not_answer_yet_is_told_when_it_does(edge: Edge, short: Path) -> None:
    edge.directory = short
    assert "it is tried again until it is heard: no host" in edge.stops.stop(0.0)
    assert "no host" in edge.stops.release(0.0), "nobody knows what stops it"
    assert not (short / STOP_FILE).exists() and edge.stops.waits
    with edge.host() as robot:
        edge.stops.settle()
        assert list(robot.stop_state().stops.values()) == ["ros"]


def test_what_a_host_did_not_hear_any_more_is_kept_for_the_next(edge: Edge, short: Path) -> None:
    edge.directory = short
    assert edge.stops.stop(0.0)
    edge.directory = None
    edge.stops.settle()
    assert list(edge.kept.stops.values()) == ["ros"] and not edge.stops.waits


def test_a_stop_of_somebody_else_is_not_taken_back(edge: Edge) -> None:
    assert edge.home is not None
    edge.home.mkdir()
    latch = StopLatch(edge.home / STOP_FILE)
    latch.stop("web-1-b", "web-1")
    latch.save()
    assert "none of that was made through ROS" in edge.stops.release(0.0)
    assert edge.stops.stop(0.0) == edge.stops.release(0.0) == ""
    assert list(edge.kept.stops) == ["web-1-b"]


def test_a_stop_that_cannot_be_noted_is_said_and_not_forgotten(edge: Edge, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no directory")
    assert "noting a stop" in edge.stops.stop(0.0) and edge.stops.waits
    (tmp_path / "home").unlink()
    edge.stops.settle()
    assert edge.kept.stops


# --- the node ---------------------------------------------------------------------------------------------------------


class HostedEdge:
    """`EdgeProcesses` as the node uses them: a real host, and a control that resets the robot."""

    fault = ""

    def __init__(self, home: Path, place: Path) -> None:
        self.home, self._place = home, place
        self.supervisor = SimpleNamespace(children={})
        self.arm = Arm(halts)
        self.running = False

    @property
    def directory(self) -> Path:
        if not self.running:
            raise RobotError("its processes do not run")
        return self._place

    def start(self) -> None:
        self.home.mkdir(exist_ok=True)
        self.arm, self.over, self.running = Arm(halts), threading.Event(), True
        options = {"stop_file": self.home / STOP_FILE}
        arguments = (self.arm, self.directory / HOST, self.over.is_set)
        self.host = threading.Thread(target=run_driver_server, args=arguments, kwargs=options)
        self.host.start()
        self.control = threading.Thread(target=self._control)
        self.control.start()

    def _control(self) -> None:
        robot = RobotProxy(SPEC, self.directory / HOST, attach_s=60.0)
        with contextlib.suppress(RobotError):
            robot.connect()
            robot.reset("t", 0)

    def poll(self) -> list[str]:
        return []

    def stop(self) -> None:
        if self.running:
            self.over.set()
            self.control.join(60)
            self.host.join(60)
            self.running = False


class Node:
    """An `EdgeNode` that spins, and somebody who calls its services."""

    def __init__(self, edge: HostedEdge) -> None:
        import rclpy
        from rclpy.executors import MultiThreadedExecutor, SingleThreadedExecutor
        from std_srvs.srv import Trigger

        from robot_edge.ros2.node import EdgeNode, NodeSetup

        rclpy.init()
        self.kind: Any = Trigger
        self.node = EdgeNode(lambda parameters, namespace: NodeSetup(edge, home=edge.home))
        self.client = rclpy.create_node("caller")
        self.executors = MultiThreadedExecutor(5), SingleThreadedExecutor()
        for executor, node in zip(self.executors, (self.node, self.client), strict=True):
            executor.add_node(node)
            threading.Thread(target=executor.spin, daemon=True).start()

    def call(self, name: str) -> tuple[bool, str]:
        client = self.client.create_client(self.kind, f"/edge_node/{name}")
        assert client.wait_for_service(60)
        answer = client.call(self.kind.Request())
        return answer.success, answer.message

    def close(self) -> None:
        import rclpy

        for executor in self.executors:
            executor.shutdown()
        self.node.destroy_node()
        self.client.destroy_node()
        rclpy.try_shutdown()


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="edge-") as directory:
        yield Path(directory)


@pytest.fixture
def cell(ros: Mapping[str, str], tmp_path: Path, place: Path) -> Iterator[tuple[Node, HostedEdge]]:  # noqa: F811
    edge = HostedEdge(tmp_path / "home", place)
    node = Node(edge)
    yield node, edge
    edge.arm.halted.set()
    edge.stop()
    node.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_ros
@pytest.mark.slow
def test_a_stop_while_the_edge_ends_reaches_its_driver(cell: tuple[Node, HostedEdge]) -> None:
    node, edge = cell
    node.node.trigger_configure()
    node.node.trigger_activate()
    assert edge.arm.resets.wait(LONG_S)
    ending = threading.Thread(target=node.node.trigger_deactivate)
    ending.start()
    until(lambda: node.node.phase == "stopping")
    success, message = node.call("estop")
    assert success and "stopped by ros" in message
    assert edge.arm.halted.wait(LONG_S), "its reset went on to its natural end"
    ending.join(LONG_S)
    assert list(StopLatch(edge.home / STOP_FILE).state.stops.values()) == ["ros"], "the next edge begins stopped"


@needs_ros
@pytest.mark.slow
@pytest.mark.parametrize("configured", [True, False])
def test_after_a_stop_without_an_edge_and_its_release_nothing_moves_until_it_is_started(
    cell: tuple[Node, HostedEdge], configured: bool
) -> None:
    node, edge = cell
    if configured:
        node.node.trigger_configure()
    assert node.call("estop")[0]
    assert node.call("release_estop")[0]
    if not configured:
        node.node.trigger_configure()
    node.node.trigger_activate()
    until(lambda: (edge.directory / f"{HOST}.stop").exists())
    assert send_order(edge.directory / HOST, StopOrder("ask"), LONG_S).ready
    edge.control.join(LONG_S)
    assert node.node.phase == "active" and not edge.arm.resets.is_set()


@needs_ros
@pytest.mark.slow
def test_a_node_that_is_stopped_before_it_is_active_has_a_robot_that_begins_stopped(
    cell: tuple[Node, HostedEdge],
) -> None:
    node, edge = cell
    node.node.trigger_configure()
    assert "stopped by ros" in node.call("estop")[1]
    node.node.trigger_activate()
    edge.control.join(LONG_S)
    assert not edge.arm.resets.is_set()
    success, message = node.call("release_estop")
    assert success and "waits to be started" in message
