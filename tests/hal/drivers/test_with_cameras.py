"""Any robot with any cameras."""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.fake import FAKE_LIMITS, FakeExpert, FakeRobot
from hal.drivers.with_cameras import CameraChoice, CameraRobot, CameraRobotConfig
from hal.registry import make_operator, make_robot, read_config
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import hold_action
from robot_edge.control.config import ObservationLimits, RobotTimeouts
from robot_edge.control.guarded_robot import GuardedRobot
from robot_edge.control.mode import Hold, HoldReason
from tests.hal.cameras.filming import pattern_number, threads, until
from wire.clock import ManualClock, MonotonicClock, SimulatedClock
from wire.errors import ConfigError, RobotError
from wire.types import Observation

FAST = {"name": "wrist", "height": 32, "width": 64, "rate_hz": 200.0, "stall_timeout_s": 60.0}
CONFIG = CameraRobotConfig("fake", (CameraChoice("pattern", FAST), CameraChoice("pattern", {**FAST, "name": "door"})))


@pytest.fixture
def robot():
    made = CameraRobot(CONFIG)
    made.connect()
    made.reset("go-up", 1)
    yield made
    made.close()


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    report = check_robot(lambda: CameraRobot(CONFIG), "go-up", ticks=6)
    assert report.passed, str(report)
    until(lambda: not threads("wrist"))


def test_the_spec_has_all_cameras() -> None:
    own = FakeRobot().spec
    spec = CameraRobot(CONFIG).spec
    assert [camera.name for camera in spec.cameras] == ["front", "wrist", "door"]
    assert (spec.state, spec.action, spec.control_hz) == (own.state, own.action, own.control_hz)
    with pytest.raises(ConfigError, match=r"cameras\[1\]: the name 'front' is taken"):
        CameraRobot(CameraRobotConfig("fake", (CONFIG.cameras[0], CameraChoice("pattern", {**FAST, "name": "front"}))))
    with pytest.raises(ConfigError, match="Did you mean 'pattern'"):
        CameraRobot(CameraRobotConfig("fake", (CameraChoice("patern"),)))
    with pytest.raises(ConfigError, match="cameras is empty"):
        CameraRobotConfig("fake", ())
    with pytest.raises(ConfigError, match="fresh_picture_s 0 must be above 0"):
        CameraRobotConfig("fake", CONFIG.cameras, fresh_picture_s=0.0)


def test_pictures_come_at_their_own_rate_and_are_never_newer(robot: CameraRobot) -> None:
    numbers, ages = [], []
    for _ in range(20):
        seen = robot.read()
        robot.write(hold_action(robot.spec, np.zeros(4, np.float32)))
        for name in ("wrist", "door"):
            ages.append(seen.time_ns - seen.images[name].time_ns)
        numbers.append(pattern_number(seen.images["wrist"].image))
        time.sleep(0.01)
    assert min(ages) >= 0
    assert numbers == sorted(numbers) and len(set(numbers)) > 5
    assert "front" in seen.images


def test_a_reset_shows_nothing_older(robot: CameraRobot) -> None:
    for seed in range(3):
        before = time.monotonic_ns()
        robot.reset("go-up", seed)
        assert robot.read().images["wrist"].time_ns >= before


def test_a_reset_waits_for_a_picture_as_long_as_told() -> None:
    slow = CameraChoice("pattern", {**FAST, "rate_hz": 0.5})
    robot = CameraRobot(CameraRobotConfig("fake", (slow,), fresh_picture_s=0.05))
    robot.connect()
    with pytest.raises(RobotError, match=r"'wrist' gave no picture within 0\.05 s of the reset"):
        robot.reset("go-up", 1)
    robot.close()


def test_the_operator_of_the_robot_inside_works(robot: CameraRobot) -> None:
    operator = make_operator("with-cameras", robot)
    assert isinstance(operator, FakeExpert)
    same = FakeExpert(robot)  # type: ignore[arg-type] - what it asks of its robot is there
    seen = robot.read()
    assert np.array_equal(operator.propose(seen), same.propose(seen))  # type: ignore[arg-type]
    assert robot.tasks == FakeRobot().tasks and robot.task == "go-up"
    with pytest.raises(AttributeError):
        _ = robot.nothing_of_that_name


