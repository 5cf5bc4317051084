"""Whatever a driver gives or raises, its host answers and goes on guarding the robot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hal.driver_host.protocol import PACKET_BYTES, Reply, encode_reply, error_text, new_socket
from hal.drivers.fake import FakeConfig, FakeExpert, FakeRobot, fake_spec
from hal.interfaces.robot import Feedback
from tests.hal.driver_host.hosting import HZ, until_held
from tests.hal.driver_host.test_proxy import hosted
from wire.errors import FleetError, InvalidDataError, RobotError
from wire.types import Frame, Observation

CONFIG = FakeConfig(control_hz=HZ, image_px=16, preview_px=24)
SPEC = fake_spec(CONFIG)
STILL = np.zeros(4, np.float32)
MOVE = np.array([0.5, 0, 0, 0], np.float32)
LONE = "\ud800"
"""half of a pair of surrogates: a str that is not Unicode"""


@pytest.fixture()
def place() -> Iterator[Path]:
    """A short path: those of tmp_path may be too long for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="host-"))
    yield directory / "socket"
    shutil.rmtree(directory)


class Odd(FakeRobot):
    """Gives and raises what it is told, once; a robot as it should be afterwards."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.seen: dict[str, Any] = {}
        self.done: dict[str, Any] = {}
        self.raised: BaseException | None = None
        self.executed: list[np.ndarray] = []

    def read(self) -> Observation:
        self._raise()
        changed, self.seen = self.seen, {}
        return msgspec.structs.replace(super().read(), **changed)

    def write(self, action: np.ndarray) -> Feedback:
        self._raise()
        changed, self.done = self.done, {}
        feedback = super().write(action)
        self.executed.append(feedback.executed)
        return msgspec.structs.replace(feedback, **changed)

    def _raise(self) -> None:
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised


def test_numbers_of_numpy_come_through_as_numbers(place: Path) -> None:
    class Expert(FakeExpert):
        def progress(self) -> float:
            return np.float64(0.25)

    driver = Odd()
    with hosted(driver, place, Expert(driver)) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        numbers: Any = np
        frame = Frame(numbers.int64(8), np.zeros((16, 16, 3), np.uint8))
        driver.seen = {"time_ns": np.int64(7), "task": np.str_("go"), "images": {np.str_("front"): frame}}
        seen = robot.read()
        assert (seen.time_ns, seen.task, seen.images["front"].time_ns) == (7, "go", 8)
        driver.done = {"reward": np.float32(0.5), "success": np.bool_(True), "terminated": np.bool_(True)}
        done = robot.write(STILL)
        assert (done.reward, done.success, done.terminated, done.truncated) == (0.5, True, True, False)
        driver.done = {"truncated": np.True_}
        done = robot.write(STILL)
        assert (done.terminated, done.truncated) == (False, True)
        robot.propose(seen)
        assert robot.progress() == 0.25


@pytest.mark.parametrize(
    ("seen", "named"),
    [
        ({"time_ns": 2**80}, r"read\(\) gave time_ns 1208925819614629174706176 \(int\); a whole number of 64 bits"),
        ({"time_ns": 1.5}, r"time_ns 1.5 \(float\)"),
        ({"time_ns": "noon"}, "time_ns 'noon'"),
        ({"task": None}, r"read\(\) gave the task None \(NoneType\); a text"),
        ({"task": f"go {LONE}"}, r"the task 'go \\ud800'"),
        ({"task": "go " * PACKET_BYTES}, r"read\(\) gave takes \d+ bytes besides the pictures"),
        ({"images": {LONE: Frame(1, np.zeros((1, 1, 3), np.uint8))}}, "a camera named"),
        ({"images": {"front": Frame(2**70, np.zeros((1, 1, 3), np.uint8))}}, "frame of camera 'front' with time_ns"),
        ({"images": {"back": Frame(1, np.zeros((16, 16, 3), np.uint8))}}, r"camera 'back'; this robot has \['front'\]"),
        (
            {"images": {"front": Frame(1, np.zeros((16, 24, 3), np.uint8))}},
            r"camera 'front': uint8\[16, 24, 3\], expected uint8\[16, 16, 3\]",
        ),
        ({"images": {"front": Frame(1, np.zeros((16, 16, 3)))}}, r"camera 'front': float64\[16, 16, 3\], expected"),
        ({"images": {"front": Frame(1, np.zeros(())[()])}}, "no Frame with an array as image for camera 'front'"),
    ],
)
def test_a_reading_that_cannot_be_sent_is_named(place: Path, seen: dict[str, Any], named: str) -> None:
    driver = Odd()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        driver.seen = seen
        with pytest.raises((InvalidDataError, RobotError), match=f"'{SPEC.embodiment}'.*{named}"):
            robot.read()
        assert robot.read().images["front"].image.shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("done", "named"),
    [
        ({"reward": None}, r"write\(\) gave the reward None \(NoneType\); a number"),
        ({"reward": 10**400}, "the reward 1000"),
        ({"success": np.zeros(2)}, r"write\(\) gave success array\(\[0., 0.\]\)"),
        ({"terminated": np.ones(2)}, r"write\(\) gave terminated array"),
        ({"truncated": np.ones(2)}, r"write\(\) gave truncated array"),
        ({"executed": np.zeros(7, np.float32)}, r"write\(\) gave array\(.*as what it executed; float32\[4\]"),
        ({"executed": np.full(4, 1e39)}, r"write\(\) gave array\(\[1.e\+39.*all finite"),
        ({"executed": np.full(4, np.nan, np.float32)}, r"write\(\) gave array\(\[nan.*all finite"),
    ],
)
def test_feedback_that_cannot_be_sent_is_named_and_the_robot_can_still_be_held(
    place: Path, done: dict[str, Any], named: str
) -> None:
    driver = Odd()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(STILL)
        driver.done = done
        with pytest.raises(InvalidDataError, match=named):
            robot.write(MOVE)
        until_held(driver.executed)
        assert driver.executed[-1].tolist() == [0, 0, 0, 0]
        assert robot.write(STILL).executed.tolist() == [0, 0, 0, 0]


def test_what_was_executed_is_known_whatever_else_is_wrong_with_the_feedback(place: Path) -> None:
    driver = Odd()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(STILL)
        driver.done = {"reward": None}
        with pytest.raises(InvalidDataError, match="reward"):
            robot.write(np.array([0, 0, 0, 1], np.float32))
        until_held(driver.executed)
        assert driver.executed[-1].tolist() == [0, 0, 0, 1], "the gripper is held where it was sent"


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("nor this")


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ValueError(f"bad {LONE}"), "ValueError: bad \\?$"),
        (RobotError(f"bad {LONE}"), "^bad \\?$"),
        (ValueError("y" * 1_000_000), "ValueError: y+ ...$"),
        (InvalidDataError("\N{SNOWMAN}" * 1_000_000), "^\N{SNOWMAN}+ ...$"),
        (MuteError(), "MuteError: it cannot say what is wrong"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
@pytest.mark.parametrize("call", ["read", "write"])
def test_whatever_a_driver_raises_is_told_and_its_host_goes_on(
    place: Path, call: str, error: BaseException, named: str
) -> None:
    driver = Odd()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        calls: dict[str, Callable[[], object]] = {"read": robot.read, "write": lambda: robot.write(STILL)}
        driver.raised = error
        with pytest.raises(FleetError, match=named) as told:
            calls[call]()
        assert type(told.value) is (type(error) if isinstance(error, FleetError) else RobotError)
        assert len(str(told.value)) < 2100
        assert calls[call]() is not None


def test_a_driver_that_exits_while_its_host_holds_is_held_in_the_next_period(place: Path) -> None:
    driver = Odd()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(MOVE)
        driver.raised = SystemExit(1)
        until_held(driver.executed, 2)
        assert driver.executed[-1][0] == 0


def test_a_request_that_is_none_ends_that_control_only(place: Path) -> None:
    with hosted(FakeRobot(CONFIG), place) as robot:
        robot.connect()
        robot.close()
        # An array of two: number 1, and a text of one byte that is not UTF-8.
        for nonsense in (b"no", b"\x92\x01\xa1\xff"):
            with new_socket() as connection:
                connection.connect(str(place))
                connection.send(nonsense)
                assert connection.recv(PACKET_BYTES) == b""
        robot.connect()


def test_no_error_is_too_long_for_a_packet() -> None:
    text = error_text(RobotError("\N{GRINNING FACE}" * 10**6))
    assert text.startswith("\N{GRINNING FACE}")
    data = encode_reply(Reply(2**63 - 1, text, "RobotError"), "it", "read")
    assert len(data) < PACKET_BYTES / 2
