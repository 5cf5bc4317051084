"""A robot made of numpy: a point that moves to a goal, seen by a tiny camera. For tests and for trying a fleet.

It has the action and state dimensions of the MetaWorld arm, so the same policy fits it. `Faults` makes it misbehave in
the ways real drivers do, at a tick of one's choice.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hal.interfaces.robot import ROBOT, Feedback, check_reset, check_task, require_scene
from hal.safety.limiter import limit_action
from hal.safety.limits import SafetyLimits
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec, CommandType, Dimension, Frame, Observation, RobotSpec

_REACH_M = 0.3
_STEP_M = 0.01
_NEAR_M = 0.02
_GOALS = {
    "go-left": np.array([-0.2, 0.0, 0.1]),
    "go-right": np.array([0.2, 0.0, 0.1]),
    "go-up": np.array([0.0, 0.0, 0.25]),
    "go-away": np.array([0.0, 0.2, 0.1]),
}
FAKE_INSTRUCTIONS = {
    "go-left": "go to the left",
    "go-right": "go to the right",
    "go-up": "go up",
    "go-away": "go away",
}
FAKE_TASKS = tuple(_GOALS)
FAKE_LIMITS = SafetyLimits(rest={"gripper_effort": 0.0})
"""none but where it begins"""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, from control tick `from_tick` of every episode on."""

    raise_on_read: bool = False
    nan_state: bool = False
    wrong_shape: bool = False
    """the state has one number too many"""
    frozen_camera: bool = False
    """the last frame comes again and again, with its old time"""
    future_frame: bool = False
    """the frame is stamped one second ahead of the observation"""
    clock_back: bool = False
    """each observation is stamped 1 ms before the one before it"""
    ignore_limits: bool = False
    """executes what it is given, whatever it is"""
    forget_seed: bool = False
    """the scene of a reset depends on the one before it"""
    unplugged: bool = False
    """no call gets through, and those after it need a new `connect`"""
    raise_on_connect: bool = False
    raise_on_reset: bool = False
    raise_on_write: bool = False
    wrong_feedback: bool = False
    """write gives one number too many as executed"""
    block_in_connect: bool = False
    """does not come back from the call, as long as the fault is there"""
    block_in_reset: bool = False
    block_in_read: bool = False
    block_in_write: bool = False
    from_tick: int = 0
    only_while: str = ""
    """all of these are there only while this file exists; `{robot}` in it stands for the name of the robot"""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """What the fake robot knows. Raises `ConfigError` for a task it has not."""

    tasks: tuple[str, ...] = FAKE_TASKS
    control_hz: float = 80.0
    camera_every_ticks: int = 4
    image_px: int = 64
    preview_px: int = 0
    """0: no preview"""
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for task in self.tasks:
            check_task("FakeConfig", task, _GOALS)
        if not self.tasks or self.camera_every_ticks < 1 or self.image_px < 4:
            raise ConfigError("FakeConfig: needs a task, camera_every_ticks of at least 1 and image_px of at least 4.")


def fake_spec(config: FakeConfig) -> RobotSpec:
    """da = 4 (delta x, y, z and gripper effort), ds = 4, one camera `front`."""
    return RobotSpec(
        embodiment="fake-point",
        state=(
            Dimension("x", "m", -_REACH_M, _REACH_M),
            Dimension("y", "m", -_REACH_M, _REACH_M),
            Dimension("z", "m", 0.0, _REACH_M),
            Dimension("gripper_opening", "1", -1.0, 1.0),
        ),
        action=(
            *(Dimension(f"move_{axis}", "cm/step", -1.0, 1.0, CommandType.delta) for axis in "xyz"),
            Dimension("gripper_effort", "1", -1.0, 1.0),
        ),
        cameras=(CameraSpec("front", config.image_px, config.image_px, config.control_hz / config.camera_every_ticks),),
        control_hz=config.control_hz,
    )


