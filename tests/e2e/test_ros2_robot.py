"""A robot from outside the project, driven over ROS 2 by the edge node through its whole life cycle."""

from __future__ import annotations

import ast
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from robot_edge.ros2.diagnostics import ERROR, OK, WARN
from tests.e2e.ros_cell import NAMESPACE, ROOT, Cell
from tests.ros import needs_ros

pytestmark = [pytest.mark.slow, needs_ros]

CONFIGURE, CLEANUP, ACTIVATE, DEACTIVATE, SHUTDOWN = 1, 2, 3, 4, 7
"""of lifecycle_msgs/Transition; the last from active"""
PARTS = {"shadow", "robot", "control", "inference", "uplink"}


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    cell = Cell(tmp_path)
    try:
        yield cell
    finally:
        cell.close()


def moves(cell: Cell) -> bool:
    return cell.values.get("mode") == "policy" and cell.span(0.5) > 0.05


def test_the_outside_robot_knows_nothing_of_this_project() -> None:
    tree = ast.parse((ROOT / "tests" / "e2e" / "outside_robot.py").read_text())
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module.split(".")[0] for module in modules} == {
        "contextlib",
        "sys",
        "rclpy",
        "sensor_msgs",
        "std_srvs",
        "trajectory_msgs",
    }


@pytest.mark.timeout(1200)
def test_a_robot_is_driven_lost_and_found_again(cell: Cell) -> None:
    """configure, activate, a killed robot, its return, deactivate, shutdown."""
    gateway, node = cell.start_gateway(), cell.start_node()
    assert cell.state() == "unconfigured"
    assert not cell.change(CONFIGURE), "there is no robot yet"
    assert cell.state() == "unconfigured"
    cell.wait("diagnostics say what is missing", lambda: f"nobody publishes {NAMESPACE}/joint_states" in cell.message)
    assert cell.level == ERROR
    assert cell.set_parameter("site", "bench") == (True, "")

    robot = cell.start_robot()
    cell.wait("the robot speaks", lambda: cell.joints)
    cell.publish(safetensors.numpy.save({"amplitude": np.array([0.6])}))
    # The node may hear of the robot later than this process does.
    cell.wait("it is configured", lambda: cell.change(CONFIGURE))
    assert cell.state() == "inactive"
    changed, reason = cell.set_parameter("site", "attic")
    assert not changed
    assert "unconfigured" in reason
    assert cell.parts(node) == {}

    assert cell.change(ACTIVATE)
    cell.wait("the policy moves the robot", lambda: moves(cell))
    assert set(cell.parts(node)) == PARTS
    assert cell.level == OK
    assert cell.values["version"] == "1"
    cell.wait("the gateway sees it", lambda: cell.at_gateway().get("mode") == "policy")
    assert cell.at_gateway()["site"] == "bench"
    cell.wait("an episode is finished", lambda: int(cell.values["episodes"]) > 0)

    assert cell.trigger("estop")[0]
    time.sleep(0.5)
    assert 0.0 <= cell.span(1.0) < 1e-3, "an emergency stop holds the robot"
    assert cell.level == WARN
    success, message = cell.trigger("release_estop")
    assert success
    assert "waits to be started" in message
    time.sleep(0.5)
    assert 0.0 <= cell.span(0.5) < 1e-3, "it does not go on by itself"
    assert cell.trigger("start")[0]
    cell.wait("it moves again", lambda: moves(cell))

    robot.kill()
    robot.wait()
    cell.wait("the edge holds", lambda: cell.values.get("mode") in ("hold", "reset") and cell.level in (WARN, ERROR))
    reason = cell.values["fault"] or cell.values["reason"]
    assert reason
    cell.wait("the gateway says so too", lambda: cell.at_gateway()["mode"] != "policy" and cell.at_gateway()["fault"])
    assert cell.state() == "active", "a lost robot is no reason to give up"

    robot = cell.start_robot()
    cell.wait("it recovers by itself", lambda: moves(cell))
    cell.wait("diagnostics are clean", lambda: cell.level == OK and not cell.values["fault"])

    gateway.kill()
    gateway.wait()
    assert cell.trigger("estop")[0], "a stop needs no gateway"
    assert cell.trigger("release_estop")[0]
    assert cell.trigger("start")[0]
    cell.start_gateway()

    assert cell.change(DEACTIVATE)
    assert cell.state() == "inactive"
    assert cell.parts(node) == {}
    sent = cell.commands
    assert 0.0 <= cell.span(1.0) < 1e-3, "an inactive edge leaves the robot alone"
    assert cell.commands == sent

    assert cell.change(ACTIVATE)
    cell.wait("it moves again", lambda: moves(cell))
    assert cell.change(SHUTDOWN)
    assert cell.state() == "finalized"
    assert cell.parts(node) == {}
    assert 0.0 <= cell.span(0.5) < 1e-3
    node.send_signal(signal.SIGTERM)
    assert node.wait(30) == 0


