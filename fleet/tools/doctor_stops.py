"""The robot that the doctor moves is stopped as any other of this computer, under the name `doctor`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hal.driver_host.stop_line import StopListener
from hal.interfaces.robot import Feedback, RestPose, Robot
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import hold_action
from hal.safety.stop_latch import StopLatch
from robot_edge.runtime.lifecycle import run_directory
from robot_edge.runtime.robot_host import HOST, STOP_FILE, announce_host
from wire.errors import RobotStoppedError
from wire.types import Observation

NAME = "doctor"


class StoppableDriver:
    """A driver that is not connected, reset or moved while somebody stops it; all else goes through."""

    def __init__(self, robot: Robot, latch: StopLatch) -> None:
        self.robot, self.spec, self._latch = robot, robot.spec, latch
        self._executed: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.robot, name)

    def connect(self) -> None:
        self._require_free()
        self.robot.connect()

    def reset(self, task: str, seed: int) -> RestPose | None:
        self._require_free()
        self._executed = None
        pose = self.robot.reset(task, seed)
        self._require_free()
        return pose

    def read(self) -> Observation:
        return self.robot.read()

    def write(self, action: np.ndarray) -> Feedback:
        """Raises `RobotStoppedError` while it is stopped, and has it hold before that."""
        if not self._latch.state.free and self._executed is not None:
            self.robot.write(hold_action(self.spec, self._executed))
        self._require_free()
        done = self.robot.write(action)
        self._executed = done.executed
        return done

    def close(self) -> None:
        self.robot.close()

    def _require_free(self) -> None:
        if not self._latch.state.free:
            raise RobotStoppedError(f"the robot is not moved on: it is {self._latch.state}.")


@contextlib.contextmanager
def stoppable(make: Callable[[], Robot]) -> Iterator[Callable[[], Robot]]:
    """`make`, whose robots are stopped meanwhile by whoever stops those of this computer. Raises `StorageError`."""
    latch, made = StopLatch(), [make()]
    heard = LimitedRobot(made[0], latch=latch)

    def stop_newest() -> None:
        LimitedRobot(made[-1]).stop_motion()

    def make_stoppable() -> Robot:
        made[:] = [make()]
        return StoppableDriver(made[0], latch)

    heard.stop_driver = stop_newest
    with run_directory() as directory:
        announce_host(directory, Path(NAME))
        with contextlib.closing(StopListener(directory / HOST, heard, lambda: None)):
            yield make_stoppable


def standing_stops(data: Path) -> list[str]:
    """Which robots with data below `data` are stopped, and by whom: the one on this bench may be among them."""
    files = sorted([*data.glob(f"edges/*/{STOP_FILE}"), *data.glob(f"*/edges/*/{STOP_FILE}")])
    states = {file.parent.name: StopLatch(file).state for file in files}
    return [f"{name} is {state}" for name, state in states.items() if not state.free]