class FakeRobot:
    """Keeps the `Robot` protocol. The same seed and actions give the same run, bit for bit."""

    def __init__(self, config: FakeConfig | None = None, clock: Clock | None = None) -> None:
        self.config = config or FakeConfig()
        self.spec = fake_spec(self.config)
        self.tasks = self.config.tasks
        self._who = f"robot '{self.spec.embodiment}'"
        self.task = ""
        self.goal: np.ndarray = np.zeros(3, np.float32)
        """float32[3], m"""
        self._clock = clock or MonotonicClock()
        self._connected = False
        self._resets = 0
        self._tick = 0
        self._reads = 0
        self._state: np.ndarray = np.zeros(4, np.float32)
        self._frame: Frame | None = None
        self._low = np.array([d.low for d in self.spec.state], np.float32)
        self._high = np.array([d.high for d in self.spec.state], np.float32)

    def connect(self) -> None:
        """Raises `RobotError` while its faults say so."""
        self._apply_faults("connect")
        self._connected = True

    def reset(self, task: str, seed: int) -> None:
        """Raises `ConfigError` for a task that is not in the configuration, `RobotError` before `connect`."""
        self._apply_faults("reset")
        check_reset(self._who, task, self.tasks, seed, self._connected)
        self._resets += 1
        self._tick = self._reads = 0
        rng = np.random.default_rng((seed, self._resets if self._fault("forget_seed") else 0))
        self.task = task
        self.goal = (_GOALS[task] + rng.uniform(-0.04, 0.04, 3)).astype(np.float32)
        start = np.append(np.array([0.0, -0.1, 0.1]) + rng.uniform(-0.05, 0.05, 3), 0.0).astype(np.float32)
        self._state = np.clip(start, self._low, self._high)
        self._frame = self._film()

    def read(self) -> Observation:
        """State float32[4] and the newest frame. Raises `RobotError` before the first reset."""
        self._apply_faults("read")
        require_scene(self._who, "read", self.task or None)
        assert self._frame is not None
        time_ns = self._clock.now_ns()
        observation = Observation(time_ns, self._state.copy(), {"front": self._frame}, FAKE_INSTRUCTIONS[self.task])
        self._reads += 1
        return self._corrupt(observation)

    def write(self, action: np.ndarray) -> Feedback:
        """Move the point. Raises `InvalidDataError` for another shape or a number that is not finite; nothing moves
        then.
        """
        self._apply_faults("write")
        require_scene(self._who, "write", self.task or None)
        executed = np.asarray(action, np.float32).copy()
        if not self._fault("ignore_limits"):
            executed = limit_action(self.spec, action)
        self._state[:3] += executed[:3] * np.float32(_STEP_M)
        self._state[3] += np.float32(0.2) * (executed[3] - self._state[3])
        self._state = np.clip(self._state, self._low, self._high)
        self._tick += 1
        if self._tick % self.config.camera_every_ticks == 0 and not self._fault("frozen_camera"):
            self._frame = self._film()
        distance = self.distance_m()
        if self._fault("wrong_feedback"):
            executed = np.append(executed, np.float32(0))
        return Feedback(executed, -distance, distance < _NEAR_M)

    def close(self) -> None:
        self._connected, self.task = False, ""

    def distance_m(self) -> float:
        """From the point to the goal."""
        return float(np.linalg.norm(self._state[:3] - self.goal))

    def _fault(self, name: str) -> bool:
        faults = self.config.faults
        if not getattr(faults, name) or self._tick < faults.from_tick:
            return False
        return not faults.only_while or Path(faults.only_while.format(robot=os.environ.get(ROBOT, ""))).exists()

    def _apply_faults(self, call: str) -> None:
        """What goes wrong in any call: it raises, or does not come back."""
        gone = self._fault("unplugged")
        if gone:
            self.close()
        if gone or self._fault(f"raise_on_{call}"):
            raise RobotError(f"{self._who}: the arm does not answer; check its cable and power.")
        while self._fault(f"block_in_{call}"):
            time.sleep(0.02)

    def _film(self) -> Frame:
        size = self.config.preview_px
        return Frame(self._clock.now_ns(), self._draw(self.config.image_px), self._draw(size) if size else None)

    def _draw(self, size: int) -> np.ndarray:
        """uint8[size, size, 3]: the goal as a green square and the point as a red one that grows with its height."""
        image = np.full((size, size, 3), 40, np.uint8)
        for position, colour, channel in ((self.goal, 200, 1), (self._state, 255, 0)):
            column = round((float(position[0]) / _REACH_M + 1) / 2 * (size - 1))
            row = round((1 - float(position[1]) / _REACH_M) / 2 * (size - 1))
            half = max(1, round(size * (0.03 + 0.15 * float(position[2]))))
            image[max(0, row - half) : row + half, max(0, column - half) : column + half, channel] = colour
        return image

    def _corrupt(self, observation: Observation) -> Observation:
        time_ns, state, images = observation.time_ns, observation.state, observation.images
        if self._fault("nan_state"):
            state = np.full_like(state, np.nan)
        if self._fault("wrong_shape"):
            state = np.append(state, np.float32(0))
        if self._fault("clock_back"):
            time_ns -= self._reads * 1_000_000_000
        if self._fault("future_frame"):
            frame = images["front"]
            images = {"front": Frame(time_ns + 1_000_000_000, frame.image, frame.preview)}
        return Observation(time_ns, state, images, observation.task)


class FakeExpert:
    """Keeps the `Teleoperator` protocol: goes straight to the goal."""

    def __init__(self, robot: FakeRobot) -> None:
        self._robot = robot

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[4]; None before the first reset."""
        if not self._robot.task:
            return None
        way = (self._robot.goal - observation.state[:3]) / np.float32(_STEP_M)
        return np.append(np.clip(way, -1, 1), 0.0).astype(np.float32)

    def progress(self) -> float:
        """Metres to the goal; infinite before the first reset."""
        return self._robot.distance_m() if self._robot.task else float("inf")
