"""One run of `vla-fleet up`, as a user would start it, watched from outside."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.machine import MachineSpeed
from benchmarks.common.processes import ProcessTree
from fleet.launch.backend import free_port

_ROOT = Path(__file__).resolve().parents[2]
_LOOK_EVERY_S, _WEIGH_EVERY_S = 1.0, 20.0
_MOMENT_STEPS = 5
"""of the machine's speed, whenever memory is weighed: a two-hundredth of a core"""
_END_S = 120.0


@dataclass(frozen=True, slots=True)
class MainJobOptions:
    """What is run."""

    recipe: str
    minutes: float
    robots: int
    measure_at: float | None
    """minutes; None: only at the beginning and at the end"""
    algorithm: str = ""
    """'': the recipe's"""

    @property
    def name(self) -> str:
        """Of what is run, in tables."""
        return f"{self.recipe}, {self.algorithm}" if self.algorithm else self.recipe


def run_once(wanted: MainJobOptions, seed: int) -> dict[str, Any]:
    """The report of one run in a fresh data directory, and what was seen from outside under `outside`.

    `cpu_s` and `cpu_ms_per_tick` by kind of process and `cores` altogether, of the time robots worked; `gradient_steps`
    and `gradient_steps_per_s` of that time; `machine_ms`: how fast the machine was meanwhile (`MachineSpeed`, median of
    moments); `memory_bytes`: the most of the whole fleet. Raises `SystemExit` with what was said last when the run
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="vla-fleet-main-job-") as name:
        folder, port = Path(name), free_port(0, "127.0.0.1")
        command = [
            sys.executable,
            "-m",
            "fleet.cli",
            "up",
            "--recipe",
            wanted.recipe,
            "--robots",
            str(wanted.robots),
        ]
        command += ["--minutes", f"{wanted.minutes:g}", "--seed", str(seed), "--headless", "--port", "0"]
        command += ["--web-port", str(port), "--data", str(folder / "data"), "--report", str(folder / "report.json")]
        if wanted.algorithm:
            command += ["--algorithm", wanted.algorithm]
        if wanted.measure_at is not None:
            command += ["--measure-at", f"{wanted.measure_at:g}"]
        with _started(command) as process:
            watch = _Watch(process, f"http://127.0.0.1:{port}/api/fleet")
            watch.until_it_ends()
        if process.returncode or not (folder / "report.json").exists():
            raise SystemExit(f"seed {seed}: `vla-fleet up` ended with {process.returncode}: {watch.last_line}")
        report = json.loads((folder / "report.json").read_text())
        return report | {"seed": seed, "outside": watch.summary(report)}


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """It gets no Ctrl-C of its own: whoever is interrupted here asks it to end, in order, and waits for it."""
    process = subprocess.Popen(
        command, cwd=_ROOT, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                # its parts see that it is gone, and end
                process.kill()
                process.wait()


class _Watch:
    """Reads what the run says and what its processes use, from the first version until time is up."""

    def __init__(self, process: subprocess.Popen[str], page: str) -> None:
        self._process, self._page = process, page
        self._tree = ProcessTree(process.pid)
        self._time_is_up = threading.Event()
        self.last_line = ""
        self._begin: tuple[float, dict[str, float], int, int] | None = None
        self._end: tuple[float, dict[str, float]] | None = None
        self._memory: Counter[str] = Counter()
        self._machine, self._machine_ms = MachineSpeed(), list[float]()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def until_it_ends(self) -> None:
        """Watch the whole run."""
        self._reader.start()
        weighed_s = 0.0
        while self._process.poll() is None:
            self._tree.look()
            now_s = time.monotonic()
            if self._begin is None:
                self._look_for_beginning(now_s)
            elif self._end is None:
                if now_s - weighed_s > _WEIGH_EVERY_S:
                    weighed_s, memory = now_s, self._tree.memory_bytes()
                    self._memory = max(self._memory, memory, key=lambda kinds: sum(kinds.values()))
                    self._machine_ms.append(self._machine.step_ms(_MOMENT_STEPS))
                if self._time_is_up.is_set():
                    self._end = now_s, self._tree.cpu_seconds()
            time.sleep(_LOOK_EVERY_S)
        self._reader.join(5.0)

    def summary(self, report: dict[str, Any]) -> dict[str, Any]:
        """See `run_once`."""
        if self._begin is None or self._end is None:
            raise SystemExit(f"the run ended before its robots worked: {self.last_line}")
        (begun_s, before, ticks, steps), (ended_s, after) = self._begin, self._end
        took_s = ended_s - begun_s
        used = {kind: after[kind] - before.get(kind, 0.0) for kind in sorted(after)}
        used = {kind: used_s for kind, used_s in used.items() if used_s > 0.05}
        worked = max(1, report["ticks"] - ticks)
        return {
            "took_s": round(took_s, 1),
            "cpu_s": {kind: round(used_s, 2) for kind, used_s in used.items()},
            "cpu_ms_per_tick": {kind: round(1e3 * used_s / worked, 4) for kind, used_s in used.items()},
            "cores": round(sum(used.values()) / took_s, 3),
            "trainer_cores": round(used.get("trainer", 0.0) / took_s, 3),
            "gradient_steps": report["gradient_steps"] - steps,
            "machine_ms": round(statistics.median(self._machine_ms), 2),
            "gradient_steps_per_s": round((report["gradient_steps"] - steps) / took_s, 2),
            "memory_bytes": sum(self._memory.values()),
            "memory_by_kind": dict(sorted(self._memory.items())),
        }

    def _look_for_beginning(self, now_s: float) -> None:
        """Robots begin with the first version."""
        try:
            with urllib.request.urlopen(self._page, timeout=5.0) as answer:
                snapshot = json.load(answer)
        except (OSError, urllib.error.URLError, json.JSONDecodeError):
            # its page is not there yet
            return
        if snapshot["version"] is not None:
            ticks = sum(robot["ticks"] for robot in snapshot["robots"])
            self._begin = now_s, self._tree.cpu_seconds(), ticks, snapshot["version"]["gradient_steps"]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.last_line = line.strip() or self.last_line
            if line.startswith("time is up"):
                self._time_is_up.set()
