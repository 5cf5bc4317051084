"""What a robot executed is known where it is commanded, and nobody who commanded nothing is moved."""

from __future__ import annotations

import numpy as np
import pytest

from hal.interfaces.dynamics import ActionStateMapping
from hal.interfaces.robot import Feedback
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from wire.errors import ConfigError, InvalidDataError, RobotError, RobotStoppedError
from wire.types import CommandType, Dimension, Observation, RobotSpec

SPEC = RobotSpec(
    "arm",
    (Dimension("joint", "deg", -180, 180), Dimension("finger_width", "mm", 0, 80)),
    (Dimension("joint", "deg", -180, 180), Dimension("finger", "1", -1, 1)),
    (),
    50.0,
)
"""two targets, one of them named unlike what is measured of it"""
VELOCITY = CommandType.velocity
FINGER = ActionStateMapping("finger", "finger_width", 80.0)


class Arm:
    """Stands at 50 deg with its finger 40 mm open; takes what it is given, a spring pulls `pulled` deg back."""

    def __init__(self) -> None:
        self.spec, self.written, self.pulled = SPEC, list[np.ndarray](), 0.0
        self.state = np.array([50.0, 40.0], np.float32)
        self._array = np.zeros(2, np.float32)

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None: ...

    def read(self) -> Observation:
        return Observation(1, self.state.copy(), {}, "stay")

    def write(self, action: np.ndarray) -> Feedback:
        self.written.append(action.copy())
        self._array[:] = action - [self.pulled, 0]
        return Feedback(self._array)

    def close(self) -> None: ...