class TestACameraThatIsLost:
    FAILS: ClassVar = {**FAST, "unplugged_after": 10, "back_after_s": 0.4, "stall_timeout_s": 0.05}

    def robot(self) -> tuple[CameraRobot, list[str]]:
        """And what its arm was told besides being read and commanded."""
        robot = CameraRobot(CameraRobotConfig("fake", (CameraChoice("pattern", self.FAILS),)))
        told: list[str] = []
        connect, close = robot.inside.connect, robot.inside.close
        robot.inside.connect = lambda: (told.append("connect"), connect())[1]  # type: ignore[method-assign]
        robot.inside.close = lambda: (told.append("close"), close())[1]  # type: ignore[method-assign]
        robot.connect()
        robot.reset("go-up", 1)
        return robot, told

    def guarded(self, robot: CameraRobot, events: list[str]) -> GuardedRobot:
        timeouts = RobotTimeouts(give_up_s=0.1, first_pause_s=0.05)
        limits = ObservationLimits(camera_stale_s=0.1)
        robot_within_limits = LimitedRobot(robot, FAKE_LIMITS)
        return GuardedRobot(
            "bench", robot_within_limits, timeouts, limits, MonotonicClock(), lambda kind, _: events.append(kind)
        )

    def test_its_last_picture_grows_old_and_it_comes_back(self) -> None:
        robot, told = self.robot()
        ages_s, numbers = [0.0], [0]

        def look() -> None:
            seen = robot.read()
            ages_s.append((seen.time_ns - seen.images["wrist"].time_ns) / 1e9)
            numbers.append(pattern_number(seen.images["wrist"].image))

        until(lambda: (look(), ages_s[-1] > 0.2)[1])
        assert numbers[-1] == 10
        until(lambda: (look(), numbers[-1] > 10)[1])
        assert ages_s[-1] < 0.2 and told == ["connect"]
        robot.close()
        robot.close()

    def test_control_holds_the_arm_and_keeps_its_connection(self) -> None:
        robot, told = self.robot()
        events: list[str] = []
        guard = self.guarded(robot, events)
        held = 0

        def step() -> Hold:
            nonlocal held
            assert guard.observe() is not None and guard.write(None) is not None, guard.fault
            held += bool(guard.observation_fault)
            time.sleep(0.01)
            return guard.observation_fault

        until(lambda: step().reason == HoldReason.stale_camera)
        until(lambda: not step())
        assert held > 10 and told == ["connect"] and events == ["hold", "recovered"]
        guard.close()

    def test_a_scene_waits_for_it_with_the_arm_connected(self) -> None:
        robot, told = self.robot()
        events: list[str] = []
        guard = self.guarded(robot, events)
        until(lambda: (guard.observe(), guard.observation_fault.reason == HoldReason.stale_camera)[1])
        answers: list[bool | None] = []

        def reset() -> bool:
            if guard.ensure_connected():
                answers.append(guard.reset("go-up", 2, move=True))
            time.sleep(0.01)
            return answers[-1:] == [True]

        until(reset)
        assert answers[0] is None, "it is not the task"
        assert guard.observe() is not None and told == ["connect"]
        guard.close()


def test_a_camera_that_cannot_be_opened_leaves_nothing_open() -> None:
    config = CameraRobotConfig("fake", (CONFIG.cameras[0], CameraChoice("video", {"path": "none.mp4", "name": "film"})))
    robot = CameraRobot(config)
    reached: list[str] = []
    robot.inside.connect = lambda: reached.append("connect")  # type: ignore[method-assign]
    with pytest.raises(RobotError, match=r"none\.mp4"):
        robot.connect()
    assert not reached, "no torque comes on for a robot that does not see"
    until(lambda: not threads("wrist"))
    with pytest.raises(RobotError):
        robot.reset("go-up", 0)


def test_on_a_clock_of_its_own_pictures_are_as_old_as_they_are() -> None:
    clock = SimulatedClock()
    clock.advance(10**15)
    robot = CameraRobot(CONFIG, clock)
    robot.connect()
    robot.reset("go-up", 1)
    before = -1
    for _ in range(30):
        seen = robot.read()
        stamp = seen.images["wrist"].time_ns
        assert before <= stamp <= seen.time_ns
        assert seen.time_ns - stamp < 10**12
        before = stamp
        robot.write(np.zeros(4, np.float32))
        clock.advance(robot.spec.period_ns)
    robot.close()


def test_a_picture_that_fits_an_older_observation_is_remembered(robot: CameraRobot) -> None:
    """A robot whose observations are stamped by its own hardware, a little ago."""
    late_ns = 50_000_000
    inside = robot.inside.read

    def stamped_earlier() -> Observation:
        seen = inside()
        return Observation(seen.time_ns - late_ns, seen.state, {}, seen.task)

    robot.inside.read = stamped_earlier  # type: ignore[method-assign]
    with pytest.raises(RobotError, match="ms older than the first picture of 'wrist'"):
        robot.read()

    def fits() -> bool:
        try:
            seen = robot.read()
        except RobotError:
            return False
        return 0 <= seen.time_ns - seen.images["wrist"].time_ns < 10**9

    until(fits)


def test_plain_values_make_it() -> None:
    plain = {"robot": "fake", "robot_config": {"image_px": 32}, "cameras": [{"kind": "pattern", "config": FAST}]}
    robot = make_robot("with-cameras", read_config("with-cameras", plain), ManualClock(1))
    assert [(c.name, c.height) for c in robot.spec.cameras] == [("front", 32), ("wrist", 32)]
    with pytest.raises(ConfigError, match="needs a configuration with robot, cameras"):
        make_robot("with-cameras")
