"""Cameras that OpenCV opens: USB cameras by number or device path (V4L2), streams by URL, and video files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hal.cameras.capture import CameraConfig, ThreadedCamera
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError

Backend = Literal["any", "v4l2", "ffmpeg", "gstreamer"]
Rotation = Literal[0, 90, 180, 270]


@dataclass(frozen=True, slots=True)
class OpenCvConfig(CameraConfig):
    """Which device, what is asked of it, and what the policy gets. Raises `ConfigError`."""

    device: int | str = 0
    """number, path as /dev/video2 or better /dev/v4l/by-id/..., or URL as rtsp://camera/1"""
    backend: Backend = "any"
    """any: V4L2 for devices, FFmpeg for URLs"""
    device_height: int = 0
    device_width: int = 0
    device_hz: float = 0.0
    """what the device is asked for; 0: as it is. What it gives is brought to height and width"""
    fourcc: str = ""
    """pixel format asked of the device: MJPG lets USB 2 carry large pictures"""
    rotation: Rotation = 0
    """degrees clockwise, for a camera that is mounted so"""
    latency_s: float = 0.0
    """from the light to the picture's arrival, if it was measured; pictures are stamped so much earlier"""

    def __post_init__(self) -> None:
        where = f"camera '{self.name}' (device {self.device!r})"
        if isinstance(self.device, str) and "://" not in self.device and Path(self.device).is_file():
            raise ConfigError(f"{where} is a file; use the camera 'video' with it as `path`.")
        if self.fourcc and len(self.fourcc) != 4:
            raise ConfigError(f"{where}: fourcc {self.fourcc!r} must be four letters, as MJPG.")
        if not 0 <= self.latency_s <= 2:
            raise ConfigError(f"{where}: latency_s {self.latency_s:g} is none; give 0 to 2.")


class OpenCvCamera(ThreadedCamera):
    """Keeps the `Camera` protocol."""

    def __init__(self, config: OpenCvConfig | None = None) -> None:
        """Only stores. Raises `ConfigError` for what no camera can be."""
        own = config or OpenCvConfig()
        super().__init__(own, f"device {own.device!r}", lambda: OpenCvDevice(own, self._what))


@dataclass(frozen=True, slots=True)
class VideoConfig(CameraConfig):
    """Which file, and what the policy gets of it. Raises `ConfigError`."""

    path: str
    loop: bool = True
    """False: the last picture stays"""
    speed: float = 1.0
    """of the file's own rate"""
    rotation: Rotation = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(f"camera '{self.name}' (video): path is empty; name a video file.")
        if not 0 < self.speed <= 100:
            raise ConfigError(f"camera '{self.name}' (video): speed {self.speed:g} is none; give above 0 to 100.")


class VideoCamera(ThreadedCamera):
    """Keeps the `Camera` protocol. Pictures are stamped when they are shown."""

    def __init__(self, config: VideoConfig) -> None:
        """Only stores. Raises `ConfigError` for what no camera can be."""
        super().__init__(config, f"video {config.path}", lambda: VideoDevice(config, self._what))


class _CvCapture:
    """What devices, streams and files share."""

    def __init__(self, where: str, rotation: Rotation, latency_s: float = 0.0) -> None:
        self._where, self._rotation, self._latency_s = where, rotation, latency_s
        self._video: Any = None
        self._pace = Pace(0.0)

    def close(self) -> None:
        if self._video is not None:
            self._video.release()
            self._video = None

    def _picture(self) -> tuple[int, np.ndarray]:
        """What was grabbed, when it is due."""
        self._pace.wait()
        time_ns = time.monotonic_ns() - round(self._latency_s * 1e9)
        found, image = self._video.retrieve()
        if not found:
            raise RobotError(f"{self._where} gave a picture that cannot be decoded; try another fourcc or file.")
        return time_ns, upright(image, self._rotation)


class OpenCvDevice(_CvCapture):
    """Keeps the `CaptureDevice` protocol for a device or stream."""

    def __init__(self, config: OpenCvConfig, where: str) -> None:
        super().__init__(where, config.rotation, config.latency_s)
        self._config = config

    def open(self) -> None:
        """Raises `RobotError` that says which devices there are."""
        config = self._config
        cv2 = import_cv2(self._where)
        device = int(config.device) if isinstance(config.device, str) and config.device.isdecimal() else config.device
        stream = isinstance(device, str) and "://" in device
        backend = config.backend if config.backend != "any" else ("ffmpeg" if stream else "v4l2")
        self._video = cv2.VideoCapture(device, getattr(cv2, f"CAP_{backend.upper()}"))
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


class VideoDevice(_CvCapture):
    """Keeps the `CaptureDevice` protocol for a file."""

    def __init__(self, config: VideoConfig, where: str) -> None:
        super().__init__(where, config.rotation)
        self._config = config

    def open(self) -> None:
        """Raises `RobotError` when there is no such file or it is no video."""
        self._begin()
        rate_hz = self._video.get(import_cv2(self._where).CAP_PROP_FPS)
        self._pace = Pace((rate_hz if rate_hz > 0 else self._config.rate_hz) * self._config.speed)

    def grab(self) -> tuple[int, np.ndarray] | None:
        """The next picture when it is due; None after the last one, unless it loops."""
        if not self._video.grab():
            if not self._config.loop:
                return None
            self._begin()
            self._video.grab()
        return self._picture()

    def _begin(self) -> None:
        cv2 = import_cv2(self._where)
        self.close()
        if not Path(self._config.path).is_file():
            raise RobotError(f"{self._where}: there is no such file. Check `path`.")
        self._video = cv2.VideoCapture(self._config.path, cv2.CAP_ANY)
        if not self._video.isOpened():
            raise RobotError(f"{self._where} is no video that OpenCV reads. Convert it to MP4 or AVI.")


class Pace:
    """Lets `wait` return at most `rate_hz` times a second, at a steady beat; 0: at once."""

    def __init__(self, rate_hz: float, clock: Clock | None = None) -> None:
        self._period_ns = round(1e9 / rate_hz) if rate_hz > 0 else 0
        self._clock = clock or MonotonicClock()
        self._due_ns = 0

    def wait(self) -> None:
        """Return when the next picture is due; who is late by more than a period begins a new beat."""
        now_ns = self._clock.now_ns()
        if now_ns > self._due_ns + self._period_ns:
            self._due_ns = now_ns
        self._clock.sleep_until(self._due_ns)
        self._due_ns += self._period_ns


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
