"""The thread behind every camera, with a device whose every picture the test decides."""

from __future__ import annotations

import queue
import time
from dataclasses import replace

import numpy as np
import pytest

from hal.cameras.capture import CameraConfig, ThreadedCamera
from hal.cameras.simulated import PatternCamera, PatternConfig, SceneCamera, SceneConfig
from hal.drivers.fake import FakeRobot
from hal.interfaces.camera import Camera
from hal.registry import CAMERAS, known, make_camera, read_config
from tests.hal.cameras.filming import pattern_number, threads, until
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec

EYE = CameraConfig(name="eye", height=8, width=8, rate_hz=20.0)


class Device:
    """Gives what is put into it: a picture's time, an exception, or None for the end."""

    def __init__(self) -> None:
        self.given: queue.Queue = queue.Queue()
        self.opened = self.closed = self.taken = 0

    def open(self) -> None:
        self.opened += 1

    def grab(self):
        item = self.given.get()
        self.taken += 1
        if isinstance(item, Exception):
            raise item
        return None if item is None else (item, np.full((8, 8, 3), self.taken % 256, np.uint8))

    def close(self) -> None:
        self.closed += 1


def capture(device: Device, **options: float) -> ThreadedCamera:
    config = replace(EYE, **{"stall_timeout_s": 60.0, "first_frame_timeout_s": 30.0, **options})
    return ThreadedCamera(config, "port 7", lambda: device)


def test_a_camera_keeps_the_newest_picture_and_gives_it_again() -> None:
    device = Device()
    camera = capture(device)
    assert isinstance(camera, Camera)
    with pytest.raises(RobotError, match=r"camera 'eye' \(port 7\): read before connect"):
        camera.read()
    device.given.put(time.monotonic_ns())
    camera.connect()
    camera.connect()
    first = camera.read()
    assert camera.read() is first and first.image[0, 0, 0] == 1
    device.given.put(time.monotonic_ns() + 10**9)
    until(lambda: camera.read() is not first)
    assert camera.read().time_ns > first.time_ns and device.opened == 1
    device.given.put(None)
    camera.close()
    camera.close()
    until(lambda: not threads("eye"))
    assert device.closed == 1


@pytest.mark.parametrize(
    ("device_hz", "expected"), [(20.0, 60), (19.0, 60), (60.0, 20), (30.0, 40), (24.0, 50), (5.0, 60)]
)
def test_pictures_that_come_too_fast_are_left_out_evenly(device_hz: float, expected: int) -> None:
    """60 pictures, with a jitter of 5 ms: those of a slower or equal device are all kept."""
    device, rng = Device(), np.random.default_rng(0)
    start = time.monotonic_ns()
    times = [start + round(k * 1e9 / device_hz) + int(rng.integers(-5_000_000, 5_000_000)) for k in range(60)]
    kept: list[int] = []

    class Counting(ThreadedCamera):
        def _keep(self, frame) -> None:
            kept.append(frame.time_ns)
            super()._keep(frame)

    watched = Counting(EYE, "port 7", lambda: device)
    for time_ns in [*times, None]:
        device.given.put(time_ns)
    watched.connect()
    until(lambda: device.taken == 61)
    until(lambda: not threads("eye"))
    assert abs(len(kept) - expected) <= 1
    assert kept == sorted(kept)


def test_a_device_that_was_unplugged_is_named_and_found_again() -> None:
    device = Device()
    watched = capture(device, stall_timeout_s=0.2)
    device.given.put(time.monotonic_ns())
    watched.connect()
    device.given.put(RobotError("camera 'eye' (port 7) was unplugged. Plug it in again."))

    def failed() -> str:
        try:
            watched.read()
        except RobotError as error:
            return str(error)
        return ""

    until(lambda: bool(failed()))
    assert "(port 7) was unplugged. Plug it in again. Its last picture came" in failed()
    device.given.put(time.monotonic_ns())

    def well() -> bool:
        # a busy machine may need longer than the patience to look
        device.given.put(time.monotonic_ns())
        return not failed()

    until(well)
    assert device.opened == 2
    device.given.put(None)
    watched.close()


def test_a_device_that_stands_still_is_named() -> None:
    device = Device()
    watched = capture(device, stall_timeout_s=0.2)
    device.given.put(time.monotonic_ns())
    watched.connect()
    time.sleep(0.25)
    with pytest.raises(RobotError, match=r"camera 'eye' \(port 7\) stands still\. Check its cable and power"):
        watched.read()

    def well() -> bool:
        device.given.put(time.monotonic_ns())
        try:
            return watched.read().image[0, 0, 0] > 1
        except RobotError:
            return False

    until(well)
    device.given.put(None)
    watched.close()


def test_a_recording_that_ends_keeps_its_last_picture() -> None:
    device = Device()
    watched = capture(device, stall_timeout_s=0.05)
    device.given.put(time.monotonic_ns())
    device.given.put(None)
    watched.connect()
    until(lambda: not threads("eye"))
    time.sleep(0.1)
    assert watched.read().image[0, 0, 0] == 1
    watched.close()


