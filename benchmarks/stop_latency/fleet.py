"""A gateway and the edge of one robot as real processes, and what stops and starts the robot again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
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
from robot_edge.runtime.process_group import uplink_channel
from wire.messages.gateway import OperatorCommand
from wire.stop_state import new_stop_id
from wire.transport.keys import GATEWAY, make_keys
from wire.types import Mode

ROBOT, OTHER = f"robot-stopped-{os.getpid()}", f"robot-beside-{os.getpid()}"
"""names that no other fleet of this computer has: `vla-fleet stop NAME` stops every robot of that name here"""
READY_S = 180.0
_LOST_S = 10.0
"""a stop that took longer did not come"""


class NotInTimeError(RuntimeError):
    """What was waited for did not come."""


class StopFleet:
    """A context manager; `press` measures one stop."""

    def __init__(self, place: Path) -> None:
        """Only stores. `place`: an empty directory."""
        self.place, self.data = place, DataDirectory(place / "data")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read = 0
        self.version = 0
        """number of the policy version that was published last"""

    def __enter__(self) -> StopFleet:
        make_keys(self.data.keys, [GATEWAY, ROBOT, OTHER, "trainer"])
        common = ["--recipe", RECIPE, "--data", str(self.data.root)]
        self._start("gateway", *common, "--port", "0", "--web-port", "0")
        self.page = self._wait("the gateway", lambda: self._said("gateway", r"the page is (\S+)"))
        edge = [*common, "--keys", str(self.data.keys), "--gateway", self.data.gateway, "--no-operator"]
        self._start("edge", *edge, "--name", ROBOT)
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
        log = read_log(self.place, self._read)
        self._read += max(0, len(log) - 1)
        return bytes(log["stop"][-1]) if len(log) else None

    def _braked(self, begun_ns: int) -> int:
        log = read_log(self.place, self._read)
        found = log[(log["time_ns"] >= begun_ns) & (log["stop"] != b"")]
        return int(found["time_ns"][0]) if len(found) else 0

    def _start(self, part: str, *words: str) -> None:
        environment = {**os.environ, PLACE: str(self.place), "OMP_NUM_THREADS": "1"}
        with self._log(part).open("wb") as output:
            command = [sys.executable, "-m", "fleet.cli", part, *words]
            self._processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))

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
def local_operator(fleet: StopFleet) -> Iterator[Callable[[], object]]:
    """The channel to the uplink's process that the ROS 2 node has; ROS itself is not in it."""
    with contextlib.closing(uplink_channel(fleet.robot.hosts[0].parent, "operator")) as channel:

        def stop() -> None:
            command = OperatorCommand(ROBOT, "estop", operator="ros", stop=new_stop_id("ros"))
            while not channel.send(command):
                time.sleep(0.001)

        yield stop


Way = Callable[[StopFleet], contextlib.AbstractContextManager[Callable[[], object]]]
WAYS: dict[str, Way] = {
    "page": page,
    "vla-fleet stop, once it runs": command_line,
    "operator beside the robot": local_operator,
}
"""a way gives what makes one stop; a pedal that the host watches is one line more"""


def _drain(socket: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        for _ in socket:
            pass
