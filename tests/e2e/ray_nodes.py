"""Nodes of a Ray cluster on this machine, started as a person starts them, and everything below them found again."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARK = "VLA_FLEET_TEST_MARK"


class Machines:
    """Several computers, played by this one. All processes they start carry a mark in their environment."""

    def __init__(self, place: Path, short: Path) -> None:
        """`place`: for logs; `short`: for Ray, whose socket paths must be short."""
        self.place = place
        self._short = short
        self._mark = secrets.token_hex(8)
        self._started: list[subprocess.Popen[bytes]] = []
        self._nodes: list[Node] = []
        self.environment = {
            **os.environ,
            _MARK: self._mark,
            # what runs on a node is started in a folder of Ray's own
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(short),
            "COLUMNS": "300",
        }

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        """`vla-fleet words ...` with its output in the file `log`."""
        with (self.place / log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli", *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
            )
        self._started.append(process)
        return process

    def node(self, name: str, *words: str) -> Node:
        """A Ray node, switched on, with a small object store in a folder of its own."""
        common = ["--object-store-memory", "80000000", "--temp-dir", str(self._short / name)]
        made = Node(self, name, ["ray-node", *words, *common])
        self._nodes.append(made)
        made.switch_on()
        return made

    def turn(self) -> None:
        """Start nodes again that ended by themselves, as a service manager does: Ray gives up on a busy machine."""
        for node in self._nodes:
            if node.wanted and node.process.poll() is not None:
                node.switch_on()

    def said(self, log: str) -> str:
        """What is in `log`, its lines not broken, no colours."""
        path = self.place / log
        return re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace")) if path.exists() else ""

    def running(self) -> dict[int, tuple[int, list[str]]]:
        """Everything that lives and was started from here, however far below: parent and command line by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, IndexError):
                if f"{_MARK}={self._mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent), (entry / "cmdline").read_bytes().decode().split("\0")
        return found

    def below(self, ancestor: int) -> list[list[str]]:
        """Command lines of all processes below process `ancestor`."""
        running = self.running()
        found = []
        for pid in running:
            at = pid
            while at in running and at != ancestor:
                at = running[at][0]
            if at == ancestor and pid != ancestor:
                found.append(running[pid][1])
        return found

    def end(self) -> None:
        """End all that is left."""
        for node in self._nodes:
            node.wanted = False
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 15
        while self.running() and time.monotonic() < deadline:
            for process in self._started:
                process.poll()
            time.sleep(0.1)
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(60)


class Node:
    """One of the machines."""

    process: subprocess.Popen[bytes]

    def __init__(self, machines: Machines, name: str, words: list[str]) -> None:
        self._machines = machines
        self._name = name
        self._words = words
        self.wanted = False

    def switch_on(self) -> None:
        self.wanted = True
        self.process = self._machines.start(f"{self._name}.log", *self._words)

    def switch_off(self) -> None:
        """In order, as with Ctrl-C."""
        self.wanted = False
        self.process.terminate()
        self.process.wait(30)

    def cut_power(self, *words: str) -> None:
        """End at once its raylet and all processes that have one of `words` in their command line."""
        self.wanted = False
        running = self._machines.running().items()
        for pid in (self.raylet, *(pid for pid, (_, line) in running if set(line) & set(words))):
            assert pid > 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)

    @property
    def raylet(self) -> int:
        """Process id of its raylet, 0 while there is none."""
        running = self._machines.running().items()
        found = (pid for pid, (parent, line) in running if parent == self.process.pid and line[0].endswith("/raylet"))
        return next(found, 0)
