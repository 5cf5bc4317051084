"""The processes that `benchmarks.wire` starts: a gateway, or what stands in its place, and robots."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.wire.people import TELEOPERATOR
from benchmarks.wire.robots import Phase, PhaseResult, RobotSettings
from benchmarks.wire.samples import RECIPE
from fleet.config.data_directory import DataDirectory
from wire.transport.keys import GATEWAY, make_keys

_READY_S = 120.0
_NICE = 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ChildProcess:
    """A process of the benchmark, spoken to by lines."""

    def __init__(self, log: Path, *words: str, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line. Raises `RuntimeError` with the end of its log when it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a process of the benchmark ended: {self._log.read_text()[-2000:]}")
        return line.rstrip("\n")

    def log(self) -> str:
        return self._log.read_text()

    def processor_s(self) -> float:
        """Processor time that it has used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / _TICKS_PER_S

    def memory_bytes(self) -> int:
        """What it has in memory."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class GatewayServer(ChildProcess):
    """`vla-fleet gateway` on a directory of its own."""

    def __init__(self, place: Path, keys: Path) -> None:
        data = DataDirectory(place / "data")
        data.root.mkdir()
        data.keys.symlink_to(keys)
        words = ["--recipe", RECIPE, "--data", str(data.root), "--port", "0", "--web-port", "0"]
        super().__init__(place / "gateway.log", "-m", "fleet.cli", "gateway", *words)
        deadline_s = time.monotonic() + _READY_S
        while not (said := re.search(r"robots connect to (\S+), .* the page is (\S+)", self.log())):
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                self.end()
                raise RuntimeError(f"the gateway does not start: {self.log()[-2000:]}")
            time.sleep(0.05)
        self.endpoint, self.page = said[1], said[2]


class RawServer(ChildProcess):
    """`benchmarks.wire.raw`."""

    def __init__(self, place: Path, keys: Path, *, disk: bool) -> None:
        directory = [str(place)] if disk else []
        super().__init__(place / "raw.log", "-m", "benchmarks.wire.raw", str(keys), *directory)
        self.endpoint = self.hear()


class LoadProcesses:
    """Robots in some processes, which all do the same, once. They are let in when it is made."""

    def __init__(
        self, place: Path, endpoint: str, keys: Path, names: list[str], *, processes: int, raw: bool, nice: int = _NICE
    ) -> None:
        count = min(processes, len(names))
        self._children = []
        for number in range(count):
            settings = RobotSettings(endpoint, str(keys), names[number::count], raw, nice)
            words = ["-m", "benchmarks.wire.robots", msgspec.json.encode(settings).decode()]
            self._children.append(ChildProcess(place / f"robots-{names[0]}-{number}.log", *words))
        for child in self._children:
            if (said := child.hear()) != "ready":
                raise RuntimeError(f"a process of robots said {said[:200]!r}")

    def begin(self, phase: Phase) -> None:
        for child in self._children:
            child.say(msgspec.json.encode(phase).decode())

    def results(self) -> list[PhaseResult]:
        return [msgspec.json.decode(child.hear(), type=PhaseResult) for child in self._children]

    def end(self) -> None:
        for child in self._children:
            child.end()


@contextlib.contextmanager
def ended(*children: ChildProcess | LoadProcesses) -> Iterator[None]:
    """They are ended in the end, the last first."""
    try:
        yield
    finally:
        for child in reversed(children):
            child.end()


def make_fleet_keys(keys: Path, names: list[str]) -> None:
    """Of the gateway, the robots and a teleoperator."""
    make_keys(keys, [GATEWAY, TELEOPERATOR, *names])