class Base(Arm):
    """Goes on by the velocity it was told last."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = RobotSpec("base", SPEC.state, (*SPEC.action[:1], Dimension("v", "m/s", -1, 1, VELOCITY)), (), 50.0)
        self.velocity, self.connected, self.real = 0.5, False, True

    def connect(self) -> None:
        self.connected = True

    def write(self, action: np.ndarray) -> Feedback:
        self.velocity = float(action[1])
        return super().write(action)


class BrakedBase(Base):
    def stop_motion(self) -> None:
        self.velocity = 0.0


class SceneBase(Base):
    """Takes commands in a scene only."""

    def write(self, action: np.ndarray) -> Feedback:
        raise RobotError("write without a scene.")


class StandingBase(SceneBase):
    def stop_velocities(self) -> None:
        self.velocity = 0.0


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("kind", [Base, BrakedBase, StandingBase])
def test_what_somebody_else_left_driving_stands_when_it_is_connected(kind: type[Base], stopped: bool) -> None:
    base = kind()
    robot = LimitedRobot(base)
    if stopped:
        robot.stop("1", "anna")
    robot.connect()
    assert base.velocity == 0 and all(action.tolist() == [50.0, 0.0] for action in base.written)
    assert robot.executed is None and not robot.coasting
    if stopped:
        with pytest.raises(RobotStoppedError, match="is not reset: it was stopped by anna"):
            robot.reset("stay", 0)


def test_a_real_one_that_cannot_be_told_is_not_taken_for_connected() -> None:
    base = SceneBase()
    robot = LimitedRobot(base)
    for _ in range(2):
        with pytest.raises(RobotError, match=r"could not be told to stand: write without a scene\. Look at it"):
            robot.connect()
    base.real = False
    robot.connect()


def test_a_stopped_arm_is_not_connected() -> None:
    arm = Arm()
    robot = LimitedRobot(arm)
    robot.stop("1", "anna")
    with pytest.raises(RobotStoppedError, match="is not connected: it was stopped by anna"):
        robot.connect()


def limited(arm: Arm, limits: SafetyLimits | None = None) -> LimitedRobot:
    robot = LimitedRobot(arm, limits)
    robot.connect()
    robot.reset("stay", 0)
    return robot


class TestNobodyCommandedIt:
    def test_a_target_that_is_not_measured_is_not_made_up(self) -> None:
        arm = Arm()
        robot = limited(arm)
        for _ in range(5):
            assert robot.hold().still
        assert arm.written == []

    def test_after_the_first_command_it_holds_what_was_commanded(self) -> None:
        arm = Arm()
        robot = limited(arm)
        robot.write(np.array([50, 0.7], np.float32))
        robot.hold()
        assert np.allclose(arm.written, [[50, 0.7], [50, 0.7]])
        robot.reset("stay", 1)
        robot.hold()
        assert len(arm.written) == 2

    def test_what_is_measured_is_held(self) -> None:
        arm = Arm()
        limited(arm, SafetyLimits(moves=(FINGER,))).hold()
        assert np.allclose(arm.written, [[50, 0.5]])

    @pytest.mark.parametrize("rest", [{"finger": 2.0}, {"finger": float("nan")}, {"thumb": 0.0}])
    def test_a_rest_that_cannot_be_is_refused(self, rest: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match="rest"):
            LimitedRobot(Arm(), SafetyLimits(rest=rest))


def test_the_first_command_is_limited_from_where_the_robot_is_measured() -> None:
    arm = Arm()
    robot = limited(arm, SafetyLimits(velocity={"joint": 100.0}, rest={"finger": 0.0}))
    assert robot.write(np.array([180, 0], np.float32)).executed[0] == pytest.approx(52)


def test_limits_reckon_with_what_was_executed_and_not_with_what_was_asked_for() -> None:
    arm = Arm()
    robot = limited(arm, SafetyLimits(velocity={"joint": 100.0}, rest={"finger": 0.0}))
    arm.pulled = 1.5
    executed = [robot.write(np.array([180, 0], np.float32)).executed[0] for _ in range(4)]
    # 2 deg a period forward of where the spring left it
    assert np.allclose(executed, [50.5, 51, 51.5, 52])


def test_what_is_no_action_reaches_no_motor() -> None:
    arm = Arm()
    robot = limited(arm, SafetyLimits(rest={"finger": 0.0}))
    for wrong in (np.array([np.nan, 0], np.float32), np.zeros(3, np.float32)):
        with pytest.raises(InvalidDataError):
            robot.write(wrong)
    assert arm.written == []


def test_it_says_when_nothing_moves_any_more() -> None:
    spec = RobotSpec("base", (), (Dimension("v", "m/s", -1, 1, CommandType.velocity),), (), 10.0)

    class Base(Arm):
        def __init__(self) -> None:
            super().__init__()
            self.spec, self.state, self._array = spec, np.zeros(0, np.float32), np.zeros(1, np.float32)

        def write(self, action: np.ndarray) -> Feedback:
            self.written.append(action.copy())
            return Feedback(action)

    base = Base()
    robot = limited(base, SafetyLimits(acceleration={"v": 2.5}))
    while robot.write(np.array([0.75], np.float32)).executed[0] < 0.75:
        pass
    told = [robot.hold() for _ in range(4)]
    assert np.allclose([feedback.executed[0] for feedback in told], [0.5, 0.25, 0, 0], atol=1e-6)
    assert [feedback.still for feedback in told] == [False, False, True, True]


class Halting(Arm):
    """Has a brake of its own, which stops it at 50 deg."""

    def __init__(self) -> None:
        super().__init__()
        self.halts = 0

    def stop_motion(self) -> None:
        self.halts += 1


def test_stopped_by_its_driver_it_is_held_where_it_stands_and_not_at_its_old_target() -> None:
    arm = Halting()
    robot = limited(arm, SafetyLimits(moves=(FINGER,), acceleration={"joint": 1.0}))
    robot.write(np.array([90.0, 0.5], np.float32))
    assert robot.executed is not None
    robot.executed[:] = [90.0, 0.5]
    halts = arm.halts
    robot.stop("page", "anna")
    assert arm.halts == halts + 1
    assert robot.hold().executed.tolist() == [50.0, 0.5] and robot.still


def test_what_cannot_be_measured_then_gets_no_target_before_it_is() -> None:
    arm = Halting()
    robot = limited(arm, SafetyLimits(moves=(FINGER,)))
    robot.write(np.array([90.0, 0.5], np.float32))
    arm.state = np.array([np.nan, 40.0], np.float32)
    assert robot.stop_motion()
    assert robot.hold().still
    assert len(arm.written) == 1
    arm.state = np.array([70.0, 40.0], np.float32)
    assert robot.hold().executed.tolist() == [70.0, 0.5]


def test_what_nobody_measures_keeps_its_target_then() -> None:
    arm = Halting()
    robot = limited(arm, SafetyLimits(rest={"finger": -0.2}))
    robot.write(np.array([90.0, 0.7], np.float32))
    assert robot.stop_motion()
    assert np.allclose(robot.hold().executed, [50.0, 0.7]), "a grip that is let go drops what it holds"
