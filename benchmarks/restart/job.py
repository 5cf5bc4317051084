"""A `vla-fleet up` of any checkout, watched from outside: its page and its processes' command lines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common.processes import ProcessTree

WORKING = ("policy", "human", "script")
"""modes of a robot that does something"""
_LOOK_S = 0.02


class NotWithinError(RuntimeError):
    """What was waited for did not come."""


class FleetUnderTest:
    """The main job of the checkout `root` on the data directory `data`; a context manager that ends it."""

    def __init__(self, root: Path, data: Path, *options: str, log: Path) -> None:
        """Only stores. `options` of `vla-fleet up` besides those for ports and data; `log`: where it writes."""
        self.data = data
        self._root = root
        self._words = [sys.executable, "-m", "fleet.cli", "up", "--data", str(data), "--headless", *options]
        self._words += ["--port", "0", "--web-port", "0"]
        self._log = log
        self._page = ""
        self.begun_s = 0.0
        """when it was started, by the monotonic clock"""

    def __enter__(self) -> FleetUnderTest:
        environment = {**os.environ, "PYTHONPATH": str(self._root), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        # As where people work: what was compiled once is kept.
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        with self._log.open("w") as output:
            self.begun_s = time.monotonic()
            self.process = subprocess.Popen(
                self._words, cwd=self._root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(90.0)
        self.process.kill()
        self.process.wait()

    def snapshot(self) -> dict[str, Any] | None:
        """What the page shows, None while it does not answer."""
        if not self._page:
            found = re.search(r"http://127\.0\.0\.1:\d+", self._log.read_text())
            if found is None:
                return None
            self._page = found.group()
        try:
            with urllib.request.urlopen(f"{self._page}/api/fleet", timeout=2.0) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def wait(self, what: str, true: Callable[[dict[str, Any]], object], timeout_s: float) -> float:
        """Seconds until a snapshot is `true`. Raises `NotWithinError`."""
        since_s = time.monotonic()
        while (waited_s := time.monotonic() - since_s) < timeout_s:
            if self.process.poll() is not None:
                raise NotWithinError(f"`up` ended before {what}: {self._log.read_text()[-1500:]}")
            now = self.snapshot()
            if now is not None and true(now):
                return time.monotonic() - since_s
            time.sleep(_LOOK_S)
        raise NotWithinError(f"not within {waited_s:.0f} s: {what}; see {self._log}")

    def processes(self) -> dict[int, list[str]]:
        """Command lines after the interpreter's own words, by process id: `up`, its template and all parts."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # What ends meanwhile is not there.
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if words[:2] == ["vla-fleet", "template"] and parent == self.process.pid:
                    found[int(entry.name)] = ["template"]
                elif words[1:3] == ["-m", "fleet.cli"] and str(self.data) in words:
                    found[int(entry.name)] = words[3:]
        return found

    def pid(self, *words: str) -> int:
        """The process whose command line begins with the first of `words` and has the others; 0 when there is none."""
        for pid, line in self.processes().items():
            if line[:1] == [words[0]] and set(words) <= set(line):
                return pid
        return 0

    def memory_mib(self) -> float:
        """What all its processes have in memory, shared pages counted once (PSS)."""
        tree = ProcessTree(self.process.pid)
        tree.look()
        return sum(tree.memory_bytes().values()) / 2**20


def working(snapshot: dict[str, Any], robots: int) -> bool:
    """Whether so many robots do something."""
    return sum(one["mode"] in WORKING and one["link"] == "ok" for one in snapshot["robots"]) >= robots


def connected(pid: int) -> bool:
    """Whether the process has a TCP connection."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "01" and f"socket:[{fields[9]}]" in sockets:
                return True
    return False
