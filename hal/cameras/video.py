"""A video file as a camera, at its own rate: once, or again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hal.cameras.capture import ThreadedCamera
from hal.cameras.opencv import Pace, Rotation, import_cv2, upright
from hal.cameras.picture import Fit
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Which file, and what the policy gets of it. Raises `ConfigError`."""

    path: str
    name: str = "camera"
    height: int = 480
    width: int = 640
    rate_hz: float = 30.0
    """at most so many pictures a second; a file with fewer gives fewer"""
    loop: bool = True
    """False: the last picture stays"""
    speed: float = 1.0
    """of the file's own rate"""
    preview_height: int = 0
    preview_width: int = 0
    """of the larger picture for people; 0: they see the policy's"""
    fit: Fit = "stretch"
    rotation: Rotation = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(f"camera '{self.name}' (video): path is empty; name a video file.")
        if not 0 < self.speed <= 100:
            raise ConfigError(f"camera '{self.name}' (video): speed {self.speed:g} is none; give above 0 to 100.")


class VideoCamera(ThreadedCamera):
    """Keeps the `Camera` protocol. Pictures are stamped when they are shown."""

    def __init__(self, config: VideoConfig) -> None:
        """Only stores. Raises `ConfigError` for a spec that no camera can have."""
        self.config = config
        spec = CameraSpec(config.name, config.height, config.width, config.rate_hz)
        preview = config.preview_height, config.preview_width
        super().__init__(spec, lambda: VideoDevice(config), f"video {config.path}", config.fit, preview)


class VideoDevice:
    """Keeps the `CaptureDevice` protocol for a file."""

    def __init__(self, config: VideoConfig) -> None:
        self._config = config
        self._where = f"camera '{config.name}' (video {config.path})"
        self._video: Any = None
        self._pace = Pace(0.0)

    def open(self) -> None:
        """Raises `RobotError` when there is no such file or it is no video."""
        self._begin()
        rate_hz = self._video.get(import_cv2(self._where).CAP_PROP_FPS)
        self._pace = Pace((rate_hz if rate_hz > 0 else self._config.rate_hz) * self._config.speed)

    def grab(self) -> tuple[int, np.ndarray] | None:
        """The next picture when it is due; None after the last one, unless it loops."""
        found, image = self._video.read()
        if not found:
            if not self._config.loop:
                return None
            self._begin()
            found, image = self._video.read()
            if not found:
                raise RobotError(f"{self._where} has no picture that can be read. Is it a whole video file?")
        self._pace.wait()
        return time.monotonic_ns(), upright(image, self._config.rotation)

    def close(self) -> None:
        if self._video is not None:
            self._video.release()
            self._video = None

    def _begin(self) -> None:
        cv2 = import_cv2(self._where)
        self.close()
        if not Path(self._config.path).is_file():
            raise RobotError(f"{self._where}: there is no such file. Check `path`.")
        self._video = cv2.VideoCapture(self._config.path, cv2.CAP_ANY)
        if not self._video.isOpened():
            raise RobotError(f"{self._where} is no video that OpenCV reads. Convert it to MP4 or AVI.")
