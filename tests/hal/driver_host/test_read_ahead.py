"""A reading that is expected comes by itself, and is never older than one that is asked for."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot
from hal.interfaces.robot import Feedback
from tests.hal.driver_host.test_proxy import hosted
from wire.errors import RobotError
from wire.types import Observation

# An eighth of a period, within which a reading that came by itself counts, is long enough for any machine.
CONFIG = FakeConfig(control_hz=0.02, image_px=16, preview_px=24)
HOUR_NS = 3_600_000_000_000
STILL = np.zeros(4, np.float32)


class Counted(FakeRobot):
    """Notes when it is read."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.read_ns: list[int] = []
        self.broken = self.refuses = False

    def write(self, action: np.ndarray) -> Feedback:
        if self.refuses:
            raise RobotError("the arm refuses")
        return super().write(action)

    def read(self) -> Observation:
        self.read_ns.append(time.monotonic_ns())
        if self.broken:
            raise RobotError("the arm does not answer")
        return super().read()


@pytest.fixture()
def place() -> Iterator[Path]:
    """A short path: those of tmp_path may be too long for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="host-"))
    yield directory / "socket"
    shutil.rmtree(directory)


def until_read(driver: Counted, times: int) -> None:
    deadline = time.monotonic() + 60
    while len(driver.read_ns) < times:
        assert time.monotonic() < deadline, f"read {len(driver.read_ns)} times, not {times}"
        time.sleep(0.002)


def test_it_comes_when_its_time_has_come_and_is_not_asked_for(place: Path) -> None:
    driver = Counted()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.read()
        at_ns = time.monotonic_ns() + 30_000_000
        robot.expect_read(at_ns)
        robot.write(STILL)
        until_read(driver, 2)
        assert driver.read_ns[1] >= at_ns
        assert robot.read().time_ns >= at_ns
        assert len(driver.read_ns) == 2
        robot.read()
        assert len(driver.read_ns) == 3, "the next one was not expected"


@pytest.mark.parametrize("off_ns", [HOUR_NS, -HOUR_NS])
def test_before_its_time_and_long_after_it_a_newer_one_is_asked_for(place: Path, off_ns: int) -> None:
    driver = Counted()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.expect_read(time.monotonic_ns() + off_ns)
        robot.write(STILL)
        if off_ns < 0:
            until_read(driver, 1)
        asked_ns = time.monotonic_ns()
        assert robot.read().time_ns >= asked_ns
        assert robot.write(STILL).executed.tolist() == [0, 0, 0, 0]


def test_what_the_driver_raises_is_raised_by_the_reading(place: Path) -> None:
    driver = Counted()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.read()
        driver.broken = True
        robot.expect_read(time.monotonic_ns())
        robot.write(STILL)
        with pytest.raises(RobotError, match="the arm does not answer"):
            robot.read()
        driver.broken = False
        assert robot.read().state.shape == (4,)


def test_after_a_refused_command_the_reading_that_was_expected_answers_nothing_else(place: Path) -> None:
    driver = Counted()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(STILL)
        driver.refuses = True
        robot.expect_read(time.monotonic_ns())
        with pytest.raises(RobotError, match="the arm refuses"):
            robot.write(STILL)
        until_read(driver, 1)
        driver.refuses = False
        move = np.array([0.5, 0, 0, 0], np.float32)
        assert robot.write(move).executed.tolist() == move.tolist()
        robot.hold()
        robot.reset("go-right", 2)
        assert "right" in robot.read().task


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_of_calls_each_answer_is_that_of_its_call(place: Path, seed: int) -> None:
    driver, twin = Counted(), FakeRobot(CONFIG)
    expert = FakeExpert(twin)
    rng = np.random.default_rng(seed)
    with hosted(driver, place, FakeExpert(driver)) as robot:
        for each in (robot, twin):
            each.connect()
            each.reset("go-right", 3)
        for _ in range(120):
            kind = rng.choice(
                ["read", "write", "expect", "propose", "wait", "reset"], p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]
            )
            if kind == "read":
                seen, wanted = robot.read(), twin.read()
                assert np.array_equal(seen.state, wanted.state)
                assert np.array_equal(seen.images["front"].image, wanted.images["front"].image)
            elif kind == "write":
                action = rng.uniform(-1, 1, 4).astype(np.float32)
                assert np.array_equal(robot.write(action).executed, twin.write(action).executed)
            elif kind == "expect":
                robot.expect_read(time.monotonic_ns() + int(rng.choice([-HOUR_NS, 0, 1_000_000, HOUR_NS])))
            elif kind == "propose":
                proposed, own = robot.propose(robot.read()), expert.propose(twin.read())
                assert np.array_equal(proposed, own)
                assert robot.progress() == expert.progress()
            elif kind == "wait":
                time.sleep(0.003)
            else:
                again = int(rng.integers(9))
                robot.hold()
                for each in (robot, twin):
                    each.reset("go-left", again)
