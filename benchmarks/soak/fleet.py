"""A gateway, whole edges and a trainer that only publishes, each robot with a line of its own that can be made bad."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.tcp_proxy import TcpProxy
from benchmarks.common.weights_file import random_weights
from benchmarks.soak.robot import PLACE, RECIPE, read_notes
from benchmarks.soak.services import StorageServices
from cloud_learner.training.publishing.uploader import WeightUploader
from fleet.config.data_directory import DataDirectory
from fleet.launch.backend import free_port
from wire.clock import MonotonicClock, clock_name
from wire.messages.gateway import Hello, HelloAck, Published
from wire.transport.faults import FaultPlan
from wire.transport.keys import GATEWAY, make_keys
from wire.transport.session import GatewaySession
from wire.transport.zmq_channel import ZmqClient
from wire.types import PolicyVersion, Role

PARTS = ("robot", "control", "inference", "uplink")
"""processes of an edge beside the one that keeps them"""
_TRAINER = "trainer"
_WEIGHT_BYTES = 2**20
_PUBLISH_EVERY_S = 20.0
_AGAIN_S = 0.5
"""until what was killed is started again, as a service manager would"""
_END_S = 60.0


class SoakFleet:
    """A context manager. `tend` it several times a second."""

    def __init__(self, place: Path, robots: int, services: StorageServices | None) -> None:
        """Only stores. `place`: an empty directory; `services`: beyond its own disk, None for SQLite and files."""
        self.place, self.data = place, DataDirectory(place / "data")
        self.robots = tuple(f"robot-{number}" for number in range(robots))
        self.lines: dict[str, TcpProxy] = {}
        self.restarts: dict[str, int] = {}
        self._services = services
        self._ports = [free_port(0, "127.0.0.1") for _ in range(3)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._due_s: dict[str, float] = {}
        self._stack = contextlib.ExitStack()
        self._publisher: SoakPublisher | None = None
        self._environment = {**os.environ, PLACE: str(place), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> SoakFleet:
        make_keys(self.data.keys, [GATEWAY, _TRAINER, *self.robots])
        port = self._ports[0]
        with contextlib.ExitStack() as stack:
            stack.callback(self._kill_all)
            for name in self.robots:
                self.lines[name] = stack.enter_context(TcpProxy("127.0.0.1", port, FaultPlan()))
            self._start(GATEWAY)
            for name in self.robots:
                self._start(name)
            channel = stack.enter_context(
                contextlib.closing(ZmqClient(f"tcp://127.0.0.1:{port}", _TRAINER, self.data.keys))
            )
            self._publisher = SoakPublisher(channel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self._ports[2]}"

    @property
    def published(self) -> int:
        """Number of the newest version that is at the gateway."""
        return self._publisher.published if self._publisher is not None else 0

    def tend(self) -> None:
        """Start again what has ended; publish what is due."""
        now_s = time.monotonic()
        for name, process in self._processes.items():
            if process.poll() is None:
                continue
            if name not in self._due_s:
                self._due_s[name] = now_s + _AGAIN_S
            elif now_s >= self._due_s[name]:
                del self._due_s[name]
                self.restarts[name] = self.restarts.get(name, 0) + 1
                self._start(name)
        if self._publisher is not None:
            self._publisher.poll()

    def pids(self, name: str) -> dict[str, int]:
        """By part, '' for the one that was started here: all processes of a robot or of the gateway."""
        root = self._processes[name].pid
        found = {"": root} if self._processes[name].poll() is None else {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                head, _, tail = path.read_text().rpartition(")")
                part = head.partition("(")[2]
                if int(tail.split()[1]) == root and part in PARTS:
                    found[part] = int(path.parent.name)
        return found

    def kill(self, name: str, part: str = "") -> None:
        """With -9; a robot without a `part`: all of its computer."""
        pids = self.pids(name)
        for pid in pids.values() if not part else [pids[part]] if part in pids else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_all_record(self, seconds: float = 300.0) -> None:
        """Each robot has had something acknowledged."""
        deadline_s = time.monotonic() + seconds
        while not all(any(not note.steps for note in read_notes(self.place, name)) for name in self.robots):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all robots record; see {self.data.logs} and {self.place}")
            self.tend()
            time.sleep(0.2)

    def finish(self) -> None:
        """End robots in order, which empties their spools, then the gateway."""
        for names in (self.robots, (GATEWAY,)):
            for name in names:
                self._processes[name].send_signal(signal.SIGINT)
            for name in names:
                self._processes[name].wait(_END_S)

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", "fleet.cli", *(self._gateway() if name == GATEWAY else self._edge(name))]
        with (self.place / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def _gateway(self) -> Iterator[str]:
        yield from ("gateway", "--recipe", RECIPE, "--data", str(self.data.root))
        for option, port in zip(("--port", "--stop-port", "--web-port"), self._ports, strict=True):
            yield from (option, str(port))
        if self._services is not None and not (self.data.root / "buffer.json").exists():
            yield from ("--ledger", self._services.ledger, "--store", self._services.store)

    def _edge(self, name: str) -> Iterator[str]:
        yield from ("edge", "--name", name, "--recipe", RECIPE, "--data", str(self.data.root))
        yield from ("--gateway", f"tcp://127.0.0.1:{self.lines[name].port}", "--no-operator")

    def _kill_all(self) -> None:
        for name, process in self._processes.items():
            self.kill(name)
            process.wait()


class SoakPublisher:
    """What a trainer is to the gateway, without what it learns."""

    def __init__(self, channel: ZmqClient, every_s: float = _PUBLISH_EVERY_S) -> None:
        self._every_s = every_s
        self._channel, self._clock = channel, MonotonicClock()
        hello = Hello(_TRAINER, Role.trainer, clock_name(), 0, os.getpid())
        self._session = GatewaySession(channel, hello, self._clock)
        self._upload: WeightUploader | None = None
        self._next_s = 0.0
        self.published = 0

    def poll(self) -> None:
        while (message := self._channel.recv()) is not None:
            self._session.handle_message(message)
            if isinstance(message, HelloAck) and self._upload is not None:
                self._upload.on_heartbeat_answered(message.echo_ns)
            elif isinstance(message, Published):
                self.published, self._upload = message.number, None
        self._session.poll()
        if not self._session.accepted:
            return
        if self._upload is None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            number = self.published + 1
            data = random_weights(_WEIGHT_BYTES)
            version = PolicyVersion(number, hashlib.sha256(data).hexdigest(), len(data), number - 1, 0, 0, 0)
            self._upload = WeightUploader(version, data, frozenset(), self._channel, self._clock)
        if self._upload is not None:
            self._upload.poll()
