"""Cameras through OpenCV: real files and streams of real files; a stand-in where a device would be."""

from __future__ import annotations

import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from hal.cameras.opencv import OpenCvCamera, OpenCvConfig, Pace, VideoCamera, VideoConfig, upright
from hal.registry import CAMERAS, make_camera, read_config
from tests.hal.cameras.filming import pattern_number, threads, until, write_video
from wire.clock import ManualClock
from wire.errors import ConfigError, RobotError
from wire.types import Frame


def watch(camera: VideoCamera | OpenCvCamera, count: int) -> list[Frame]:
    """The next `count` different pictures."""
    frames = [camera.read()]
    while len(frames) < count:
        until(lambda: camera.read() is not frames[-1])
        frames.append(camera.read())
    return frames


@pytest.mark.parametrize("suffix", [".avi", ".mp4"])
def test_a_video_is_shown_at_its_own_rate_and_stays_at_its_end(tmp_path: Path, suffix: str) -> None:
    path = write_video(tmp_path / f"film{suffix}", 12, 40.0)
    camera = VideoCamera(VideoConfig(str(path), name="film", height=48, width=128, rate_hz=100.0, loop=False))
    camera.connect()
    until(lambda: not threads("film"))
    last = camera.read()
    assert pattern_number(last.image) == 12
    assert camera.read() is last
    camera.close()


def test_a_video_paces_itself(tmp_path: Path) -> None:
    path = write_video(tmp_path / "film.avi", 300, 50.0)
    camera = VideoCamera(VideoConfig(str(path), name="film", height=48, width=128, rate_hz=100.0))
    camera.connect()
    frames = watch(camera, 15)
    camera.close()
    numbers = [pattern_number(frame.image) for frame in frames]
    assert numbers == sorted(numbers)
    shown_s = (frames[-1].time_ns - frames[0].time_ns) / 1e9
    # as many as its rate shows in that time, or fewer on a busy machine, never more
    assert shown_s >= (numbers[-1] - numbers[0]) / 50.0 * 0.8


def test_a_video_goes_round(tmp_path: Path) -> None:
    path = write_video(tmp_path / "film.avi", 5, 200.0)
    camera = VideoCamera(VideoConfig(str(path), name="film", height=48, width=128, rate_hz=500.0, speed=2.0))
    camera.connect()
    rounds, before = 0, 0

    def twice_round() -> bool:
        nonlocal rounds, before
        number = pattern_number(camera.read().image)
        rounds += number < before
        before = number
        return rounds >= 2

    until(twice_round)
    camera.close()
    assert 1 <= before <= 5


def test_a_faster_video_gives_the_wanted_rate(tmp_path: Path) -> None:
    path = write_video(tmp_path / "film.avi", 300, 100.0)
    camera = VideoCamera(VideoConfig(str(path), name="film", height=48, width=128, rate_hz=25.0, loop=False))
    camera.connect()
    frames = watch(camera, 6)
    camera.close()
    assert (np.diff([pattern_number(frame.image) for frame in frames]) > 0).all()
    # one in four, or fewer when the machine is busy; half a period of jitter is allowed
    assert (frames[-1].time_ns - frames[0].time_ns) / 1e9 >= (5 - 0.5) / 25.0


def test_it_is_brought_to_the_wanted_size(tmp_path: Path) -> None:
    path = write_video(tmp_path / "film.avi", 3)
    for config, shape in (
        (VideoConfig(str(path), name="film", height=24, width=64, loop=False), (24, 64, 3)),
        (VideoConfig(str(path), name="film", height=32, width=32, fit="crop", loop=False), (32, 32, 3)),
        (VideoConfig(str(path), name="film", height=128, width=48, rotation=90, loop=False), (128, 48, 3)),
    ):
        camera = VideoCamera(config)
        camera.connect()
        image = camera.read().image
        assert image.shape == shape and image.dtype == np.uint8 and image.flags.c_contiguous
        camera.close()


