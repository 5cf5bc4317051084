"""Is a robot fit to be driven, and is this computer fit to drive one?"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.conformance import CheckOutcome, ConformanceReport, Figure, check_robot
from hal.interfaces.robot import Robot
from hal.registry import CAMERAS, ROBOTS, TELEOPERATORS, broken, known, make_robot
from wire.errors import ConfigError
from wire.transport.shared_memory import memory_directory

GENTLE_SCALE = 0.05
"""share of the limits by which hardware is moved"""


@dataclass(frozen=True, slots=True)
class Visit:
    """What to examine and how."""

    robot: str
    config: Any
    task: str = ""
    """'': the first the robot knows"""
    seed: int = 0
    seconds: float = 5.0
    """how long rates are measured"""
    simulated: bool = False
    """a simulator: its scenes follow seeds and its limits may be commanded"""
    move: bool = True
    patience_s: float = 120.0
    """a check that takes longer means that the driver blocks"""


def examine(visit: Visit, tell: Callable[[str], None], give_up: Callable[[str], None]) -> ConformanceReport:
    """Run the conformance suite. `tell` hears each check's name; `give_up` is called from another thread with a reason
    when a check never ends. Raises as `prepared`."""
    task = prepared(visit).task
    watch = _DoctorWatch(visit.patience_s, give_up)

    def heard(name: str) -> None:
        tell(name)
        watch.at(name)

    try:
        return check_robot(
            lambda: make_robot(visit.robot, visit.config),
            task,
            visit.seed,
            scale=0.5 if visit.simulated else GENTLE_SCALE,
            seeded=visit.simulated,
            measure_s=visit.seconds,
            move=visit.move,
            gentle=not visit.simulated,
            notify=heard,
        )
    finally:
        watch.end()


def prepared(visit: Visit) -> Visit:
    """`visit` with a task, before anything moves.

    Raises `ConfigError` for an unknown robot or one without a task, `RobotError` for a driver that cannot be loaded.
    """
    if visit.task:
        return visit
    robot = make_robot(visit.robot, visit.config)
    robot.close()
    return replace(visit, task=_task(robot))


def _task(robot: Robot) -> str:
    tasks = getattr(robot, "tasks", ())
    if not tasks:
        raise ConfigError(f"robot '{robot.spec.embodiment}' names no tasks; say which one with --task.")
    return tasks[0]


class _DoctorWatch:
    """Calls `give_up` when a check takes longer than `patience_s`."""

    def __init__(self, patience_s: float, give_up: Callable[[str], None]) -> None:
        self._patience_s, self._give_up = patience_s, give_up
        self._name, self._since_s = "", time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="doctor-watch", daemon=True).start()

    def at(self, name: str) -> None:
        self._name, self._since_s = name, time.monotonic()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._patience_s / 4)):
            if time.monotonic() - self._since_s > self._patience_s:
                self._give_up(
                    f"check '{self._name}' has not ended after {self._patience_s:g} s: the driver blocks. Check cable "
                    "and power; a driver must give up by itself with a RobotError."
                )
                return


def show(report: ConformanceReport, console: Console) -> None:
    """A table a person can act on."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for check in report.checks:
        table.add_row(_mark(check.passed), check.name.replace("_", " "), check.message)
    for figure in report.figures:
        table.add_row(
            _mark(figure.holds) if figure.limit is not None else Text("·", "dim"),
            figure.name,
            f"{figure.value:.4g} {figure.unit}{_bound(figure)}",
        )
    console.print(table)
    total = len(report.checks) + sum(figure.limit is not None for figure in report.figures)
    console.print(f"{total - len(report.failed)} of {total} checks passed")


def _mark(good: bool) -> Text:
    return Text("ok", "green") if good else Text("FAIL", "bold red")


def _bound(figure: Figure) -> str:
    if figure.limit is None:
        return ""
    bound = f" ({'at least' if figure.at_least else 'at most'} {figure.limit:.4g})"
    return bound if figure.holds else f"{bound}: {figure.advice}"


# --- this computer ---------------------------------------------------------------------------------------------------


def computer(data: Path) -> list[CheckOutcome]:
    """What this computer has for driving robots; what is missing says what it would be for."""
    checks = [CheckOutcome("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]}; 3.11 or newer is needed")]
    cores = len(os.sched_getaffinity(0))
    checks.append(CheckOutcome("cores", cores >= 2, f"{cores}; control, inference and uplink want two"))
    memory = memory_directory()
    checks.append(
        CheckOutcome("shared memory", memory is not None, str(memory or "no /dev/shm; pictures go through files"))
    )
    checks.append(
        CheckOutcome("real-time priority", _may_be_real_time(), "without it other programs delay control; see docs")
    )
    free = shutil.disk_usage(data if data.is_dir() else Path.cwd()).free / 1e9
    checks.append(CheckOutcome("disk", free > 1.0, f"{free:.1f} GB free for the spool and the weight cache"))
    for module, purpose in (
        ("torch", "inference on this computer (without: edge --think)"),
        ("cv2", "cameras and pictures"),
        ("rclpy", "ROS 2 robots and the edge node"),
        ("lerobot", "LeRobot's robots and leader arms"),
        ("ray", "fleets over a Ray cluster"),
    ):
        there = find_spec(module) is not None
        checks.append(CheckOutcome(module, there, purpose))
    for group, noun in ((ROBOTS, "robots"), (CAMERAS, "cameras"), (TELEOPERATORS, "teleoperators")):
        wrong = broken(group)
        names = ", ".join(name for name in known(group) if name not in wrong)
        checks.append(CheckOutcome(noun, True, names or "none"))
        checks += [CheckOutcome(f"{noun}: {name}", False, reason) for name, reason in wrong.items()]
    return checks


def _may_be_real_time() -> bool:
    try:
        import resource

        return os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_RTPRIO)[0] > 0
    except (ImportError, OSError):
        return False


def show_computer(checks: list[CheckOutcome], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for check in checks:
        table.add_row(Text("ok", "green") if check.passed else Text("no", "yellow"), check.name, check.message)
    console.print(table)
