"""A robot that writes down what it is told, and a control process to kill: processes of test_server."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import run_driver_server
from hal.driver_host.watchdog import CallDeadline
from hal.drivers.fake import FakeConfig, FakeRobot, Faults, fake_spec
from hal.interfaces.robot import Feedback
from wire.types import CameraSpec, CommandType, Dimension, Frame, Observation, RobotSpec

HZ = 50.0
PERIOD_S = 1 / HZ
LOG = "VLA_FLEET_TEST_LOG"
BLOCK = "VLA_FLEET_TEST_BLOCK"
"""environment variable: a file called like a fault of the fake robot, which is there while the file is"""
FAKE = fake_spec(FakeConfig(control_hz=HZ))


class NotingRobot(FakeRobot):
    """Notes each call with its time, and what it executed, one line each."""

    def __init__(self) -> None:
        super().__init__(FakeConfig(control_hz=HZ, image_px=16, preview_px=24))
        self._notes = Path(os.environ[LOG]).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def write(self, action: np.ndarray) -> Feedback:
        feedback = super().write(action)
        self.note("write", *feedback.executed)
        return feedback

    def reset(self, task: str, seed: int) -> None:
        time.sleep(6 * PERIOD_S)
        super().reset(task, seed)
        self.note("reset")

    def close(self) -> None:
        super().close()
        self.note("close")

    def note(self, *words: object) -> None:
        self._notes.write(" ".join(map(str, (time.monotonic_ns(), *words))) + "\n")


class BlockingRobot(FakeRobot):
    """Blocks where and while the file `BLOCK` says: its first word is the call."""

    def __init__(self) -> None:
        config = FakeConfig(control_hz=HZ, image_px=16, preview_px=24)
        call = os.environ[BLOCK].rpartition("/")[2]
        super().__init__(replace(config, faults=Faults(**{call: True}, only_while=os.environ[BLOCK])))


LARGE = RobotSpec("painter", FAKE.state, FAKE.action, (CameraSpec("front", 480, 640, 10.0),), HZ)


class Painter:
    """A new large picture of one colour at each read, which its time tells: the number of the picture, modulo 256."""

    def __init__(self) -> None:
        self.spec = LARGE
        self._count = 0

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None: ...

    def read(self) -> Observation:
        self._count += 1
        frame = Frame(self._count, np.full((480, 640, 3), self._count % 256, np.uint8))
        return Observation(self._count, np.zeros(4, np.float32), {"front": frame}, "any")

    def write(self, action: np.ndarray) -> Feedback:
        return Feedback(action)

    def close(self) -> None: ...


WHEELS = RobotSpec(
    "wheels",
    (Dimension("x", "m", -100, 100),),
    (Dimension("forward", "m/s", -1, 1, CommandType.velocity),),
    (),
    HZ,
)


class Wheels:
    """A base on another computer, which keeps the velocity it was told last, whatever becomes of this process.

    Notes what it was told. While there is a file `BLOCK`, which names a call, that call does not come back.
    """

    def __init__(self) -> None:
        self.spec = WHEELS
        self._notes = Path(os.environ[LOG]).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None:
        self._block("reset", 1)

    def read(self) -> Observation:
        self._block("read")
        return Observation(time.monotonic_ns(), np.zeros(1, np.float32), {}, "drive")

    def write(self, action: np.ndarray) -> Feedback:
        self.note(float(action[0]))
        self._block("write")
        return Feedback(action)

    def close(self) -> None:
        self.note(0.0)

    def note(self, velocity: float) -> None:
        self._notes.write(f"{time.monotonic_ns()} velocity {velocity}\n")

    def _block(self, call: str, seconds: int = 30) -> None:
        if os.environ[BLOCK].endswith(f"{call}_in_C") and Path(os.environ[BLOCK]).exists():
            # As a C extension does that never gives the interpreter back.
            ctypes.PyDLL(None).sleep(seconds)
        while os.environ[BLOCK].endswith(call) and Path(os.environ[BLOCK]).exists():
            time.sleep(PERIOD_S / 4)


class BrakedWheels(Wheels):
    """Has a brake of its own."""

    def stop_motion(self) -> None:
        self.note(0.0)


def blocking_host(path: Path) -> None:
    """Host it, until it blocks for too long."""
    run_driver_server(BlockingRobot(), path, lambda: False, deadline=CallDeadline(quick_s=0.3, slow_s=0.6))


def noting_host(path: Path, parent: int = 0) -> None:
    """Host it, until this process is asked to end or `parent` is no longer its parent."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda which, _: asked.append(which))
    logging.basicConfig(level=logging.INFO)
    run_driver_server(NotingRobot(), path, lambda: bool(asked) or (parent != 0 and os.getppid() != parent))


def until_held(executed: list[np.ndarray], times: int = 1) -> None:
    """Until the host has commanded so often by itself, as nobody else does; `executed`: what the driver notes."""
    deadline, wanted = time.monotonic() + 60, len(executed) + times
    while len(executed) < wanted:
        assert time.monotonic() < deadline, f"held {len(executed) - wanted + times} times, not {times}"
        time.sleep(PERIOD_S)


def control(path: Path, value: float, fresh: bool) -> None:
    """Attach and move x by `value` in every period until somebody ends this process."""
    robot = RobotProxy(FakeRobot(FakeConfig(control_hz=HZ, image_px=16, preview_px=24)).spec, path)
    robot.connect()
    if fresh:
        robot.reset("go-left", 1)
    deadline = time.monotonic()
    while True:
        robot.read()
        robot.write(np.array([value, 0, 0, 0], np.float32))
        deadline += PERIOD_S
        time.sleep(max(0, deadline - time.monotonic()))


if __name__ == "__main__" and len(sys.argv) == 2:
    blocking_host(Path(sys.argv[1]))
elif __name__ == "__main__" and sys.argv[1] == "host":
    noting_host(Path(sys.argv[2]), *map(int, sys.argv[3:]))
elif __name__ == "__main__" and sys.argv[1] in ("wheels", "braked-wheels"):
    wheels = Wheels() if sys.argv[1] == "wheels" else BrakedWheels()
    cut_off = CallDeadline(quick_s=5.0, slow_s=60.0, coasting_s=0.3)
    run_driver_server(wheels, Path(sys.argv[2]), lambda: False, deadline=cut_off)
elif __name__ == "__main__" and sys.argv[1] == "paint":
    run_driver_server(Painter(), Path(sys.argv[2]), lambda: False)
elif __name__ == "__main__":
    control(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fresh")
