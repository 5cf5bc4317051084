"""lerobot's cameras read beside the control loop.

A robot of lerobot reads its cameras inside `get_observation`; some wait there for the next picture. Here each camera of
a robot is replaced by one that a thread keeps reading, and that answers at once with the newest picture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hal.drivers.lerobot.spec import parts
from wire.errors import RobotError
from wire.types import Frame

_FIRST_S = 5.0
_WAIT_MS = 1000.0
_RECENT = 4
"""frames remembered: a newer one may come between a robot's reading and ours"""


class NewestCamera:
    """Stands in for a lerobot camera: any of its ways to read gives the newest picture, without waiting."""

    def __init__(self, name: str, camera: Any, now_ns: Callable[[], int]) -> None:
        self.name = name
        self.frame: Frame | None = None
        """as captured, RGB"""
        self.fault = ""
        """why the last reading failed, '' when it did not"""
        self._recent: deque[Frame] = deque(maxlen=_RECENT)
        self._camera = camera
        self._now_ns = now_ns
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._swap = str(getattr(camera, "color_mode", "rgb")).lower().endswith("bgr")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._camera, name)  # height, width, fps, is_connected, ...

    def connect(self, *arguments: Any, **options: Any) -> None:
        """Open the camera and wait for its first picture. Raises `RobotError` when none comes."""
        self._camera.connect(*arguments, **options)
        self._stop.clear()
        self._thread = threading.Thread(target=self._read_on, name=f"camera-{self.name}", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _FIRST_S
        while self.frame is None:
            if time.monotonic() > deadline:
                raise RobotError(
                    f"camera '{self.name}' gave no picture in {_FIRST_S:g} s: {self.fault or 'it is silent'}. "
                    "Check its cable and that no other program uses it."
                )
            self._stop.wait(0.005)

    def read(self, *arguments: Any, **options: Any) -> np.ndarray:
        """uint8[height, width, 3], RGB."""
        if self.frame is None:
            raise RobotError(f"camera '{self.name}' is read before it is connected.")
        return self.frame.image

    async_read = read_latest = read

    def disconnect(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_WAIT_MS / 1e3 + 1)
            self._thread = None
        self.frame = None
        if self._camera.is_connected:
            self._camera.disconnect()

    def _read_on(self) -> None:
        while not self._stop.is_set():
            try:
                image = self._camera.async_read(timeout_ms=_WAIT_MS)
            except Exception as error:  # noqa: BLE001 - a camera may fail in any way; the loop sees its picture age
                self.fault = f"{type(error).__name__}: {error}"
                self._stop.wait(0.05)
                continue
            image = np.ascontiguousarray(image[..., ::-1] if self._swap else image)
            frame = Frame(self._now_ns(), image)
            self._recent.append(frame)
            self.frame, self.fault = frame, ""

    def captured_ns(self, image: np.ndarray) -> int | None:
        """When `image`, this very array, was captured; None when it is not of this camera."""
        return next((frame.time_ns for frame in tuple(self._recent) if frame.image is image), None)


def detach_cameras(robot: Any, now_ns: Callable[[], int]) -> list[NewestCamera]:
    """Put a `NewestCamera` in the place of each camera of lerobot's `robot` and of its arms."""
    placed: dict[int, NewestCamera] = {}
    for _, part in parts(robot):
        cameras = getattr(part, "cameras", None)
        if not isinstance(cameras, dict):
            continue
        for name, camera in cameras.items():
            placed.setdefault(id(camera), NewestCamera(name, camera, now_ns))
            cameras[name] = placed[id(camera)]
    return list(placed.values())


class GrabbedPictures:
    """Frames with their times for the pictures in an observation of lerobot."""

    def __init__(self, sizes: dict[str, tuple[int, int]], cameras: list[NewestCamera]) -> None:
        """`sizes`: (height, width) by name, as the spec says."""
        self._sizes = sizes
        self._cameras = cameras
        self._last: dict[str, tuple[np.ndarray, Frame]] = {}

    def frames(self, observation: dict[str, Any], time_ns: int) -> dict[str, Frame]:
        """By name. Raises `RobotError` for a picture that is missing or of another kind."""
        return {name: self._frame(name, observation.get(name), time_ns) for name in self._sizes}

    def _frame(self, name: str, image: Any, time_ns: int) -> Frame:
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            got = f"{image.dtype}{list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
            raise RobotError(f"camera '{name}' gave {got} instead of uint8[height, width, 3]. Check its configuration.")
        seen = self._last.get(name)
        if seen is not None and seen[0] is image:
            return seen[1]
        # The picture itself says which camera it is from: names differ where a robot is made of two arms.
        taken = next((t for t in (camera.captured_ns(image) for camera in self._cameras) if t is not None), None)
        if taken is None and seen is not None and np.array_equal(seen[0], image):
            return seen[1]
        frame = self._fit(name, image, time_ns if taken is None else taken)
        self._last[name] = (image, frame)
        return frame

    def _fit(self, name: str, image: np.ndarray, time_ns: int) -> Frame:
        height, width = self._sizes[name]
        if image.shape[:2] == (height, width):
            return Frame(time_ns, image)
        import cv2

        return Frame(time_ns, cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), image)
