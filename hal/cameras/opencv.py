"""Cameras that OpenCV opens: USB cameras by number or device path (V4L2), streams by URL, and video files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hal.cameras.capture import ThreadedCamera
from hal.cameras.picture import Fit
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec

Backend = Literal["any", "v4l2", "ffmpeg", "gstreamer"]
_BACKENDS: dict[str, str] = {"v4l2": "CAP_V4L2", "ffmpeg": "CAP_FFMPEG", "gstreamer": "CAP_GSTREAMER"}
Rotation = Literal[0, 90, 180, 270]


@dataclass(frozen=True, slots=True)
class OpenCvConfig:
    """Which device, what is asked of it, and what the policy gets. Raises `ConfigError`."""

    device: int | str = 0
    """number, path as /dev/video2 or better /dev/v4l/by-id/..., or URL as rtsp://camera/1"""
    name: str = "camera"
    height: int = 480
    width: int = 640
    rate_hz: float = 30.0
    """pictures that come faster are left out"""
    backend: Backend = "any"
    """any: V4L2 for devices, FFmpeg for URLs"""
    device_height: int = 0
    device_width: int = 0
    device_hz: float = 0.0
    """what the device is asked for; 0: as it is. What it gives is brought to height and width"""
    fourcc: str = ""
    """pixel format asked of the device: MJPG lets USB 2 carry large pictures"""
    preview_height: int = 0
    preview_width: int = 0
    """of the larger picture for people; 0: they see the policy's"""
    fit: Fit = "stretch"
    rotation: Rotation = 0
    """degrees clockwise, for a camera that is mounted so"""
    latency_s: float = 0.0
    """from the light to the picture's arrival, if it was measured; pictures are stamped so much earlier"""
    stall_timeout_s: float = 2.0
    """without a new picture for so long the camera has failed"""
    first_frame_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        where = f"camera '{self.name}' (device {self.device!r})"
        if isinstance(self.device, str) and "://" not in self.device and Path(self.device).is_file():
            raise ConfigError(f"{where} is a file; use the camera 'video' with it as `path`.")
        if self.fourcc and len(self.fourcc) != 4:
            raise ConfigError(f"{where}: fourcc {self.fourcc!r} must be four letters, as MJPG.")
        if not 0 <= self.latency_s <= 2:
            raise ConfigError(f"{where}: latency_s {self.latency_s:g} is none; give 0 to 2.")
        if not self.stall_timeout_s > 0 or not self.first_frame_timeout_s > 0:
            raise ConfigError(f"{where}: stall_timeout_s and first_frame_timeout_s must be above 0.")


class OpenCvCamera(ThreadedCamera):
    """Keeps the `Camera` protocol."""

    def __init__(self, config: OpenCvConfig | None = None) -> None:
        """Only stores. Raises `ConfigError` for a spec that no camera can have."""
        config = config or OpenCvConfig()
        self.config = config
        device = f"device {config.device!r}"
        spec = CameraSpec(config.name, config.height, config.width, config.rate_hz)
        super().__init__(
            spec,
            lambda: OpenCvDevice(config, device),
            device,
            config.fit,
            (config.preview_height, config.preview_width),
            config.stall_timeout_s,
            config.first_frame_timeout_s,
        )


