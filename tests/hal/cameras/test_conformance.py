"""The camera suite passes what keeps the rules and names what does not."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from hal.cameras.conformance import check_camera
from hal.cameras.opencv import VideoCamera, VideoConfig
from hal.cameras.simulated import PatternCamera, PatternConfig, SceneCamera, SceneConfig
from tests.hal.cameras.filming import write_video
from wire.errors import RobotError
from wire.types import CameraSpec, Frame


@pytest.mark.parametrize("kind", ["pattern", "video", "scene"])
def test_our_cameras_keep_the_rules(kind: str, tmp_path: Path) -> None:
    film = write_video(tmp_path / "film.avi", 60, 60.0)
    make = {
        "pattern": lambda: PatternCamera(PatternConfig(height=32, width=64)),
        "video": lambda: VideoCamera(VideoConfig(str(film), name="film", height=32, width=64, rate_hz=60.0)),
        "scene": lambda: SceneCamera(SceneConfig("fake", {"image_px": 32})),
    }[kind]
    report = check_camera(make, seconds=0.6)
    # how long a read takes is the machine's business here
    assert [name for name in report.failed if name != "read p99"] == [], str(report)
    assert len(report.checks) == 5 and {figure.name for figure in report.figures} >= {"read p99", "rate"}


class Wrong:
    """A camera with one fault."""

    spec = CameraSpec("eye", 4, 4, 50.0)

    def __init__(self, fault: str = "") -> None:
        self.fault, self.open, self.count = fault, False, 0
        self.image = np.zeros((4, 4, 3), np.uint8)

    def connect(self) -> None:
        self.open = True

    def read(self) -> Frame:
        if not self.open and self.fault != "always":
            raise RobotError("call connect() first.")
        self.count += 1
        now = time.monotonic_ns()
        if self.fault == "shape":
            return Frame(now, np.zeros((5, 4, 3), np.uint8))
        if self.fault == "future":
            return Frame(now + 10**9, self.image.copy())
        if self.fault == "back":
            return Frame(now - self.count * 10**9, self.image.copy())
        if self.fault == "frozen":
            return Frame(7, self.image.copy())
        if self.fault == "overwritten":
            return Frame(7, np.full((4, 4, 3), self.count % 256, np.uint8))
        if self.fault == "raises":
            raise ValueError("bus")
        return Frame(now // 20_000_000 * 20_000_000, self.image.copy())

    def close(self) -> None:
        self.open = False


@pytest.mark.parametrize(
    ("fault", "rule", "words"),
    [
        ("always", "unready_is_refused", "before connect"),
        ("shape", "pictures", "uint8[5, 4, 3]; the spec says uint8[4, 4, 3]"),
        ("future", "pictures", "from the future"),
        ("back", "pictures", "older than the one before"),
        ("frozen", "pictures", "stands still"),
        ("overwritten", "pictures", "its own memory"),
        ("raises", "pictures", "raised ValueError: bus"),
    ],
)
def test_each_fault_fails_the_right_check(fault: str, rule: str, words: str) -> None:
    report = check_camera(lambda: Wrong(fault), seconds=0.1)
    assert words in {check.name: check.message for check in report.checks}[rule]
    assert not report.passed


def test_a_camera_without_a_fault_passes_and_one_that_is_too_fast_does_not() -> None:
    assert check_camera(Wrong, seconds=0.2).failed in ((), ("read p99",))

    class Eager(Wrong):
        def read(self) -> Frame:
            frame = super().read()
            return Frame(time.monotonic_ns(), frame.image)

    class Slow(Eager):
        spec = CameraSpec("eye", 4, 4, 5.0)

    assert "rate" in check_camera(Slow, seconds=0.2).failed


def test_what_is_no_camera_is_named() -> None:
    report = check_camera(lambda: object(), seconds=0.1)  # type: ignore[arg-type,return-value]
    assert "lacks a method of hal.interfaces.camera.Camera" in report.checks[0].message
