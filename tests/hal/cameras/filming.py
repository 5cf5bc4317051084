"""Real video files whose pictures say their number, and patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from hal.cameras.simulated import pattern


def write_video(path: Path, count: int, rate_hz: float = 30.0, height: int = 48, width: int = 128) -> Path:
    """A video of the pattern's pictures 1 to `count`, in the format its suffix says."""
    fourcc = cv2.VideoWriter.fourcc(*("MJPG" if path.suffix == ".avi" else "mp4v"))
    writer = cv2.VideoWriter(str(path), fourcc, rate_hz, (width, height))
    assert writer.isOpened()
    for number in range(1, count + 1):
        writer.write(np.ascontiguousarray(pattern(height, width, number)[:, :, ::-1]))
    writer.release()
    return path


def pattern_number(image: np.ndarray) -> int:
    """Which picture of a pattern this is, modulo 65,536; also after JPEG or when it was shrunk."""
    side = image.shape[1] // 16
    row = image[max(1, image.shape[0] // 16) // 2, side // 2 :: side, :].mean(1)[:16]
    return int(sum(1 << bit for bit, value in enumerate(row) if value > 127))


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return when it holds; fails when that takes too long."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.002)


def threads(name: str) -> list[threading.Thread]:
    """The capture threads of a camera."""
    return [thread for thread in threading.enumerate() if thread.name == f"camera-{name}"]