class OpenCvDevice:
    """Keeps the `CaptureDevice` protocol for a device or stream."""

    def __init__(self, config: OpenCvConfig, what: str) -> None:
        self._config = config
        self._where = f"camera '{config.name}' ({what})"
        self._video: Any = None
        self._pace = Pace(0.0)

    def open(self) -> None:
        """Raises `RobotError` that says which devices there are."""
        config = self._config
        cv2 = import_cv2(self._where)
        device = int(config.device) if isinstance(config.device, str) and config.device.isdecimal() else config.device
        stream = isinstance(device, str) and "://" in device
        backend = config.backend if config.backend != "any" else ("ffmpeg" if stream else "v4l2")
        self._video = cv2.VideoCapture(device, getattr(cv2, _BACKENDS[backend]))
        if not self._video.isOpened():
            there = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
            remedy = (
                "Check the address, and that the camera can be reached from here."
                if stream
                else f"There are: {there}. Check its cable, that no other program uses it, and that you may read it "
                "(on Debian: `sudo adduser $USER video`, then log in again)."
            )
            raise RobotError(f"{self._where} cannot be opened with {backend}. {remedy}")
        asked = (
            (cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*config.fourcc) if config.fourcc else 0),
            (cv2.CAP_PROP_FRAME_HEIGHT, config.device_height),
            (cv2.CAP_PROP_FRAME_WIDTH, config.device_width),
            (cv2.CAP_PROP_FPS, config.device_hz),
            # no picture shall wait behind others
            (cv2.CAP_PROP_BUFFERSIZE, 1),
        )
        for what, value in asked:
            if value:
                self._video.set(what, value)
        # a recording behind a URL comes as fast as it is read
        recorded = stream and self._video.get(cv2.CAP_PROP_FRAME_COUNT) > 0
        self._pace = Pace(self._video.get(cv2.CAP_PROP_FPS) if recorded else 0.0)

    def grab(self) -> tuple[int, np.ndarray] | None:
        """Raises `RobotError` when the device gives no more, as when it was unplugged."""
        if not self._video.grab():
            raise RobotError(
                f"{self._where} gives no more pictures: it was unplugged, or another program took it. Plug it in again."
            )
        return self._picture()

    def _picture(self) -> tuple[int, np.ndarray]:
        """What was grabbed, when it is due."""
        self._pace.wait()
        time_ns = time.monotonic_ns() - round(self._config.latency_s * 1e9)
        found, image = self._video.retrieve()
        if not found:
            raise RobotError(f"{self._where} gave a picture that cannot be decoded; try another fourcc.")
        return time_ns, upright(image, self._config.rotation)

    def close(self) -> None:
        if self._video is not None:
            self._video.release()
            self._video = None


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


class VideoDevice(OpenCvDevice):
    """Keeps the `CaptureDevice` protocol for a file."""

    def __init__(self, config: VideoConfig) -> None:
        super().__init__(OpenCvConfig(name=config.name, rotation=config.rotation), f"video {config.path}")
        self._file = config

    def open(self) -> None:
        """Raises `RobotError` when there is no such file or it is no video."""
        self._begin()
        rate_hz = self._video.get(import_cv2(self._where).CAP_PROP_FPS)
        self._pace = Pace((rate_hz if rate_hz > 0 else self._file.rate_hz) * self._file.speed)

    def grab(self) -> tuple[int, np.ndarray] | None:
        """The next picture when it is due; None after the last one, unless it loops."""
        if not self._video.grab():
            if not self._file.loop:
                return None
            self._begin()
            self._video.grab()
        return self._picture()

    def _begin(self) -> None:
        cv2 = import_cv2(self._where)
        self.close()
        if not Path(self._file.path).is_file():
            raise RobotError(f"{self._where}: there is no such file. Check `path`.")
        self._video = cv2.VideoCapture(self._file.path, cv2.CAP_ANY)
        if not self._video.isOpened():
            raise RobotError(f"{self._where} is no video that OpenCV reads. Convert it to MP4 or AVI.")


class Pace:
    """Lets `wait` return at most `rate_hz` times a second, at a steady beat; 0: at once."""

    def __init__(
        self,
        rate_hz: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._period_s = 1 / rate_hz if rate_hz > 0 else 0.0
        self._now, self._sleep = now, sleep
        self._due = 0.0

    def wait(self) -> None:
        """Return when the next picture is due; who is late by more than a period begins a new beat."""
        now = self._now()
        if now < self._due:
            self._sleep(self._due - now)
        elif now > self._due + self._period_s:
            self._due = now
        self._due += self._period_s


def upright(image: np.ndarray, rotation: Rotation) -> np.ndarray:
    """uint8[h, w, 3] RGB of OpenCV's BGR, turned clockwise by `rotation` degrees; a view."""
    return np.rot90(image[:, :, ::-1], -rotation // 90) if rotation else image[:, :, ::-1]


def import_cv2(where: str) -> Any:
    """OpenCV. Raises `RobotError` when it is not installed."""
    try:
        import cv2
    except ImportError as error:
        raise RobotError(f"{where}: OpenCV is not installed ({error}): `pip install 'vla-fleet[edge]'`.") from error
    return cv2
