"""A driver through its host: what goes in comes out, what goes wrong is said, and hold comes when it must."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.driver_host.proxy import RobotProxy
from hal.driver_host.server import DriverServer, run_driver_server
from hal.drivers.fake import FAKE_LIMITS, FakeConfig, FakeExpert, FakeRobot, Faults, fake_spec
from hal.interfaces.robot import Feedback, Robot, Teleoperator
from hal.safety.limits import SafetyLimits
from tests.hal.driver_host.hosting import HZ, PERIOD_S, until_held
from wire.clock import ManualClock
from wire.errors import ConfigError, InvalidDataError, RejectedError, RobotError, RobotMovingError, SpecMismatchError
from wire.types import CommandType, Dimension, Observation, RobotSpec

CONFIG = FakeConfig(control_hz=HZ, image_px=16, preview_px=24)
SPEC = fake_spec(CONFIG)


@pytest.fixture()
def place() -> Iterator[Path]:
    """A short path: those of tmp_path may be too long for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="host-"))
    yield directory / "socket"
    shutil.rmtree(directory)


@contextlib.contextmanager
def hosted(
    robot: Robot, path: Path, operator: Teleoperator | None = None, safety: SafetyLimits | None = None, **options: float
) -> Iterator[RobotProxy]:
    """`robot` in a host that runs in a thread, and the control side of it, not attached yet."""
    over = threading.Event()
    safety = safety or (FAKE_LIMITS if isinstance(robot, FakeRobot) else None)
    thread = threading.Thread(target=run_driver_server, args=(robot, path, over.is_set, safety, operator))
    thread.start()
    control = RobotProxy(robot.spec, path, attach_s=60.0, **options)
    try:
        yield control
    finally:
        with contextlib.suppress(RobotError):
            control.close()
        over.set()
        thread.join(60)
        assert not thread.is_alive()


def test_the_robot_through_its_host_keeps_the_contract(place: Path) -> None:
    with hosted(FakeRobot(CONFIG), place):
        report = check_robot(lambda: RobotProxy(SPEC, place), "go-left", ticks=8, clock=ManualClock())
    assert report.passed, str(report)


def test_what_comes_through_is_what_the_driver_gave(place: Path) -> None:
    driver, twin = FakeRobot(CONFIG), FakeRobot(CONFIG)
    with hosted(driver, place) as robot:
        for each in (robot, twin):
            each.connect()
            each.reset("go-right", 3)
        frames = []
        for tick in range(9):
            got, wanted = robot.read(), twin.read()
            assert got.state.dtype == np.float32
            assert np.array_equal(got.state, wanted.state)
            assert got.task == wanted.task
            frame = got.images["front"]
            frames.append(frame)
            assert np.array_equal(frame.image, wanted.images["front"].image)
            assert np.array_equal(frame.preview, wanted.images["front"].preview)
            action = np.array([0.3, -0.2, 2.0, tick / 9], np.float32)
            feedback, expected = robot.write(action), twin.write(action)
            assert np.array_equal(feedback.executed, expected.executed)
            assert (feedback.reward, feedback.success) == (expected.reward, expected.success)
        # one frame in 4 ticks: the same frame is the same object
        assert [frames[i] is frames[i - 1] for i in range(1, 9)] == [True, True, True, False] * 2


def test_errors_come_back_as_what_they_were(place: Path) -> None:
    with hosted(FakeRobot(FakeConfig(faults=Faults(raise_on_read=True))), place) as robot:
        with pytest.raises(RobotError, match="read before connect"):
            robot.read()
        robot.connect()
        with pytest.raises(ConfigError, match="Did you mean 'go-left'"):
            robot.reset("go-leftt", 1)
        robot.reset("go-left", 1)
        with pytest.raises(RobotError, match="the arm does not answer"):
            robot.read()
        with pytest.raises(InvalidDataError, match="not finite in move_x"):
            robot.write(np.array([np.nan, 0, 0, 0], np.float32))
        with pytest.raises(RobotError, match="without a scripted operator"):
            robot.propose(None)


