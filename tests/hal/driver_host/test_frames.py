"""A hosted robot's pictures: whoever dies, each one is what was put in under its number, or refused."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.driver_host.protocol import FrameReader, FrameWriter
from hal.driver_host.proxy import RobotProxy
from hal.drivers.fake import FakeConfig, FakeRobot, fake_spec
from tests.hal.driver_host.hosting import HZ, LARGE
from tests.hal.driver_host.test_proxy import hosted, place  # noqa: F401 - a fixture
from wire.errors import RobotError
from wire.transport.frame_ring import FrameRing, SharedFrame, ring_path
from wire.types import Frame, Observation, RobotSpec

CONFIG = FakeConfig(control_hz=HZ, image_px=16, preview_px=24)
SLOW = fake_spec(FakeConfig(control_hz=HZ, camera_every_ticks=25, image_px=8))
SLOTS, PREVIEW_SLOTS = 4, 3
"""of `SLOW`, whose camera gives 2 frames a second"""


class World:
    """Host, control and inference of one robot, each of which may die; what was put in is remembered."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "robot"
        self.written: dict[int, bytes] = {}
        self.previews: dict[int, bytes] = {}
        self.newest = 0
        """also a number that was begun only"""
        self.held: list[tuple[SharedFrame, int, int]] = []
        """(frame, its number, its preview's)"""
        self.asked: deque[int] = deque()
        self.count = 0
        self.frame = self._film()
        self.host = FrameWriter(self.socket, SLOW)
        self.control = FrameReader(self.socket, SLOW)
        self.inference = self._ring()

    def do(self, what: str) -> None:
        """One event, by its name; then everything that anybody still holds is looked at."""
        getattr(self, what)()
        newest_preview = max(self.previews, default=0)
        for frame, number, preview in self.held:
            there = number + SLOTS > self.newest and (not preview or preview + PREVIEW_SLOTS > newest_preview)
            assert frame.intact == there
            if there:
                assert frame.image.tobytes() == self.written[number]
                assert frame.preview is None or frame.preview.tobytes() == self.previews[preview]

    def film(self) -> None:
        self.frame = self._film()

    def film_with_a_preview(self) -> None:
        self.frame = Frame(self.count, self._film().image, self._picture(24))

    def another_clock(self) -> None:
        """A driver that begins anew stamps another picture with the same time."""
        self.frame = Frame(self.frame.time_ns, self._film().image)

    def read(self) -> None:
        views = self._show()
        seen = self.control.read(views)["front"]
        assert isinstance(seen, SharedFrame)
        assert seen.image.tobytes() == self.frame.image.tobytes()
        assert seen.time_ns == self.frame.time_ns
        assert (seen.preview is None) == (self.frame.preview is None)
        assert self.control.read(views)["front"] is seen
        self.held.append((seen, views["front"].number, views["front"].preview))

    def nobody_reads_the_reply(self) -> None:
        self._show()

    def ask(self) -> None:
        self.asked.append(self._show()["front"].number)

    def infer(self) -> None:
        """With what was asked for some time ago."""
        if not self.asked:
            return
        number = self.asked.popleft()
        seen = self.inference.view("front", number)
        assert (seen is not None) == (number + SLOTS > self.newest)
        if seen is not None:
            assert seen.image.tobytes() == self.written[number]
            self.held.append((seen, number, 0))

    def host_dies(self) -> None:
        self.host = FrameWriter(self.socket, SLOW)

    def host_dies_in_the_middle(self) -> None:
        ring = self.host._ring
        self.newest = ring._last["front"][0] + 1
        camera, slots, start = ring._cameras["front"]
        at = start + self.newest % slots * (64 + 192)
        ring._words[at // 8] = 2 * self.newest - 1
        ring._words[at // 8 + 1] = 99
        ring._pixels(camera, at)[:4] = 77
        self.host_dies()

    def control_dies(self) -> None:
        self.control = FrameReader(self.socket, SLOW)

    def inference_dies(self) -> None:
        self.inference = self._ring()

    def _show(self) -> dict:
        views = self.host.write({"front": self.frame})
        view = views["front"]
        image = self.frame.image.tobytes()
        assert self.written.setdefault(view.number, image) == image, "no number means two frames"
        if self.frame.preview is not None:
            preview = self.frame.preview.tobytes()
            assert self.previews.setdefault(view.preview, preview) == preview
        self.newest = max(self.newest, view.number)
        return views

    def _film(self) -> Frame:
        self.count += 1
        return Frame(self.count, self._picture(8))

    def _picture(self, size: int) -> np.ndarray:
        return np.random.default_rng(self.count).integers(0, 255, (size, size, 3), np.uint8)

    def _ring(self) -> FrameRing:
        return FrameRing(ring_path(self.socket, SLOW), SLOW, write=False)


EVENTS = [name for name in vars(World) if not name.startswith("_") and name != "do"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([*EVENTS, "film", "film", "read", "read", "ask"]), max_size=60))
def test_whatever_happens_in_whatever_order_no_picture_is_taken_for_another(events: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        for event in events:
            world.do(event)


def test_a_number_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    writer, reader = (side(tmp_path / "robot", SLOW) for side in (FrameWriter, FrameReader))
    views = writer.write({"front": Frame(1, np.zeros((8, 8, 3), np.uint8))})
    gone = {"front": msgspec.structs.replace(views["front"], number=7)}
    with pytest.raises(RobotError, match=r"'fake-point': frame 7 of camera 'front' is not in the memory"):
        reader.read(gone)
    assert reader.read(views)["front"].time_ns == 1


# --- previews -------------------------------------------------------------------------------------------------------


class Previewing(FakeRobot):
    """Gives the larger picture it is told to."""

    preview: object = None

    def read(self) -> Observation:
        seen = super().read()
        image = seen.images["front"].image
        frame = Frame(seen.time_ns, image, self.preview)  # type: ignore[arg-type]
        return Observation(seen.time_ns, seen.state, {"front": frame}, seen.task)


def test_larger_pictures_that_cannot_be_shown_are_left_out_and_the_robot_goes_on(
    place: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Previewing(CONFIG)
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)

        def shown(preview: object) -> np.ndarray | None:
            driver.preview = preview
            frame = robot.read().images["front"]
            assert frame.image.shape == (16, 16, 3)
            return frame.preview

        with caplog.at_level(logging.WARNING):
            for odd in ("a picture", np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)):
                assert shown(odd) is None
            assert caplog.text.count("larger pictures are left out") == 1, "it is said once"
            for colour in (1, 2, 3, 4, 5):
                larger = shown(np.full((40, 60, 3), colour, np.uint8))
                assert larger is not None
                assert (larger == colour).all()
            # The first one says what shape they have.
            assert shown(np.zeros((80, 60, 3), np.uint8)) is None
            assert shown(np.zeros((40, 60, 3), np.float32)) is None
        assert "camera 'front': uint8[80, 60, 3], expected uint8[40, 60, 3]" in caplog.text
        assert caplog.text.count("larger pictures are left out") == 2
        assert shown(None) is None
        assert shown(np.full((40, 60, 3), 9, np.uint8)) is not None
    assert len(list(place.parent.glob("*.frames"))) == 2, "one file for the images, one for the larger pictures"


# --- kill -9 --------------------------------------------------------------------------------------------------------


def test_a_host_killed_in_the_middle_of_a_frame(place: Path) -> None:  # noqa: F811
    """Each frame of `hosting.Painter` has one colour, which its time tells; frames that were seen stay as they are."""
    spec: RobotSpec = LARGE
    robot = RobotProxy(spec, place, attach_s=60.0)
    rng = random.Random(0)
    numbers, kept = [0], []
    for _ in range(3):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", "tests.hal.driver_host.hosting", "paint", str(place)]
        host = subprocess.Popen(argv, cwd=Path(__file__).resolve().parents[3], env=environment)
        try:
            robot.connect()
            robot.reset("any", 1)
            until = time.monotonic() + rng.uniform(0.1, 0.2)
            while True:
                if time.monotonic() > until:
                    host.send_signal(signal.SIGKILL)
                frame = robot.read().images["front"]
                assert isinstance(frame, SharedFrame)
                assert frame.image.min() == frame.image.max() == frame.time_ns % 256
                assert frame.slots[0].number > numbers[-1], "no number comes twice"
                numbers.append(frame.slots[0].number)
                kept.append(frame)
        except RobotError as error:
            assert host.wait(60) == -signal.SIGKILL, error
        finally:
            host.kill()
            host.wait(60)
        # The oldest of these has the place of the one that was being written.
        for frame in kept[-12:]:
            assert not frame.intact or frame.image.min() == frame.image.max() == frame.time_ns % 256
        assert kept[-1].intact, "it is there though the one who put it in is dead"
    assert len(numbers) > 10
    robot.close()
