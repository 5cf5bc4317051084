"""Keeps child processes running: starts them, starts the dead ones again, ends them in order."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from robot_edge.runtime.forking import Process, Start, start_program
from robot_edge.runtime.lifecycle import PARENT
from robot_edge.runtime.log_files import LOG_BYTES, last_line, rotate_log
from wire.errors import storage_errors

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.3
_LONGEST_PAUSE_S = 10.0
_PATIENT_PAUSE_S = 30.0
"""of a child that is never given up"""
_STEADY_S = 20.0
_LOGS_S = 2.0
"""how often the size of logs is looked at"""


@dataclass(slots=True)
class Child:
    """One child process."""

    name: str
    command: list[str]
    log_file: Path
    """of its standard output and error; begun anew when it is large, with what was before beside it (`log_files`)"""
    environment: dict[str, str] = field(default_factory=dict)
    nice: int = 0
    """added to this process's niceness; a negative value is tried and left out where it is not permitted"""
    restart: bool = True
    """start it again when it ends by itself"""
    give_up_after: int = 5
    """deaths in a row, each soon after its start, after which it is left dead and `failed` says so; 0: never"""
    start: Start = start_program
    process: Process | None = None
    starts: int = 0
    deaths_in_a_row: int = 0
    started_s: float = 0.0
    due_s: float = 0.0
    failed: str = ""
    fault: str = ""
    """how it ended last, with its last word, until it has run steadily again"""

    @property
    def pid(self) -> int:
        """Process id while it runs, else 0."""
        return self.process.pid if self.process is not None and self.running else 0

    @property
    def running(self) -> bool:
        """From the moment it is asked for."""
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Call `poll` a few times a second."""

    def __init__(self, children: list[Child], log_bytes: int = LOG_BYTES) -> None:
        """`log_bytes`: how large a child's log may get, and as much again of what was before."""
        self.children = {child.name: child for child in children}
        self._log_bytes = log_bytes
        self._logs_due_s = 0.0

    def start(self, name: str) -> None:
        """Start one child now."""
        child = self.children[name]
        with storage_errors(f"starting {name}", child.log_file):
            child.log_file.parent.mkdir(parents=True, exist_ok=True)
            rotate_log(child.log_file, self._log_bytes)
            output = child.log_file.open("ab")
        environment = {**os.environ, **child.environment, PARENT: str(os.getpid())}
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + child.nice
        with output:
            child.process = child.start(child.command, environment, output.fileno(), niceness)
        child.started_s = time.monotonic()
        child.starts += 1

    def poll(self) -> list[str]:
        """Start dead children again; returns the names of those that died since the last call."""
        died = []
        now_s = time.monotonic()
        look_at_logs = now_s >= self._logs_due_s
        if look_at_logs:
            self._logs_due_s = now_s + _LOGS_S
        for child in self.children.values():
            if child.process is None or child.failed:
                continue
            code = child.process.poll()
            if code is None:
                if look_at_logs:
                    rotate_log(child.log_file, self._log_bytes)
                if now_s - child.started_s > _STEADY_S:
                    child.deaths_in_a_row, child.fault = 0, ""
                continue
            if child.due_s < child.started_s:
                died.append(child.name)
                child.deaths_in_a_row += 1
                if not child.restart or 0 < child.give_up_after <= child.deaths_in_a_row:
                    if code != 0 or child.restart:
                        child.failed = f"{child.name} ended with {_ending(code)}{_last_line(child.log_file)}"
                        log.error("%s", child.failed)
                    else:
                        child.process = None
                    continue
                longest_s = _LONGEST_PAUSE_S if child.give_up_after else _PATIENT_PAUSE_S
                pause_s = min(longest_s, _FIRST_PAUSE_S * 2 ** min(child.deaths_in_a_row - 1, 10))
                child.due_s = now_s + pause_s
                before, child.fault = child.fault, f"{child.name} ended with {_ending(code)}"
                if code > 0:
                    # One that was killed had no last word.
                    child.fault += _last_line(child.log_file)
                level = logging.WARNING if child.deaths_in_a_row == 1 or child.fault == before else logging.ERROR
                log.log(level, "%s; it starts again in %.1f s.", child.fault, pause_s)
            elif now_s >= child.due_s:
                self.start(child.name)
        return died

    def stop(self, names: list[str], grace_s: float) -> None:
        """Ask `names` to end with SIGTERM, all at once; those still there after `grace_s` are killed."""
        running = [child for name in names if (child := self.children[name]).running]
        for child in running:
            assert child.process is not None
            child.process.terminate()
        deadline_s = time.monotonic() + grace_s
        for child in running:
            assert child.process is not None
            try:
                child.process.wait(max(0.05, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("%s did not end within %.0f s and is killed.", child.name, grace_s)
                child.process.kill()
                child.process.wait()
        for name in names:
            self.children[name].process = None


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _last_line(path: Path) -> str:
    try:
        line = last_line(path)
    except OSError:
        line = ""
    return f": {line} (see {path})" if line else f"; see {path}"
