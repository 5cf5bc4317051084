"""Cameras without hardware: a test pattern, and the view of a simulated robot's scene."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hal.cameras.capture import CameraConfig, ThreadedCamera
from hal.cameras.opencv import Pace
from hal.cameras.picture import to_rgb
from hal.interfaces.robot import Robot
from hal.registry import make_robot, read_config
from hal.safety.rest import rest_action
from wire.errors import ConfigError, RobotError

_COUNTED = 16
"""bits of the picture's number, drawn as a row of squares"""


@dataclass(frozen=True, slots=True)
class PatternConfig(CameraConfig):
    """A picture that changes each time. What goes wrong is chosen here too: it stands in for real cameras in tests."""

    still_after: int = 0
    """after so many pictures none comes any more; 0: never"""
    unplugged_after: int = 0
    """after so many pictures the device is gone, and can be opened again after `back_after_s`; 0: never"""
    back_after_s: float = 0.5


class PatternCamera(ThreadedCamera):
    """Keeps the `Camera` protocol: a bar that wanders, and the picture's number in its top row."""

    def __init__(self, config: PatternConfig | None = None) -> None:
        """Only stores. Raises `ConfigError`."""
        own = config or PatternConfig()
        device = PatternDevice(own)
        super().__init__(own, "pattern", lambda: device)
        if own.width < _COUNTED or own.height < 2:
            raise ConfigError(f"{self._what}: it needs 2 rows and {_COUNTED} columns.")


class PatternDevice:
    """Keeps the `CaptureDevice` protocol; goes on counting when it is opened again."""

    def __init__(self, config: PatternConfig) -> None:
        self._config = config
        self._pace = Pace(config.rate_hz)
        self._where = f"camera '{config.name}' (pattern)"
        self._given = 0
        self._gone_until = 0.0

    def open(self) -> None:
        """Raises `RobotError` while it is unplugged."""
        if time.monotonic() < self._gone_until:
            raise RobotError(f"{self._where} is unplugged. Plug it in.")

    def grab(self) -> tuple[int, np.ndarray] | None:
        config = self._config
        self._pace.wait()
        self._given += 1
        if config.unplugged_after and self._given == config.unplugged_after + 1:
            self._gone_until = time.monotonic() + config.back_after_s
            raise RobotError(f"{self._where} was unplugged. Plug it in.")
        if config.still_after and self._given > config.still_after:
            # as a driver that waits for a picture, and gives up in the end
            time.sleep(config.back_after_s)
            raise RobotError(f"{self._where} gives no picture any more. Check its cable.")
        return time.monotonic_ns(), pattern(config.height, config.width, self._given)

    def close(self) -> None:
        pass


def pattern(height: int, width: int, number: int) -> np.ndarray:
    """uint8[height, width, 3]: picture `number` of a pattern."""
    image = np.empty((height, width, 3), np.uint8)
    image[:, :, 0] = np.linspace(0, 255, width, dtype=np.uint8)
    image[:, :, 1] = np.linspace(0, 255, height, dtype=np.uint8)[:, None]
    image[:, :, 2] = 64
    bar = number * max(1, width // 64) % width
    image[height // 2 :, bar : bar + max(1, width // 32)] = 255
    side = width // _COUNTED
    for bit in range(_COUNTED):
        image[: max(1, height // 16), bit * side : (bit + 1) * side] = 255 * (number >> bit & 1)
    return image


@dataclass(frozen=True, slots=True)
class SceneConfig(CameraConfig):
    """Which simulated robot's scene is filmed. Raises `ConfigError`."""

    robot: str
    """its name in the registry"""
    robot_config: dict[str, Any] = field(default_factory=dict)
    task: str = ""
    """default: its first"""
    seed: int = 0
    camera: str = ""
    """which of its cameras; default: its first"""
    height: int = field(default=0, kw_only=True)
    width: int = field(default=0, kw_only=True)
    rate_hz: float = field(default=0.0, kw_only=True)
    """0: as the robot's camera"""


class SceneCamera(ThreadedCamera):
    """Keeps the `Camera` protocol: films a scene of its own, in which the robot only rests.

    A stand-in for a real camera where a real picture's content matters little. What the robot that acts sees is in that
    robot's own cameras.
    """

    def __init__(self, config: SceneConfig) -> None:
        """Makes the robot for its spec, without connecting it. Raises `ConfigError` for one without such a camera."""
        inside = read_config(config.robot, config.robot_config) if config.robot_config else None
        robot = make_robot(config.robot, inside)
        cameras = {camera.name: camera for camera in robot.spec.cameras}
        if not cameras or (config.camera and config.camera not in cameras):
            raise ConfigError(
                f"camera '{config.name}' (scene of robot '{config.robot}'): the robot has no camera "
                f"'{config.camera}'; it has {', '.join(cameras) or 'none'}."
            )
        own = cameras[config.camera] if config.camera else robot.spec.cameras[0]
        device = SceneDevice(config, robot, own.name)
        sizes = {side: getattr(config, side) or getattr(own, side) for side in ("height", "width", "rate_hz")}
        super().__init__(replace(config, **sizes), f"scene of robot '{config.robot}'", lambda: device)


class SceneDevice:
    """Keeps the `CaptureDevice` protocol: lets the robot rest at its control rate and takes each new picture."""

    def __init__(self, config: SceneConfig, robot: Robot, camera: str) -> None:
        self._config = config
        self._robot = robot
        self._camera = camera
        self._pace = Pace(robot.spec.control_hz)
        self._taken_ns = -1

    def open(self) -> None:
        task = self._config.task or next(iter(getattr(self._robot, "tasks", ())), "")
        if not task:
            raise RobotError(
                f"camera '{self._config.name}' (scene of robot '{self._config.robot}'): give a `task` to film."
            )
        self._robot.connect()
        self._robot.reset(task, self._config.seed)

    def grab(self) -> tuple[int, np.ndarray] | None:
        for _ in range(round(self._robot.spec.control_hz) + 10):
            self._pace.wait()
            seen = self._robot.read()
            self._robot.write(rest_action(self._robot.spec, seen.state))
            frame = seen.images[self._camera]
            if frame.time_ns != self._taken_ns:
                self._taken_ns = frame.time_ns
                return frame.time_ns, to_rgb(frame.image)
        raise RobotError(
            f"camera '{self._config.name}': '{self._camera}' of robot '{self._config.robot}' gave no new picture in a "
            "second of its control. Check that robot's own cameras."
        )

    def close(self) -> None:
        self._robot.close()
