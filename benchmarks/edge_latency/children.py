"""Child processes of `benchmarks.edge_latency`: started with a log each, watched, ended by their process ids."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from robot_edge.runtime.lifecycle import PARENT

ROOT = Path(__file__).resolve().parents[2]


class ChildFailedError(RuntimeError):
    """A child process ended or did not do what was waited for; says which, and the end of its log."""


class Children:
    """Use as a context: whatever happens, no child outlives it."""

    def __init__(self, place: Path) -> None:
        """`place`: a directory for logs, and where children run, for some write into it."""
        self._place = place
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._number = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*reversed(self._running))

    def start(self, name: str, *command: str, nice: int = 0) -> Path:
        """`python -m COMMAND`; returns its log. A negative `nice` is left out where it is not permitted."""
        self._number += 1
        log = self._place / f"{self._number:03d}-{name}.log"
        # one thread in each process of every edge: with more, small networks are slower on a busy machine
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self._place,
                env={**os.environ, **threads, **offline, "PYTHONPATH": path, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, nice)
        self._running[name] = child
        return log

    def wait_for(self, name: str, log: Path, text: str, timeout_s: float) -> None:
        """Return when `text` stands in `log`. Raises `ChildFailedError`."""
        deadline = time.monotonic() + timeout_s
        while text not in log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise ChildFailedError(f"{name} did not say '{text}' within {timeout_s:.0f} s{_tail(log)}")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises `ChildFailedError` when a child has ended by itself."""
        for name, child in self._running.items():
            if child.poll() is not None:
                raise ChildFailedError(f"{name} ended by itself with status {child.returncode}{self._last(name)}")

    def rest(self, seconds: float) -> None:
        """Sleep, and look after the children meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            self.check()

    def pause(self) -> None:
        """All children stand still until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def stop(self, *names: str, how: signal.Signals = signal.SIGTERM, grace_s: float = 15.0) -> None:
        """Ask, wait, and kill what is still there."""
        children = [self._running.pop(name) for name in names if name in self._running]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(how)
                # one that is paused hears nothing
                child.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        for child in children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _last(self, name: str) -> str:
        logs = sorted(self._place.glob(f"*-{name}.log"))
        return _tail(logs[-1]) if logs else ""


@contextlib.contextmanager
def trainers(place: Path, model: Path) -> Iterator[Children]:
    """One training process on every core, paused until they are told to `resume`."""
    cores = os.cpu_count() or 1
    with Children(place) as children:
        logs = {
            f"trainer-{i}": children.start(f"trainer-{i}", "benchmarks.edge_latency.load", str(model))
            for i in range(cores)
        }
        for name, log in logs.items():
            children.wait_for(name, log, "ready", 300.0)
        children.pause()
        yield children


def die_with_parent() -> None:
    """For a child that has no `ShutdownSignal`, or may be paused: end it when the benchmark is killed (Linux)."""
    if sys.platform == "linux":
        # 1 is PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-12:]
    return ":\n  " + "\n  ".join(lines) if lines else "."
