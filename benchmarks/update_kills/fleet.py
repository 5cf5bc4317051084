"""Gateway, trainer, a site with its relay and its robots: real processes, killed and started again by whoever asks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.tcp_proxy import TcpProxy
from benchmarks.update_kills.robot import PLACE, RECIPE, ROBOT, ActingNote, notes_of, read_notes
from cloud_learner.buffer.files import TEMPORARY
from fleet.config.data_directory import DataDirectory
from fleet.launch.backend import free_port
from wire.transport.faults import FaultPlan, FaultWindow
from wire.transport.keys import GATEWAY, make_keys

RELAY, TRAINER = "relay", "trainer"
_DEMONSTRATOR = "demonstrator"
_LINE = FaultWindow(bytes_per_s=500_000.0, delay_s=0.01)
"""of the trainer, and of the site: slow enough that an update is found at each of its stages"""
_END_S = 60.0
_COMING = ".part"
_TAIL_BYTES = 16384
"""of notes: several of them"""


class ProcessEndedError(RuntimeError):
    """A process of the fleet ended by itself."""


class UpdateFleet:
    """A context manager."""

    def __init__(self, place: Path, robots: int) -> None:
        self.place, self.data = place, DataDirectory(place / "data")
        self.robots = tuple(f"robot-{number}" for number in range(robots))
        self._ports = [free_port(0, "127.0.0.1") for _ in range(4)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._lines: dict[str, TcpProxy] = {}
        self._environment = {**os.environ, PLACE: str(place), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> UpdateFleet:
        names = [GATEWAY, TRAINER, RELAY, _DEMONSTRATOR, *self.robots]
        make_keys(self.data.keys, names)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_all)
            for name in (TRAINER, RELAY):
                plan = FaultPlan((_LINE,))
                self._lines[name] = stack.enter_context(TcpProxy("127.0.0.1", self._ports[0], plan, shared=True))
            self.start(GATEWAY)
            words = ("demonstrate", "--name", _DEMONSTRATOR, *self._to_gateway(f"tcp://127.0.0.1:{self._ports[0]}"))
            subprocess.run(
                [sys.executable, "-m", "fleet.cli", *words],
                env=self._environment,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=300,
            )
            for name in (TRAINER, RELAY, *self.robots):
                self.start(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- processes ------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start it, or start it again."""
        environment = {**self._environment, **({ROBOT: name} if name in self.robots else {})}
        with (self.place / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli", *self._words(name)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def kill(self, name: str, part: str = "") -> None:
        """With -9, and wait for the end of it; `part`: a process of a robot, which it starts again by itself."""
        root = self._processes[name]
        parts = _children(root.pid)
        pids = [pid for pid, called in parts.items() if called == part] if part else [root.pid, *parts]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not part:
            root.wait()

    def require_running(self) -> None:
        """Raises `ProcessEndedError` when something ended that was not killed."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                said = (self.place / f"{name}.log").read_text(errors="replace")[-2000:]
                raise ProcessEndedError(f"'{name}' ended by itself with {code}: {said}")

    def finish_training(self) -> None:
        """The trainer ends in order."""
        trainer = self._processes.pop(TRAINER)
        trainer.send_signal(signal.SIGINT)
        trainer.wait(_END_S)

    # --- what can be seen from outside ----------------------------------------------------------------------------

    def newest(self) -> int:
        """Number of the newest version that the gateway has described, 0: none."""
        return max((_number(path) for path in self.data.weights.glob("*.manifest")), default=0)

    def is_arriving(self) -> bool:
        """Whether a version is on its way into the gateway."""
        return any(self.data.weights.glob(f"*{TEMPORARY}"))

    def coming(self, robot: str) -> int:
        """The version that the robot has begun to fetch, 0: none."""
        return max((_number(path) for path in self._weights(robot).glob(f"*{_COMING}")), default=0)

    def here(self, robot: str) -> int:
        """The newest version that is on the robot, whole."""
        return max((_number(path) for path in self._weights(robot).glob("*.safetensors")), default=0)

    def acting(self, robot: str) -> int:
        """By what it acted last."""
        path = self._notes(robot)
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return max((note.version for note in list(read_notes(file.read()))[-1:]), default=0)

    def acts(self, robot: str) -> list[ActingNote]:
        return list(read_notes(self._notes(robot).read_bytes()))

    def wait(self, what: str, holds: Callable[[], bool], seconds: float, pause_s: float = 0.05) -> float:
        """Until that holds; how long it took. Raises `TimeoutError`."""
        began_s = time.monotonic()
        while not holds():
            if time.monotonic() - began_s > seconds:
                state = {one: (self.coming(one), self.here(one), self.acting(one)) for one in self.robots}
                raise TimeoutError(f"not within {seconds:g} s: {what}; newest {self.newest()}, robots {state}")
            self.require_running()
            time.sleep(pause_s)
        return time.monotonic() - began_s

    # --- inside ---------------------------------------------------------------------------------------------------

    def _notes(self, robot: str) -> Path:
        return notes_of(self.place, robot)

    def _weights(self, robot: str) -> Path:
        return self.data.edge(robot) / "weights"

    def _words(self, name: str) -> list[str]:
        gateway, stops, web, relay = self._ports
        if name == GATEWAY:
            ports = ("--port", str(gateway), "--stop-port", str(stops), "--web-port", str(web))
            return ["gateway", "--recipe", RECIPE, "--data", str(self.data.root), *ports]
        if name == TRAINER:
            return ["trainer", *self._to_gateway(f"tcp://127.0.0.1:{self._lines[TRAINER].port}")]
        site = self._to_gateway(f"tcp://127.0.0.1:{self._lines[RELAY].port}")
        if name == RELAY:
            return ["relay", "--port", str(relay), *site]
        return ["edge", "--name", name, *site, "--relay", f"tcp://127.0.0.1:{relay}"]

    def _to_gateway(self, address: str) -> list[str]:
        return ["--recipe", RECIPE, "--data", str(self.data.root), "--gateway", address]

    def _end_all(self) -> None:
        for name in list(self._processes):
            self.kill(name)


def _number(path: Path) -> int:
    found = re.match(r"\d+", path.name)
    return int(found[0]) if found else 0


def _children(root: int) -> dict[int, str]:
    """The processes right below `root`, by what they are called."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = path.read_text().rpartition(")")
            if int(tail.split()[1]) == root:
                found[int(path.parent.name)] = head.partition("(")[2]
    return found
