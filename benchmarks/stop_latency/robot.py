"""The robot of `benchmarks.stop_latency`: it sways, and its driver notes each command with its time and the stop that
was the reason for it. Everything else is as it is shipped.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from hal.registry import register
from hal.safety.limited_robot import LimitedRobot
from robot_edge.control.config import LoopConfig
from robot_edge.uplink.spool import Spool
from wire.clock import Clock
from wire.errors import DiskFullError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, RobotSpec

LOG, DISK_FULL = "commands", "disk-full"
"""in the directory that `PLACE` names: what the driver got; a file that is there while the robot's disk is full"""
PLACE = "STOP_LATENCY_PLACE"
RECIPE = "benchmarks.stop_latency.robot:recipe"
CONFIG = FakeConfig(control_hz=40.0)
DISK_BLOCKS_S = 1.0
_RECORD = np.dtype([("time_ns", np.int64), ("stop", "S64")])
_PERIOD_S = 2.0


class NotingRobot(FakeRobot):
    """Never done, so that its episodes are long."""

    reason = ""
    """id of the newest stop if the next command brakes for it"""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        super().__init__(config or CONFIG, clock)
        self._log = -1

    def connect(self) -> None:
        super().connect()
        if self._log < 0 and PLACE in os.environ:
            path = Path(os.environ[PLACE]) / LOG
            self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, action: np.ndarray) -> Feedback:
        time_ns = time.monotonic_ns()
        if self._log >= 0:
            os.write(self._log, np.array([(time_ns, self.reason)], _RECORD).tobytes())
        self.reason = ""
        return Feedback(super().write(action).executed)


class Sway:
    """Goes to and fro, whatever its weights are. Keeps the `Policy` protocol."""

    horizon, version = 16, 0
    trained, corrector = PolicyCapabilities(), None

    def __init__(self, spec: RobotSpec, seed: int) -> None:
        self.spec = spec

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        times_s = observation.time_ns / 1e9 + np.arange(self.horizon) / self.spec.control_hz
        sway = 0.5 * np.sign(np.sin(2 * math.pi * times_s / _PERIOD_S))
        actions = np.repeat(sway[:, None], self.spec.action_dim, axis=1).astype(np.float32)
        return ActionChunk(actions, tick, self.spec.period_ns, self.version, observation.time_ns, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        self.version = version


def recipe(seed: int = 0) -> Recipe:
    """The fake job with this robot and policy."""
    return replace(
        fake(seed),
        robot="noting",
        robot_config=CONFIG,
        unpaced_config=CONFIG,
        spec=FakeRobot(CONFIG).spec,
        make_policy=Sway,  # type: ignore[arg-type]
        motion=None,
        loop=LoopConfig(max_ticks=4000, safety=FAKE_LIMITS),
    )


def read_log(place: Path, since: int = 0) -> np.ndarray:
    """record[n]: `time_ns` and `stop` of every command from number `since` on."""
    try:
        with (place / LOG).open("rb") as file:
            file.seek(since * _RECORD.itemsize)
            data = file.read()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) - len(data) % _RECORD.itemsize], _RECORD)


# --- what the processes of the robot note, and what happens to their disk ---------------------------------------------

_hold, _put = LimitedRobot.hold, Spool.put


def _noting_hold(self: LimitedRobot) -> Feedback:
    if isinstance(self.robot, NotingRobot):
        state = self.stop_state()
        self.robot.reason = state.last if state.stops else ""
    return _hold(self)


def _put_on_a_full_disk(self: Spool, *given: object) -> None:
    if (Path(os.environ[PLACE]) / DISK_FULL).exists():
        time.sleep(DISK_BLOCKS_S)
        raise DiskFullError("the disk of the benchmark is full.")
    _put(self, *given)  # type: ignore[arg-type]


register("noting", NotingRobot, FakeExpert)
if PLACE in os.environ:
    LimitedRobot.hold = _noting_hold  # type: ignore[method-assign]
    Spool.put = _put_on_a_full_disk  # type: ignore[method-assign, assignment]
