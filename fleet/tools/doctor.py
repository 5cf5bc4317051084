"""Is a robot fit to be driven, and is this computer fit to drive one?"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.tools.doctor_stops import stoppable
from hal.conformance import ConformanceReport, check_robot
from hal.driver_host.real_time import memory_permission, priority_permission
from hal.interfaces.robot import Robot
from hal.registry import CAMERAS, ROBOTS, TELEOPERATORS, broken, known
from hal.stop_devices.evdev_keys import find_keys
from hal.stop_devices.gpio_line import find_chips
from wire.errors import ConfigError
from wire.transport.shared_memory import memory_directory


def examine(
    make: Callable[[], Robot],
    task: str,
    simulated: bool,
    move: bool,
    seconds: float,
    timeout_s: float,
    console: Console,
) -> ConformanceReport:
    """Run the conformance suite on the robot that `make` makes, and say on `console` which check it is at.

    `simulated`: its scenes follow seeds, its limits may be commanded, and nobody needs to stop it, as `vla-fleet stop`
    does with any other; `seconds`: how long rates are measured. A check that takes longer than `timeout_s` ends this
    process: the driver blocks.
    """
    watch = _CheckTimeout(timeout_s)

    def notify(name: str) -> None:
        console.print(f"[dim]{name} …[/dim]", highlight=False)
        watch.begin(name)

    watch.begin("making the robot")
    try:
        with contextlib.nullcontext(make) if simulated else stoppable(make) as made:
            return check_robot(
                made,
                task,
                seeded=simulated,
                measure_s=seconds,
                move=move,
                gentle=not simulated,
                notify=notify,
            )
    finally:
        watch.end()


def default_task(robot: Robot) -> str:
    """The first task that `robot` knows; closes it. Raises `ConfigError` for one that names none."""
    robot.close()
    tasks = getattr(robot, "tasks", ())
    if not tasks:
        raise ConfigError(f"robot '{robot.spec.embodiment}' names no tasks; say which one with --task.")
    return tasks[0]


class _CheckTimeout:
    """Ends this process when a check takes longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer: threading.Timer | None = None

    def begin(self, name: str) -> None:
        """The check before, if any, has ended."""
        self.end()
        self._timer = threading.Timer(self._timeout_s, self._give_up, (name,))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self, name: str) -> None:
        sys.stderr.write(
            f"vla-fleet: check '{name}' has not ended after {self._timeout_s:g} s: the driver blocks. "
            "Check cable and power; a driver must give up by itself with a RobotError.\n"
        )
        sys.stderr.flush()
        # The driver sits in a call that does not return: no tidy end is possible.
        os._exit(1)


def show(report: ConformanceReport, console: Console) -> None:
    """What was found, a line for each check."""
    for line in str(report).splitlines():
        style = "bold red" if line.startswith("FAIL") else None
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def show_limits(block: str, console: Console) -> None:
    """The limits that a recipe of a real robot must have, ready to paste."""
    console.print(
        "\nA real robot runs no policy without limits. From its spec; think about each number, then put this into the "
        "recipe's LoopConfig:\n",
        markup=False,
        highlight=False,
    )
    console.print(block, markup=False, highlight=False, soft_wrap=True)


# --- this computer ---------------------------------------------------------------------------------------------------


def show_computer(data: Path, console: Console) -> None:
    """What this computer has for driving robots; what is missing says what it would be for.

    `data`: on the disk that the spool will be on.
    """
    table = Table(show_header=False, box=None, pad_edge=False)

    def add(name: str, passed: bool, message: str) -> None:
        table.add_row(Text("ok", "green") if passed else Text("no", "yellow"), name, message)

    add("python", sys.version_info >= (3, 11), f"{sys.version.split()[0]}; 3.11 or newer is needed")
    cores = len(os.sched_getaffinity(0))
    add("cores", cores >= 2, f"{cores}; control, inference and uplink want two")
    memory = memory_directory()
    add("shared memory", memory is not None, str(memory or "no /dev/shm; pictures go through files"))
    for name, missing in (("real-time priority", priority_permission()), ("locked memory", memory_permission())):
        add(name, not missing, f"without it control may be late. {missing}" if missing else "for control and driver")
    free = shutil.disk_usage(data if data.is_dir() else Path.cwd()).free / 1e9
    add("disk", free > 1.0, f"{free:.1f} GB free for the spool and the weight cache")
    for module, purpose in (
        ("torch", "inference on this computer (without: edge --think)"),
        ("cv2", "cameras and pictures"),
        ("rclpy", "ROS 2 robots and the edge node"),
        ("lerobot", "LeRobot's robots and leader arms"),
        ("ray", "fleets over a Ray cluster"),
        ("evdev", "pedals and keys that stop a robot (vla-fleet[beside])"),
        ("gpiod", "GPIO lines that stop a robot (vla-fleet[beside])"),
    ):
        add(module, find_spec(module) is not None, purpose)
    add("pedals and keys", *_found_keys())
    chips = find_chips()
    add("GPIO chips", bool(chips), ", ".join(chips) or "none; a stop line needs one")
    for group, noun in ((ROBOTS, "robots"), (CAMERAS, "cameras"), (TELEOPERATORS, "teleoperators")):
        wrong = broken(group)
        add(noun, True, ", ".join(name for name in known(group) if name not in wrong) or "none")
        for name, reason in wrong.items():
            add(f"{noun}: {name}", False, reason)
    console.print(table)


def _found_keys() -> tuple[bool, str]:
    """Whether there are any, and which."""
    try:
        keys = find_keys()
    except ConfigError as error:
        return False, str(error)
    return bool(keys), "; ".join(map(str, keys)) or "none that this user may read; a stop pedal is one"
