"""A gateway, an edge node and a robot from outside as processes, and a ROS 2 node of the test that looks and asks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ros import ros_environment
from wire.clock import clock_name
from wire.messages.gateway import Hello, HelloAck, Publish, Published, WeightBytes
from wire.transport.keys import make_keys
from wire.transport.zmq_channel import ZmqClient, wait_any
from wire.types import PolicyVersion

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "tests.e2e.outside_recipe:recipe"
NAMESPACE = "/cell"
NODE = f"{NAMESPACE}/edge_node"
PATIENCE_S = 90.0


class Cell:
    """One robot's cell. `close` ends every process it started."""

    def __init__(self, place: Path, **parameters: str) -> None:
        """`parameters` of the edge node, beside those that say where things are."""
        self.place = place
        self.environment = ros_environment(place)
        self.port, self.web_port = _free_port(), _free_port()
        self.keys = place / "cloud" / "keys"
        make_keys(self.keys, ["gateway", "trainer", "cell"])
        self.parameters = {
            "recipe": RECIPE,
            "data": str(place / "edge"),
            "keys": str(self.keys),
            "gateway": f"tcp://127.0.0.1:{self.port}",
            "wait_for_robot_s": "2.0",
            **parameters,
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.joints: list[float] = []
        """where the shoulder was, in rad, as the robot said"""
        self.commands = 0
        """how many the robot was sent"""
        self.level, self.message, self.values = -1, "", dict[str, str]()
        """newest diagnosis"""
        self._look()

    # --- processes ------------------------------------------------------------------------------------------------

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT), "ROS_HOME": str(self.place)}
        with (self.place / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def start_gateway(self) -> subprocess.Popen[bytes]:
        options = ["--recipe", RECIPE, "--data", str(self.place / "cloud"), "--port", str(self.port)]
        return self.start("gateway", "-m", "fleet.cli", "gateway", *options, "--web-port", str(self.web_port))

    def start_robot(self) -> subprocess.Popen[bytes]:
        robot = str(ROOT / "tests" / "e2e" / "outside_robot.py")
        return self.start("robot", robot, "--ros-args", "-r", f"__ns:={NAMESPACE}")

    def start_node(self) -> subprocess.Popen[bytes]:
        given = [part for name, value in self.parameters.items() for part in ("-p", f"{name}:={value}")]
        code = "from fleet.ros2.main import edge_node_main; edge_node_main()"
        return self.start("node", "-c", code, "--ros-args", "-r", f"__ns:={NAMESPACE}", *given)

    def parts(self, node: subprocess.Popen[bytes]) -> dict[str, int]:
        """Process ids of the edge's parts that the node runs now, by role."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if "edge-part" in line else ""
            except OSError:
                continue
            if parent == str(node.pid):
                found[line[line.index("edge-part") + 1]] = int(entry.name)
        return found

    def close(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._executor.shutdown()
        self._thread.join()
        self._node.destroy_node()
        self._context.try_shutdown()

    # --- what is seen ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        import rclpy
        from diagnostic_msgs.msg import DiagnosticArray
        from rclpy.executors import SingleThreadedExecutor
        from sensor_msgs.msg import JointState
        from trajectory_msgs.msg import JointTrajectory

        self._context = rclpy.Context()
        self._context.init(domain_id=int(self.environment["ROS_DOMAIN_ID"]))
        self._node = rclpy.create_node("test", context=self._context)
        self._node.create_subscription(DiagnosticArray, "/diagnostics", self._diagnosed, 10)
        self._node.create_subscription(JointState, f"{NAMESPACE}/joint_states", self._moved, 10)
        self._node.create_subscription(JointTrajectory, f"{NAMESPACE}/joint_trajectory", self._commanded, 10)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._executor.spin, daemon=True)
        self._thread.start()

    def _diagnosed(self, message: Any) -> None:
        (entry,) = message.status
        assert entry.name == "cell/edge_node: edge"
        self.level, self.message = entry.level[0], entry.message
        self.values = {value.key: value.value for value in entry.values}

    def _moved(self, message: Any) -> None:
        self.joints.append(message.position[message.name.index("shoulder")])

    def _commanded(self, message: Any) -> None:
        self.commands += 1

    def call(self, kind: Any, name: str, request: Any, patience_s: float = PATIENCE_S) -> Any:
        client = self._node.create_client(kind, name)
        try:
            assert client.wait_for_service(timeout_sec=patience_s), f"no service {name}\n{self.logs()}"
            future, done = client.call_async(request), threading.Event()
            future.add_done_callback(lambda _: done.set())
            assert done.wait(patience_s), f"{name} did not answer\n{self.logs()}"
            return future.result()
        finally:
            self._node.destroy_client(client)

    def change(self, transition: int) -> bool:
        """Ask for a transition of the life cycle; whether it went well."""
        from lifecycle_msgs.msg import Transition
        from lifecycle_msgs.srv import ChangeState

        request = ChangeState.Request(transition=Transition(id=transition))
        return self.call(ChangeState, f"{NODE}/change_state", request).success

    def state(self) -> str:
        from lifecycle_msgs.srv import GetState

        return self.call(GetState, f"{NODE}/get_state", GetState.Request()).current_state.label

    def trigger(self, service: str) -> tuple[bool, str]:
        from std_srvs.srv import Trigger

        answer = self.call(Trigger, f"{NODE}/{service}", Trigger.Request())
        return answer.success, answer.message

    def set_parameter(self, name: str, value: str) -> tuple[bool, str]:
        from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
        from rcl_interfaces.srv import SetParameters

        given = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=value)
        request = SetParameters.Request(parameters=[Parameter(name=name, value=given)])
        (result,) = self.call(SetParameters, f"{NODE}/set_parameters", request).results
        return result.successful, result.reason

    def at_gateway(self) -> dict[str, Any]:
        """What the gateway knows of the robot; empty when it knows nothing."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.web_port}/api/fleet", timeout=5) as answer:
            robots = json.load(answer)["robots"]
        return next((robot for robot in robots if robot["name"] == "cell"), {})

    def wait(self, what: str, until: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                if until():
                    return
            except OSError:
                pass
            time.sleep(0.05)
        pytest.fail(f"not within {patience_s:.0f} s: {what}; {self.level} {self.message} {self.values}\n{self.logs()}")

    def span(self, seconds: float) -> float:
        """How far the shoulder moves meanwhile, in rad; -1 when the robot says nothing."""
        first = len(self.joints)
        time.sleep(seconds)
        seen = self.joints[first:]
        return max(seen) - min(seen) if seen else -1.0

    def publish(self, weights: bytes) -> None:
        """Be the trainer for a moment."""
        version = PolicyVersion(1, hashlib.sha256(weights).hexdigest(), len(weights), 0, 1, 0, 0)
        channel = ZmqClient(f"tcp://127.0.0.1:{self.port}", "trainer", self.keys)
        heard: list[Any] = []

        def come(kind: type) -> bool:
            wait_any([channel], 0.05)
            while (message := channel.recv()) is not None:
                heard.append(message)
            return any(isinstance(message, kind) for message in heard)

        def greeted() -> bool:
            channel.send(Hello("trainer", "trainer", clock_name(), time.monotonic_ns(), os.getpid()))
            return come(HelloAck)

        try:
            self.wait("the gateway welcomes the trainer", greeted)
            channel.send(Publish(version))
            channel.send(WeightBytes(1, 0, weights))
            self.wait("the version is published", lambda: come(Published))
        finally:
            channel.close()

    def logs(self) -> str:
        paths = sorted(path for path in self.place.rglob("*.log") if "ros-logs" not in path.parts)
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