def test_connecting_says_why_it_failed_and_leaves_no_thread() -> None:
    device = Device()
    device.given.put(RobotError("camera 'eye' (port 7): no such port. There are: 1, 2."))
    watched = capture(device)
    with pytest.raises(RobotError, match="There are: 1, 2"):
        watched.connect()
    until(lambda: not threads("eye"))
    device.given.put(OSError("bus error"))
    with pytest.raises(RobotError, match=r"\(port 7\): OSError: bus error"):
        watched.connect()
    silent = Device()
    watched = capture(silent, first_frame_timeout_s=0.05)
    with pytest.raises(RobotError, match=r"gave no picture within 0\.05 s\. Check its cable"):
        watched.connect()
    silent.given.put(None)
    until(lambda: not threads("eye"))


def test_a_thread_that_is_stuck_does_not_hold_up_the_next_one() -> None:
    devices = [Device(), Device()]
    watched = ThreadedCamera(EYE, "port 7", lambda: devices[made()])
    count = iter(range(2))

    def made() -> int:
        return next(count)

    devices[0].given.put(time.monotonic_ns())
    watched.connect()
    watched.close()  # the first device never answers
    assert len(threads("eye")) == 1
    devices[1].given.put(time.monotonic_ns())
    watched.connect()
    own = watched._newest
    devices[0].given.put(time.monotonic_ns() + 10**9)  # now it does, too late
    until(lambda: devices[0].closed == 1)
    assert own is not None and watched._newest is own
    devices[1].given.put(None)
    watched.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"height": 0}, "height 0 and width 8"),
        ({"rate_hz": 0.0}, "rate_hz 0 is none"),
        ({"preview_height": 9}, r"preview of \(9, 0\): give two sides"),
    ],
)
def test_what_no_camera_can_be_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ThreadedCamera(replace(EYE, **wrong), "port 7", Device)


# --- cameras without hardware -----------------------------------------------------------------------------------------


def test_the_registry_knows_them() -> None:
    assert {"opencv", "pattern", "scene", "video"} <= set(known(CAMERAS))
    camera = make_camera("pattern", read_config("pattern", {"name": "top", "height": 32, "width": 64}, CAMERAS))
    assert camera.spec == CameraSpec("top", 32, 64, 30.0)
    for kind in ("video", "scene"):
        with pytest.raises(ConfigError, match="needs a configuration"):
            make_camera(kind)


def test_a_pattern_counts_its_pictures() -> None:
    camera = PatternCamera(PatternConfig(height=32, width=64, rate_hz=200.0, stall_timeout_s=60.0))
    camera.connect()
    first = pattern_number(camera.read().image)
    until(lambda: pattern_number(camera.read().image) >= first + 5)
    assert camera.read().time_ns <= time.monotonic_ns()
    camera.close()


def test_a_pattern_that_is_unplugged_comes_back() -> None:
    config = PatternConfig(height=32, width=64, rate_hz=200.0, unplugged_after=3, back_after_s=0.3, stall_timeout_s=0.1)
    camera = PatternCamera(config)
    camera.connect()
    wrong: list[str] = []

    def number() -> int:
        try:
            return pattern_number(camera.read().image)
        except RobotError as error:
            wrong.append(str(error))
            return 0

    until(lambda: number() > 6)
    assert wrong and "unplugged. Plug it in." in wrong[-1]
    camera.close()


def test_a_pattern_that_stands_still_is_found_out() -> None:
    config = PatternConfig(height=32, width=64, rate_hz=200.0, still_after=2, back_after_s=0.01, stall_timeout_s=0.1)
    camera = PatternCamera(config)
    camera.connect()

    def failed() -> bool:
        try:
            camera.read()
        except RobotError as error:
            return "gives no picture any more. Check its cable" in str(error)
        return False

    until(failed)
    camera.close()
    with pytest.raises(ConfigError, match="it needs 2 rows"):
        PatternCamera(PatternConfig(width=8))


def test_a_scene_shows_a_simulated_robots_camera() -> None:
    camera = SceneCamera(SceneConfig("fake", {"image_px": 32}, "go-up", 3, name="side", height=16, width=16))
    assert camera.spec == CameraSpec("side", 16, 16, FakeRobot().spec.cameras[0].rate_hz)
    camera.connect()
    first = camera.read()
    assert first.image.shape == (16, 16, 3) and first.image[:, :, 1].max() > 100  # the goal
    until(lambda: camera.read().time_ns > first.time_ns)
    camera.close()
    with pytest.raises(ConfigError, match="has no camera 'back'; it has front"):
        SceneCamera(SceneConfig("fake", camera="back"))
    with pytest.raises(RobotError, match="no task 'fly'"):
        SceneCamera(SceneConfig("fake", task="fly")).connect()