def test_colours_are_red_green_blue(tmp_path: Path) -> None:
    writer = cv2.VideoWriter(str(tmp_path / "red.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 30, (32, 32))
    for _ in range(3):
        writer.write(np.full((32, 32, 3), (0, 0, 250), np.uint8))
    writer.release()
    camera = VideoCamera(VideoConfig(str(tmp_path / "red.avi"), name="film", height=32, width=32))
    camera.connect()
    red, green, blue = camera.read().image.reshape(-1, 3).mean(0)
    camera.close()
    assert red > 200 > 60 > max(green, blue)


def test_a_file_that_is_no_video_is_named(tmp_path: Path) -> None:
    with pytest.raises(RobotError, match=r"none.avi\): there is no such file"):
        VideoCamera(VideoConfig(str(tmp_path / "none.avi"))).connect()
    (tmp_path / "text.mp4").write_text("not a video")
    with pytest.raises(RobotError, match="is no video that OpenCV reads"):
        VideoCamera(VideoConfig(str(tmp_path / "text.mp4"))).connect()
    for fields, message in (({"path": ""}, "path is empty"), ({"path": "x", "speed": 0.0}, "speed 0 is none")):
        with pytest.raises(ConfigError, match=message):
            VideoConfig(**fields)  # type: ignore[arg-type]


# --- devices and streams ----------------------------------------------------------------------------------------------


def test_a_stream_that_ends_is_opened_again(tmp_path: Path) -> None:
    path = write_video(tmp_path / "film.avi", 6, 100.0)
    size = {"height": 48, "width": 128, "rate_hz": 200.0}
    camera = OpenCvCamera(OpenCvConfig(f"file://{path}", name="door", stall_timeout_s=5.0, **size))
    camera.connect()
    numbers: list[int] = []

    def twice() -> bool:
        numbers.append(pattern_number(camera.read().image))
        return numbers.index(6) < len(numbers) - 1 and numbers[-1] < 6 if 6 in numbers else False

    until(twice)
    camera.close()
    assert set(numbers) <= set(range(1, 7))


def test_what_cannot_be_opened_says_what_there_is() -> None:
    with pytest.raises(RobotError, match=r"device '/dev/video77'\) cannot be opened with v4l2\. There are: .*adduser"):
        OpenCvCamera(OpenCvConfig("/dev/video77")).connect()
    with pytest.raises(RobotError, match=r"cannot be opened with ffmpeg\. Check the address"):
        OpenCvCamera(OpenCvConfig("file:///no/such/film.mp4")).connect()


class Usb:
    """As much of cv2.VideoCapture as a driver uses, with a cable."""

    plugged = True
    made: list[Usb] = []  # noqa: RUF012

    def __init__(self, device: object, backend: int) -> None:
        self.device, self.backend = device, backend
        self.asked: dict[int, float] = {}
        self.released = False
        Usb.made.append(self)

    def isOpened(self) -> bool:
        return Usb.plugged

    def set(self, what: int, value: float) -> bool:
        self.asked[what] = value
        return True

    def get(self, what: int) -> float:
        return -1.0 if what == cv2.CAP_PROP_FRAME_COUNT else 30.0

    def grab(self) -> bool:
        time.sleep(0.005)
        return Usb.plugged

    def retrieve(self) -> tuple[bool, np.ndarray]:
        return True, np.full((60, 80, 3), (10, 20, 30), np.uint8)

    def release(self) -> None:
        self.released = True


@pytest.fixture
def usb(monkeypatch: pytest.MonkeyPatch) -> type[Usb]:
    monkeypatch.setattr(cv2, "VideoCapture", Usb)
    Usb.plugged, Usb.made = True, []
    return Usb


def test_a_device_is_opened_as_it_was_asked_for(usb: type[Usb]) -> None:
    config = {"device": "2", "name": "wrist", "height": 30, "width": 40, "fourcc": "MJPG", "device_hz": 60}
    config |= {"device_height": 60, "device_width": 80, "latency_s": 0.02, "preview_height": 45, "preview_width": 60}
    camera = make_camera("opencv", read_config("opencv", config, CAMERAS))
    camera.connect()
    frame = camera.read()
    camera.close()
    (device,) = usb.made
    assert (device.device, device.backend, device.released) == (2, cv2.CAP_V4L2, True)
    assert device.asked[cv2.CAP_PROP_FOURCC] == cv2.VideoWriter.fourcc(*"MJPG")
    assert device.asked[cv2.CAP_PROP_FRAME_WIDTH] == 80 and device.asked[cv2.CAP_PROP_BUFFERSIZE] == 1
    assert frame.preview is not None and frame.preview.shape == (45, 60, 3)
    assert frame.image.shape == (30, 40, 3) and frame.image[0, 0].tolist() == [30, 20, 10]
    assert time.monotonic_ns() - frame.time_ns >= 20_000_000


def test_a_device_is_opened_by_the_backend_that_is_named(usb: type[Usb]) -> None:
    for backend in ("any", "v4l2", "ffmpeg", "gstreamer"):
        camera = make_camera("opencv", read_config("opencv", {"device": "csi", "backend": backend}, CAMERAS))
        camera.connect()
        camera.close()
    assert [d.backend for d in usb.made] == [cv2.CAP_V4L2, cv2.CAP_V4L2, cv2.CAP_FFMPEG, cv2.CAP_GSTREAMER]


def test_a_device_that_is_pulled_out_and_put_in_again(usb: type[Usb]) -> None:
    camera = OpenCvCamera(OpenCvConfig(0, name="wrist", height=30, width=40, rate_hz=200.0, stall_timeout_s=0.2))
    camera.connect()
    usb.plugged = False

    def failed() -> str:
        try:
            camera.read()
        except RobotError as error:
            return str(error)
        return ""

    until(lambda: bool(failed()))
    assert "camera 'wrist' (device 0)" in failed()
    until(lambda: "cannot be opened" in failed())
    usb.plugged = True
    until(lambda: not failed())
    camera.close()
    assert all(device.released for device in usb.made) and len(usb.made) >= 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fourcc": "MJPEG"}, "must be four letters"),
        ({"latency_s": -1.0}, "latency_s -1"),
        ({"stall_timeout_s": 0.0}, "must be above 0"),
        ({"device": __file__}, "is a file; use the camera 'video'"),
    ],
)
def test_what_cannot_be_asked_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenCvCamera(OpenCvConfig(**fields))


def test_the_pace_is_steady_and_does_not_catch_up() -> None:
    clock, slept = ManualClock(), []

    class Watched:
        now_ns = clock.now_ns

        def sleep_until(self, deadline_ns: int) -> None:
            slept.append(deadline_ns > clock.now_ns())
            clock.sleep_until(deadline_ns)

    pace = Pace(10.0, Watched())
    shown = []
    for late_s in (0.0, 0.03, 0.03, 0.5, 0.0, 0.0):
        clock.advance(round(late_s * 1e9))
        pace.wait()
        shown.append(clock.now_ns() / 1e9)
    assert shown == [0.0, 0.1, 0.2, 0.7, 0.8, 0.9]
    assert sum(slept) == 4


def test_a_camera_that_hangs_upside_down_is_turned() -> None:
    image = np.zeros((2, 3, 3), np.uint8)
    image[0, 0] = (1, 2, 3)
    assert upright(image, 180)[1, 2].tolist() == [3, 2, 1]
    assert upright(image, 90).shape == (3, 2, 3) and upright(image, 90)[0, 1].tolist() == [3, 2, 1]