def test_a_bug_in_the_driver_does_not_end_its_host(place: Path) -> None:
    class Buggy(FakeRobot):
        def read(self) -> Observation:
            raise ZeroDivisionError("oh")

    with hosted(Buggy(CONFIG), place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        with pytest.raises(RobotError, match=r"failed in read\(\): ZeroDivisionError: oh"):
            robot.read()
        robot.reset("go-right", 1)


def test_the_scripted_operator_runs_beside_the_driver(place: Path) -> None:
    driver = FakeRobot(CONFIG)
    expert = FakeExpert(driver)
    with hosted(driver, place, expert) as robot:
        robot.connect()
        assert robot.progress() == float("inf")
        robot.reset("go-left", 1)
        seen = robot.read()
        proposed = robot.propose(seen)
        assert np.array_equal(proposed, expert.propose(seen))
        assert robot.progress() == expert.progress()


def test_another_robot_or_a_second_control_is_refused(place: Path) -> None:
    other = RobotSpec("other", SPEC.state, SPEC.action, (), HZ)
    with hosted(FakeRobot(CONFIG), place) as robot:
        with pytest.raises(SpecMismatchError, match=r"'other'.*'fake-point'"):
            RobotProxy(other, place).connect()
        robot.connect()
        with pytest.raises(RejectedError, match=f"in the hands of process {os.getpid()}"):
            RobotProxy(SPEC, place).connect()
        robot.reset("go-left", 1)
        with pytest.raises(ConfigError, match="another host runs"):
            DriverServer(FakeRobot(CONFIG), place)
        assert robot.read().state.shape == (4,)


def test_no_host_and_a_path_too_long_are_said(place: Path) -> None:
    with pytest.raises(RobotError, match="no host at"):
        RobotProxy(SPEC, place, attach_s=0.05).connect()
    with pytest.raises(ConfigError, match="too long"):
        RobotProxy(SPEC, place.with_name("x" * 120)).connect()
    with pytest.raises(ConfigError, match="too long"):
        DriverServer(FakeRobot(CONFIG), place.with_name("x" * 120))


def test_what_a_killed_host_left_is_cleared(place: Path) -> None:
    place.touch()
    with hosted(FakeRobot(CONFIG), place) as robot:
        deadline = time.monotonic() + 60
        while not place.is_socket() and time.monotonic() < deadline:
            time.sleep(0.01)
        robot.connect()


class Slow(FakeRobot):
    """Blocks in write while `block` is set; remembers what it executed."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.block = False
        self.executed: list[np.ndarray] = []

    def write(self, action: np.ndarray) -> Feedback:
        deadline = time.monotonic() + 60
        while self.block and time.monotonic() < deadline:
            time.sleep(0.005)
        feedback = super().write(action)
        self.executed.append(feedback.executed)
        return feedback


def test_a_driver_that_blocks_is_named_and_late_commands_are_not_executed(place: Path) -> None:
    driver = Slow()
    with hosted(driver, place, call_s=0.5) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(np.array([0.5, 0, 0, 0], np.float32))
        driver.block = True
        with pytest.raises(RobotError, match=r"driver blocks: no answer to write\(\) within 0.5 s"):
            robot.write(np.array([0.6, 0, 0, 0], np.float32))
        with pytest.raises(RobotError, match=r"no answer to write\(\)"):
            robot.write(np.array([0.7, 0, 0, 0], np.float32))
        driver.block = False
        time.sleep(3 * PERIOD_S)
        assert robot.write(np.array([0.8, 0, 0, 0], np.float32)).executed[0] == np.float32(0.8)
        moved = [float(x[0]) for x in driver.executed]
        assert np.float32(0.7) not in moved, "it waited for 0.5 s behind the one that blocked"
        assert moved.count(0.0) > 1, "one late command, and what the host commanded by itself"


def test_while_it_resets_and_before_the_first_command_nothing_is_held(place: Path) -> None:
    class Resetting(Slow):
        def reset(self, task: str, seed: int) -> None:
            time.sleep(6 * PERIOD_S)
            super().reset(task, seed)

    driver = Resetting()
    with hosted(driver, place) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        robot.write(np.array([0.5, 0, 0, 0], np.float32))
        with pytest.raises(RobotMovingError, match="hold it first"):
            robot.reset("go-left", 2)
        robot.hold()
        robot.reset("go-left", 2)
        before = len(driver.executed)
        time.sleep(4 * PERIOD_S)
        assert robot.read().task
        assert len(driver.executed) == before


def test_hold_brakes_within_the_acceleration_limit(place: Path) -> None:
    driver = Slow()
    # 0.5 a step is 25 a second; 5 a second less in each period takes five
    limits = SafetyLimits(acceleration={"move_x": 5 * HZ})
    with hosted(driver, place, safety=limits) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        for _ in range(5):
            robot.write(np.array([0.5, 0, 0, 0], np.float32))
        until_held(driver.executed, 10)
    ramp = [0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]
    assert np.allclose([x[0] for x in driver.executed[: len(ramp)]], ramp, atol=1e-6)


def test_control_that_stalled_does_not_push_a_robot_that_its_host_has_stopped(place: Path) -> None:
    driver = Slow()
    with hosted(
        driver, place, safety=SafetyLimits(acceleration={"move_x": 5 * HZ}, rest={"gripper_effort": 0})
    ) as robot:
        robot.connect()
        robot.reset("go-left", 1)
        for _ in range(5):
            before = robot.write(np.array([0.5, 0, 0, 0], np.float32))
        assert not before.still
        until_held(driver.executed, 12)
        after = robot.hold()
    assert after.executed[0] == 0
    assert after.still
    assert after.held_ticks >= 5
    assert np.all(np.diff([x[0] for x in driver.executed[5:]]) <= 0)


def test_absolute_joints_stay_where_they_are() -> None:
    spec = RobotSpec(
        "arm", (Dimension("j", "rad", 0, 3),), (Dimension("j", "rad", 0, 3, CommandType.absolute),), (), HZ
    )

    class Arm:
        def __init__(self) -> None:
            self.spec, self.at, self.closed = spec, np.float32(1.25), 0
            self.executed: list[np.ndarray] = []

        def connect(self) -> None: ...
        def reset(self, task: str, seed: int) -> None: ...
        def read(self) -> Observation:
            return Observation(time.monotonic_ns(), np.array([self.at], np.float32), {}, "stay")

        def write(self, action: np.ndarray) -> Feedback:
            self.at = action[0]
            self.executed.append(action)
            return Feedback(np.asarray(action, np.float32))

        def close(self) -> None:
            self.closed += 1

    directory = Path(tempfile.mkdtemp(prefix="host-"))
    arm = Arm()
    try:
        with hosted(arm, directory / "s") as robot:
            robot.connect()
            robot.reset("stay", 0)
            robot.write(np.array([2.5], np.float32))
            until_held(arm.executed)
            assert arm.at == 2.5
            assert arm.executed[-1].tolist() == [2.5]
    finally:
        shutil.rmtree(directory)
    assert arm.closed >= 1


def test_larger_pictures_are_asked_for_through_the_host_and_of_its_successor(place: Path) -> None:
    asked: list[bool] = []

    class Drawing(FakeRobot):
        def request_previews(self, wanted: bool) -> None:
            asked.append(wanted)

    with hosted(Drawing(CONFIG), place) as robot:
        robot.connect()
        robot.reset("go-right", 3)
        for wanted in (False, True, True, False):
            robot.request_previews(wanted)
            robot.read()
            robot.read()
        assert asked == [True, False]
        robot.request_previews(True)
    with hosted(Drawing(CONFIG), place) as successor:
        successor.request_previews(True)
        successor.connect()
        successor.reset("go-right", 3)
        successor.read()
    assert asked == [True, False, True]


def test_who_asks_for_proposals_gets_them_with_the_readings(place: Path) -> None:
    driver, twin = FakeRobot(CONFIG), FakeRobot(CONFIG)
    expert = FakeExpert(twin)
    with hosted(driver, place, FakeExpert(driver)) as robot:
        calls: list[str] = []
        call = robot._call
        robot._call = lambda name, *rest, **more: calls.append(name) or call(name, *rest, **more)  # type: ignore[method-assign]
        for each in (robot, twin):
            each.connect()
            each.reset("go-right", 3)
        for _ in range(4):
            seen = robot.read()
            assert np.array_equal(robot.propose(seen), expert.propose(twin.read()))
            assert robot.progress() == expert.progress()
            for each in (robot, twin):
                each.write(np.array([0.3, -0.2, 0.5, 0.1], np.float32))
        assert calls.count("propose") == 1
        robot.read()
        robot.read()
        assert robot.propose(seen) is not None
        assert calls.count("propose") == 2, "one that is not asked for is not made again and again"


def test_an_operator_that_fails_costs_no_reading(place: Path) -> None:
    class Failing:
        def propose(self, observation: Observation) -> np.ndarray:
            raise ValueError("no idea")

        def progress(self) -> float:
            return 0.0

    with hosted(FakeRobot(CONFIG), place, Failing()) as robot:
        robot.connect()
        robot.reset("go-right", 3)
        for _ in range(3):
            seen = robot.read()
            with pytest.raises(RobotError, match="no idea"):
                robot.propose(seen)
