"""Adds cameras to any robot: both by their names in the registry, so that any arm can have any camera.

{"robot": "lerobot", "robot_config": {...}, "cameras": [{"kind": "opencv", "config": {"device": 0, "name": "front"}}]}
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hal.interfaces.camera import Camera
from hal.interfaces.robot import Feedback, RestPose, Robot, Teleoperator
from hal.registry import CAMERAS, make_camera, make_operator, make_robot, read_config
from wire.clock import Clock, MonotonicClock
from wire.errors import CameraLostError, ConfigError, FleetError, RobotError
from wire.types import Frame, Observation, RobotSpec

log = logging.getLogger(__name__)

_KEPT = 16
"""pictures of each camera that are remembered, for observations that are stamped a little earlier"""


@dataclass(frozen=True, slots=True)
class CameraChoice:
    """One camera to add."""

    kind: str
    """its name in the registry: opencv, video, ros2, ..."""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CameraRobotConfig:
    """Which robot and which cameras. Raises `ConfigError`."""

    robot: str
    """its name in the registry"""
    cameras: tuple[CameraChoice, ...]
    robot_config: dict[str, Any] = field(default_factory=dict)
    fresh_picture_s: float = 5.0
    """a reset waits so long for the first picture of each camera"""

    def __post_init__(self) -> None:
        if not self.cameras:
            raise ConfigError("robot 'with-cameras': cameras is empty; name at least one, or use the robot itself.")
        if not self.fresh_picture_s > 0:
            raise ConfigError(f"robot 'with-cameras': fresh_picture_s {self.fresh_picture_s:g} must be above 0.")


class CameraRobot:
    """Keeps the `Robot` protocol. A picture is never newer than the observation it is in.

    A camera that fails is no fault of the robot: its last picture stays and grows old, which is what whoever acts on it
    looks at, and the camera mends itself meanwhile.
    What else the robot inside has (`tasks`, `task`, `privileged`, ...) is there by the same name.
    """

    def __init__(self, config: CameraRobotConfig, clock: Clock | None = None) -> None:
        """Makes the robot and the cameras for their specs, connects none. `clock`: for the robot inside.

        Pictures are stamped by it, as old as they are when they are first seen.
        Raises `ConfigError` for a camera's name that is taken or unknown.
        """
        self.config = config
        inside = read_config(config.robot, config.robot_config) if config.robot_config else None
        self.inside: Robot = make_robot(config.robot, inside, clock)
        self._clock = clock or MonotonicClock()
        self._cameras: dict[str, Camera] = {}
        taken = {camera.name for camera in self.inside.spec.cameras}
        for number, choice in enumerate(config.cameras):
            chosen = read_config(choice.kind, choice.config, CAMERAS) if choice.config else None
            camera = make_camera(choice.kind, chosen)
            name = camera.spec.name
            if name in taken:
                raise ConfigError(
                    f"robot 'with-cameras': cameras[{number}]: the name '{name}' is taken by another camera of "
                    f"'{config.robot}'; give it another."
                )
            taken.add(name)
            self._cameras[name] = camera
        self.spec: RobotSpec = msgspec.structs.replace(
            self.inside.spec, cameras=(*self.inside.spec.cameras, *(c.spec for c in self._cameras.values()))
        )
        self._frames: dict[str, deque[Frame]] = {name: deque(maxlen=_KEPT) for name in self._cameras}
        self._captured_ns: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        """of cameras that give nothing now, by name"""
        self._ready = False

    def __getattr__(self, name: str) -> Any:
        # only what is not here: what a scripted operator wants to know of its robot
        if name.startswith("_") or name == "inside":
            raise AttributeError(name)
        return getattr(self.inside, name)

    def connect(self) -> None:
        """Connect the cameras, then the robot, which a missing camera so leaves alone. Twice is once. Raises
        `RobotError`; then nothing stays open."""
        try:
            for camera in self._cameras.values():
                camera.connect()
            self.inside.connect()
        except FleetError:
            self.close()
            raise

    def reset(self, task: str, seed: int) -> RestPose | None:
        """Reset the robot and wait for a picture of each camera that was taken after that.

        Raises `CameraLostError` when a camera gives none, and what the robot raises.
        """
        self._ready = False
        pose = self.inside.reset(task, seed)
        begun_ns = time.monotonic_ns()
        fresh = {name: self._fresh_picture(name, camera, begun_ns) for name, camera in self._cameras.items()}
        for name, frame in fresh.items():
            self._frames[name].clear()
            self._store(name, frame)
        self._ready = True
        return pose

    def read(self) -> Observation:
        """The robot's observation with the cameras' newest pictures. Raises `RobotError` when the robot has failed."""
        if not self._ready:
            # the robot's own refusal, if it has one
            self.inside.read()
            raise RobotError("robot 'with-cameras': read before reset(); call reset() first.")
        for name, camera in self._cameras.items():
            self._look(name, camera)
        seen = self.inside.read()
        images = dict(seen.images)
        for name, frames in self._frames.items():
            images[name] = self._frame_at(name, frames, seen.time_ns)
        return Observation(seen.time_ns, seen.state, images, seen.task)

    def write(self, action: np.ndarray) -> Feedback:
        """As the robot inside."""
        return self.inside.write(action)

    def close(self) -> None:
        """Stop the robot, then give the cameras back. May be called twice."""
        self._ready = False
        try:
            self.inside.close()
        finally:
            for name, camera in self._cameras.items():
                camera.close()
                self._frames[name].clear()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _look(self, name: str, camera: Camera) -> None:
        try:
            frame = camera.read()
        except Exception as error:  # noqa: BLE001 - whatever a camera raises, the robot can be read and held
            if name not in self._faults:
                log.error("robot 'with-cameras': camera '%s' is lost, its last picture stays: %s", name, error)
            self._faults[name] = str(error)
            return
        if self._faults.pop(name, ""):
            log.info("robot 'with-cameras': camera '%s' is back.", name)
        self._store(name, frame)

    def _fresh_picture(self, name: str, camera: Camera, begun_ns: int) -> Frame:
        deadline = time.monotonic() + self.config.fresh_picture_s
        try:
            while (frame := camera.read()).time_ns < begun_ns:
                if time.monotonic() > deadline:
                    raise CameraLostError(
                        f"robot 'with-cameras': camera '{name}' gave no picture within "
                        f"{self.config.fresh_picture_s:g} s of the reset. Check the camera."
                    )
                time.sleep(0.001)
        except CameraLostError:
            raise
        except Exception as error:
            raise CameraLostError(f"robot 'with-cameras': camera '{name}' is lost: {error}") from error
        return frame

    def _store(self, name: str, frame: Frame) -> None:
        frames = self._frames[name]
        if frames and self._captured_ns[name] == frame.time_ns:
            return
        self._captured_ns[name] = frame.time_ns
        now_ns = self._clock.now_ns()
        stamp = now_ns - max(0, time.monotonic_ns() - frame.time_ns)
        if frames:
            stamp = min(now_ns, max(stamp, frames[-1].time_ns + 1))
        frames.append(Frame(stamp, frame.image, frame.preview))

    def _frame_at(self, name: str, frames: deque[Frame], time_ns: int) -> Frame:
        for frame in reversed(frames):
            if frame.time_ns <= time_ns:
                return frame
        ahead_ms = (frames[0].time_ns - time_ns) / 1e6
        raise RobotError(
            f"robot 'with-cameras': the robot's observation is {ahead_ms:.1f} ms older than the first picture of "
            f"'{name}'. Check the clock that the robot is stamped by."
        )


def inside_operator(robot: CameraRobot) -> Teleoperator:
    """The scripted operator of the robot inside: for the registry. Raises `ConfigError` when there is none."""
    return make_operator(robot.config.robot, robot.inside)
