"""A gateway and the ROS 2 node of one robot's edge as real processes, and what stops and starts the robot again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from benchmarks.stop_latency.robot import PLACE, RECIPE, read_log
from fleet.config.data_directory import DataDirectory
from fleet.tools.stop import LocalRobot, robots_here
from hal.driver_host.stop_line import StopOrder
from hal.drivers.ros2.wrapper import RosNode
from hal.stop_devices.evdev_keys import key_bytes
from wire.stop_state import new_stop_id
from wire.transport.keys import GATEWAY, make_keys
from wire.types import Mode

ROBOT, OTHER = f"robot-stopped-{os.getpid()}", f"robot-beside-{os.getpid()}"
"""names that no other fleet of this computer has: `vla-fleet stop NAME` stops every robot of that name here"""
READY_S = 180.0
NAMESPACE = "/stopped"
_PEDAL_KEY = "KEY_B"
_NODE = "from fleet.ros2.main import edge_node_main; edge_node_main()"
_LOST_S = 10.0
"""a stop that took longer did not come"""


class NotInTimeError(RuntimeError):
    """What was waited for did not come."""


class StopFleet:
    """A context manager; `press` measures one stop."""

    def __init__(self, place: Path) -> None:
        """Only stores. `place`: an empty directory."""
        self.place, self.data = place, DataDirectory(place / "data")
        # In memory: a driver does not wait for a disk, so what it notes here must not either.
        self._notes = tempfile.TemporaryDirectory(prefix="stop-latency-", dir="/dev/shm")
        self.notes = Path(self._notes.name)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read = 0
        self._pedal, self._pedal_fd = place / "pedal", -1
        self._environment = {**os.environ, PLACE: str(self.notes), "OMP_NUM_THREADS": "1"}
        self.version = 1
        """number of the policy version that was published last"""

    def __enter__(self) -> StopFleet:
        make_keys(self.data.keys, [GATEWAY, ROBOT, OTHER, "trainer"])
        ports = ["--port", "0", "--web-port", "0"]
        self._run("gateway", "-m", "fleet.cli", "gateway", "--recipe", RECIPE, "--data", str(self.data.root), *ports)
        self.page = self._wait("the gateway", lambda: self._said("gateway", r"the page is (\S+)"))
        # Whoever treads on it writes what the kernel would.
        os.mkfifo(self._pedal)
        self._pedal_fd = os.open(self._pedal, os.O_RDWR | os.O_NONBLOCK)
        self._tread = key_bytes(_PEDAL_KEY, True) + key_bytes(_PEDAL_KEY, False)
        # 1 to 101: above, the ports of a domain lie in the range that the system gives to anybody
        ros = {"ROS_DOMAIN_ID": str(os.getpid() % 101 + 1), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
        ros |= {"ROS_LOG_DIR": str(self.place), "ROS_HOME": str(self.place)}
        self._environment.update(ros)
        os.environ.update(ros)
        given = {
            "name": ROBOT,
            "recipe": RECIPE,
            "data": self.data.root,
            "keys": self.data.keys,
            "gateway": self.data.gateway,
            "stop_keys": f"{self._pedal}:{_PEDAL_KEY}",
            "autostart": "true",
        }
        words = [word for name, value in given.items() for word in ("-p", f"{name}:={value}")]
        self._run("edge", "-c", _NODE, "--ros-args", "-r", f"__ns:={NAMESPACE}", *words)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            for log in (self._log("gateway"), self._log("edge"), *self.data.logs.glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text()[-2000:]}\n")
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
        if self._pedal_fd >= 0:
            os.close(self._pedal_fd)
        self._notes.cleanup()

    @property
    def robot(self) -> LocalRobot:
        """As whoever stops it on its own computer finds it."""
        return robots_here(ROBOT, self.data.root)[0]

    def wait_until_it_moves(self) -> None:
        """The policy acts: nothing of its beginning is left that a stop would have to be undone of."""
        self._wait("the robot moves", self._acts)

    def _acts(self) -> bool:
        with urllib.request.urlopen(f"{self.page}/api/fleet", timeout=5.0) as answer:
            return any(robot.get("mode") == Mode.policy for robot in json.load(answer)["robots"])

    def press(self, stop: Callable[[], object]) -> float:
        """Seconds from now, when `stop` is called, until the driver gets the first command that brakes for it."""
        begun_ns = time.monotonic_ns()
        stop()
        taken = self._wait("a braking command", lambda: self._braked(begun_ns), _LOST_S)
        return (taken - begun_ns) / 1e9

    def tread(self) -> None:
        """On the pedal, and off it again."""
        os.write(self._pedal_fd, self._tread)

    def free(self) -> None:
        """Release the robot and start it again, by its host."""
        self._wait("it moves again", self._freed)
        # The gateway and the page have to see that too, or the next stop is not theirs to make; and at no fixed phase.
        time.sleep(0.3 + time.monotonic_ns() % 50 / 1000)

    def _freed(self) -> bool:
        # Again and again: a gateway that has not seen a stop which was released within milliseconds may send it again.
        robot = self.robot
        state = robot.give_order(StopOrder("ask"))
        for each in state.stops:
            state = robot.give_order(StopOrder("release", each, "benchmark"))
        if state.ready:
            robot.give_order(StopOrder("start", state.last, "benchmark"))
        time.sleep(0.1)
        return self._latest() == b""

    def _latest(self) -> bytes | None:
        log = read_log(self.notes, self._read)
        self._read += max(0, len(log) - 1)
        return bytes(log["stop"][-1]) if len(log) else None

    def _braked(self, begun_ns: int) -> int:
        log = read_log(self.notes, self._read)
        found = log[(log["time_ns"] >= begun_ns) & (log["stop"] != b"")]
        return int(found["time_ns"][0]) if len(found) else 0

    def _run(self, name: str, *words: str) -> None:
        with self._log(name).open("wb") as output:
            command = [sys.executable, *words]
            self._processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=self._environment))

    def _log(self, part: str) -> Path:
        return self.place / f"{part}.log"

    def _said(self, part: str, pattern: str) -> str:
        found = re.search(pattern, self._log(part).read_text())
        return found[1] if found else ""

    def _wait(self, what: str, until: Callable[[], Any], seconds: float = READY_S) -> Any:
        since_s = time.monotonic()
        while not (found := until()):
            if time.monotonic() - since_s > seconds:
                raise NotInTimeError(f"not within {seconds:g} s: {what}")
            time.sleep(0.002)
        return found


# --- ways -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def page(fleet: StopFleet) -> Iterator[Callable[[], object]]:
    """The button at the operator page: a real websocket."""
    # websockets.sync reads in a thread of its own; somebody has to take what comes.
    with connect(fleet.page.replace("http", "ws") + "/ws", origin=fleet.page) as socket:
        threading.Thread(target=_drain, args=(socket,), daemon=True).start()
        yield lambda: socket.send(msgspec.json.encode({"type": "estop", "robot": ROBOT}).decode())


@contextlib.contextmanager
def command_line(fleet: StopFleet) -> Iterator[Callable[[], object]]:
    """`vla-fleet stop` without the start of its process, which is told apart."""
    robot = fleet.robot
    yield lambda: robot.give_order(StopOrder("stop", new_stop_id("cli"), "cli"))


@contextlib.contextmanager
def pedal(fleet: StopFleet) -> Iterator[Callable[[], object]]:
    """A pedal that the robot's host watches: a FIFO of the kernel's bytes stands for the device."""
    yield fleet.tread


@contextlib.contextmanager
def ros_service(fleet: StopFleet) -> Iterator[Callable[[], object]]:
    """The service of the robot's node, called from another process, which has found it; its answer, which says that the
    robot is stopped, is waited for."""
    node = RosNode("presser")
    node.open()
    try:
        client = node.client("std_srvs/srv/Trigger", f"{NAMESPACE}/edge_node/estop")
        client.wait(READY_S)
        yield lambda: client.call(READY_S)
    finally:
        node.close()


Way = Callable[[StopFleet], contextlib.AbstractContextManager[Callable[[], object]]]
WAYS: dict[str, Way] = {
    "page": page,
    "vla-fleet stop, once it runs": command_line,
    "pedal": pedal,
    "ROS 2 service": ros_service,
}
"""a way gives what makes one stop"""


def _drain(socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        for _ in socket:
            pass