@pytest.mark.timeout(1200)
def test_an_edge_that_cannot_go_on_is_put_away_with_the_reason(cell: Cell) -> None:
    """error: ErrorProcessing, then unconfigured; and it may be configured again."""
    cell.parameters["give_up_after"] = "4"
    cell.start_gateway()
    cell.start_robot()
    node = cell.start_node()
    cell.wait("the robot speaks", lambda: cell.joints)
    cell.publish(safetensors.numpy.save({"amplitude": np.array([0.6])}))
    # The node may hear of the robot later than this process does.
    cell.wait("it is configured", lambda: cell.change(CONFIGURE))
    assert cell.change(ACTIVATE)
    cell.wait("the policy moves the robot", lambda: moves(cell))

    killed: set[int] = set()

    def given_up() -> bool:
        """Whatever the uplink is, it does not live long."""
        pid = cell.parts(node).get("uplink", 0)
        if pid and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return cell.values["lifecycle"] == "unconfigured"

    cell.wait("the node gives the edge up", given_up)
    assert len(killed) >= 4, "a process that dies now and then is started again"
    assert cell.message.startswith("cell.uplink ended with signal SIGKILL")
    assert cell.level == ERROR
    assert cell.state() == "unconfigured"
    assert cell.parts(node) == {}
    assert 0.0 <= cell.span(1.0) < 1e-3
    assert node.poll() is None

    assert cell.change(CONFIGURE)
    assert cell.change(ACTIVATE)
    cell.wait("it works again", lambda: moves(cell))
    assert cell.level == OK
    assert cell.change(DEACTIVATE)
    assert cell.change(CLEANUP)
    assert cell.state() == "unconfigured"


@pytest.mark.timeout(1200)
def test_a_node_that_starts_itself_waits_for_its_robot_and_leaves_it_when_it_dies(cell: Cell) -> None:
    """autostart, as for a plain `ros2 run`; no gateway is there at all."""
    cell.parameters.update(autostart="true", wait_for_robot_s="0.5")
    node = cell.start_node()
    cell.wait("it says what it waits for", lambda: "nobody publishes" in cell.message)
    assert cell.state() == "unconfigured"
    cell.start_robot()
    cell.wait("it is active by itself", lambda: cell.state() == "active")
    cell.wait("the edge speaks", lambda: cell.values.get("reason") == "no job yet")
    assert cell.level == OK

    assert cell.change(DEACTIVATE)
    assert not cell.trigger("take_over")[0]
    success, message = cell.trigger("estop")
    assert success
    assert "cell" in message
    assert cell.state() == "inactive", "who was asked to rest does not start by itself"

    assert cell.change(ACTIVATE)
    cell.wait("the robot begins stopped", lambda: "~/release_estop" in cell.message)
    assert cell.trigger("release_estop")[0]
    cell.wait("it waits for a start of its own", lambda: "~/start" in cell.message)
    assert cell.trigger("start")[0]
    cell.wait("the edge speaks", lambda: cell.values.get("reason") == "no job yet")
    parts = cell.parts(node)
    assert set(parts) == PARTS
    node.kill()
    node.wait()
    cell.wait("nothing is left of the edge", lambda: not any(alive(pid) for pid in parts.values()))


def alive(pid: int) -> bool:
    """Whether an edge's part runs under that number."""
    try:
        return b"edge-part" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
