"""A recipe whose robot notes every command it gets, with its time, in the file that VLA_FLEET_TEST_LOG names."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from hal.registry import register
from robot_edge.control.config import LoopConfig
from tests.e2e.small_recipes import unhurried
from wire.clock import Clock

CONTROL_HZ = 40.0
_RECORD = np.dtype([("time_ns", np.int64), ("action", np.float32, (4,))])


class LoggedRobot(FakeRobot):
    """Never done, so that its episodes go on."""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        super().__init__(config, clock)
        self._log = -1

    def connect(self) -> None:
        super().connect()
        if "VLA_FLEET_TEST_LOG" in os.environ and self._log < 0:
            self._log = os.open(os.environ["VLA_FLEET_TEST_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, action: np.ndarray) -> Feedback:
        done = super().write(action)
        if self._log >= 0:
            record = np.zeros(1, _RECORD)
            record["time_ns"], record["action"] = time.monotonic_ns(), done.executed
            os.write(self._log, record.tobytes())
        return Feedback(done.executed, done.reward, False)


register("logged", LoggedRobot, FakeExpert)


def recipe(seed: int = 0) -> Recipe:
    """The fake job with this robot, in long episodes."""
    config = FakeConfig(control_hz=CONTROL_HZ)
    made = fake(seed)
    return replace(
        made,
        make_policy=unhurried(made.make_policy),
        robot="logged",
        robot_config=config,
        unpaced_config=config,
        spec=FakeRobot(config).spec,
        loop=LoopConfig(max_ticks=1200),
        demonstrations=1,
        evaluator=replace(made.evaluator, every_s=1000.0, episodes=1, max_ticks=20),
    )


def read_log(path: Path) -> np.ndarray:
    """record[n]: `time_ns` and `action` float32[4] of every command so far."""
    data = path.read_bytes()
    return np.frombuffer(data[: len(data) - len(data) % _RECORD.itemsize], _RECORD)
