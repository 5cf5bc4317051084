"""A joint that is measured outside what it can be told is there: nothing jumps to its end, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from hal.interfaces.dynamics import ActionStateMapping
from hal.interfaces.robot import Feedback, reach
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limiter import SafetyLimiter
from hal.safety.limits import SafetyLimits
from hal.safety.rest import rest_action, standing_action
from wire.errors import ConfigError, RobotError
from wire.types import Dimension, Observation, RobotSpec

HZ = 50.0
SPEC = RobotSpec(
    "arm",
    (Dimension("joint", "deg", -360, 360), Dimension("other", "deg", -90, 90)),
    (Dimension("joint", "deg", -90, 90), Dimension("other", "deg", -90, 90)),
    (),
    HZ,
)
SPEED, ACCELERATION = 50.0, 200.0
LIMITS = SafetyLimits(dict.fromkeys(("joint", "other"), SPEED), dict.fromkeys(("joint", "other"), ACCELERATION))


class Arm:
    """Follows half of the way to its target in each period, and takes targets out there as it `returns_by_steps`."""

    real = True

    def __init__(self, at: float = 0.0, returns_by_steps: bool = True) -> None:
        self.spec, self.returns_by_steps = SPEC, returns_by_steps
        self.at = np.array([at, 10.0], np.float32)
        self.written: list[np.ndarray] = []
        self.error: Exception | None = None

    def connect(self) -> None: ...

    def reset(self, task: str, seed: int) -> None: ...

    def read(self) -> Observation:
        if self.error is not None:
            raise self.error
        return Observation(1, self.at.copy(), {}, "stay")

    def write(self, action: np.ndarray) -> Feedback:
        low, high = reach(self)
        done = action if self.returns_by_steps else np.clip(action, low, high)
        self.written.append(done.copy())
        self.at = (self.at + done) / 2
        return Feedback(done)

    def stop_motion(self) -> None: ...

    def close(self) -> None: ...


def limited(arm: Arm, limits: SafetyLimits = LIMITS) -> LimitedRobot:
    robot = LimitedRobot(arm, limits)
    robot.connect()
    robot.reset("stay", 0)
    return robot


def to(joint: float) -> np.ndarray:
    return np.array([joint, 10.0], np.float32)


@pytest.mark.parametrize("returns_by_steps", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("at", [-112.0, 90.5])
def test_nobody_asked_it_to_come_back(at: float, stopped: bool, returns_by_steps: bool) -> None:
    arm = Arm(at, returns_by_steps)
    robot = limited(arm)
    if stopped:
        robot.stop("1", "anna")
    for _ in range(5):
        feedback = robot.hold()
        assert feedback.executed[0] == at and feedback.still
    assert arm.written == []


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_it_comes_back_within_its_limits_and_holds_on_the_way(side: float) -> None:
    arm = Arm(112.0 * side)
    robot = limited(arm)
    for _ in range(15):
        robot.write(to(side * 89))
    for _ in range(20):
        feedback = robot.hold()
    assert feedback.still and 90 < side * feedback.executed[0] < 112, "it holds where it is"
    robot.stop("1", "anna")
    robot.hold()
    robot.release("1")
    robot.start()
    for _ in range(60):
        robot.write(to(side * 89))
    told = np.array([112.0, *(side * row[0] for row in arm.written)])
    speeds = np.diff(told) * HZ
    assert told[-1] == pytest.approx(89), "and arrives"
    assert np.abs(speeds).max() <= SPEED * 1.001
    assert told.argmax() == 0, "and never farther out than it was"


def test_one_that_would_jump_is_not_moved_and_says_what_to_do() -> None:
    arm = Arm(-112, returns_by_steps=False)
    robot = limited(arm)
    with pytest.raises(RobotError, match=r"not moved: 'joint' is measured at -112 deg, outside -90 to 90.* by hand"):
        robot.write(to(0))
    assert arm.written == []
    robot.hold()
    assert arm.written == []
    # Somebody has brought it back as near as one period takes it.
    arm.at = to(-90.5)
    robot.read()
    robot.write(to(0))
    assert arm.written[0][0] == pytest.approx(-90, abs=SPEED / HZ)


def test_a_simulator_is_simply_set() -> None:
    arm = Arm(-112, returns_by_steps=False)
    arm.real = False
    assert limited(arm).write(to(-90)).executed[0] == -90


def test_pushed_out_after_a_stop_it_stays_there() -> None:
    arm = Arm(-80, returns_by_steps=False)
    robot = limited(arm)
    robot.write(to(-80))
    robot.stop("1", "anna")
    arm.at = to(-130)
    for _ in range(3):
        assert robot.hold().executed[0] == -130
    assert len(arm.written) == 1
    robot.release("1")
    robot.start()
    with pytest.raises(RobotError, match="measured at -130 deg"):
        robot.write(to(-80))
    assert len(arm.written) == 1


@pytest.mark.parametrize("error", [RobotError("no answer"), OSError("usb")])
def test_stopped_and_not_measured_it_gets_no_target(error: Exception) -> None:
    arm = Arm(-60)
    robot = limited(arm)
    for _ in range(20):
        robot.write(to(60))
    told = len(arm.written)
    robot.stop("1", "anna")
    arm.error = error
    for _ in range(3):
        assert robot.hold().still
    robot.release("1")
    robot.start()
    robot.hold()
    with pytest.raises(type(error), match=str(error)):
        robot.write(to(60))
    assert len(arm.written) == told
    arm.error = None
    robot.hold()
    assert arm.written[told] == pytest.approx(arm.at)


def test_what_is_said_of_a_target_that_nobody_measures_is_not_commanded_before_anything_was() -> None:
    arm = Arm()
    arm.spec = RobotSpec("arm", SPEC.state[1:], SPEC.action, (), HZ)
    arm.at = arm.at[1:]
    robot = limited(arm, SafetyLimits(LIMITS.velocity, LIMITS.acceleration, rest={"joint": 30.0}))
    robot.hold()
    assert arm.written == []
    robot.write(to(90))
    assert arm.written[0][0] == pytest.approx(30, abs=SPEED / HZ), "its first command begins there"


class Narrow(Arm):
    """Its calibration ends at 40 deg."""

    def __init__(self, at: float = 0.0) -> None:
        super().__init__(at, returns_by_steps=False)
        self.reach = np.array([-90.0, -90.0], np.float32), np.array([40.0, 90.0], np.float32)


def test_it_brakes_before_the_end_of_its_calibration() -> None:
    arm = Narrow()
    robot = limited(arm)
    for _ in range(100):
        robot.write(to(90))
    told = np.array([row[0] for row in arm.written], np.float64)
    assert told[-1] == pytest.approx(40, abs=1e-3)
    assert np.abs(np.diff(told, 2)).max() * HZ**2 <= ACCELERATION * 1.001
    assert np.abs(np.diff(told)).max() * HZ == pytest.approx(SPEED, rel=1e-3)


def test_beyond_the_end_of_its_calibration_is_outside() -> None:
    arm = Narrow(60.0)
    robot = limited(arm)
    assert robot.hold().executed[0] == 60
    with pytest.raises(RobotError, match="measured at 60 deg, outside -90 to 40"):
        robot.write(to(30))
    assert arm.written == []


def test_a_workspace_out_of_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="workspace of 'joint'"):
        LimitedRobot(Narrow(), SafetyLimits(workspace={"joint": (50.0, 80.0)}))


def test_what_stands_outside_is_told_from_what_is_commanded() -> None:
    limits = SafetyLimits(moves=(ActionStateMapping("joint", "other", 0.5),))
    state = np.array([300.0, 60.0], np.float32)
    assert standing_action(SPEC, state).tolist() == [300, 60]
    assert rest_action(SPEC, state).tolist() == [90, 60]
    assert standing_action(SPEC, state, limits).tolist() == [120, 60]


def test_the_limiter_holds_outside_and_comes_in_by_steps() -> None:
    limiter = SafetyLimiter(SPEC, LIMITS)
    at = to(100)
    assert limiter.brake(at).tolist() == at.tolist()
    first = limiter.limit(to(90), at)
    assert first[0] == pytest.approx(100 - ACCELERATION / HZ**2, abs=1e-4)
