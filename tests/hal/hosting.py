"""A robot that writes down what it is told, and a control process to kill: processes of test_host."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from hal.fake import FakeConfig, FakeRobot, Faults
from hal.host import CallLimits, run_host
from hal.hosted import HostedRobot
from hal.robot import Feedback

HZ = 50.0
PERIOD_S = 1 / HZ
LOG = "VLA_FLEET_TEST_LOG"
BLOCK = "VLA_FLEET_TEST_BLOCK"
"""environment variable: a file called like a fault of the fake robot, which is there while the file is"""


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


def blocking_host(path: Path) -> None:
    """Host it, until it blocks for too long."""
    run_host(BlockingRobot(), path, lambda: False, limits=CallLimits(quick_s=0.3, slow_s=0.6))


def until_held(robot: HostedRobot, times: int = 1) -> None:
    """Until the host has held the robot that often, as nobody commands it."""
    while robot.held < times:
        time.sleep(4 * PERIOD_S)
        robot.read()


def control(path: Path, value: float, fresh: bool) -> None:
    """Attach and move x by `value` in every period until somebody ends this process."""
    robot = HostedRobot(FakeRobot(FakeConfig(control_hz=HZ, image_px=16, preview_px=24)).spec, path)
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
elif __name__ == "__main__":
    control(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fresh")
