"""A real robot is not run without limits, and the proposal is one that can be used."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hal.drivers.fake import FakeConfig, FakeRobot
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.ros2.config import Ros2Config
from hal.drivers.ros2.robot import Ros2Robot
from hal.interfaces.robot import is_real
from hal.safety.limits import SafetyLimits, compile_limits
from hal.safety.required import limits_block, proposed_limits, require_limits, unit_faults
from wire.errors import ConfigError
from wire.types import CommandType, Dimension, RobotSpec

SPEC = RobotSpec(
    "arm",
    (Dimension("joint", "deg", -180, 180),),
    (
        Dimension("joint", "deg", -180, 180),
        Dimension("move_x", "cm/step", -1, 1, CommandType.delta),
        Dimension("wheel", "m/s", -0.3, 0.5, CommandType.velocity),
        Dimension("grip", "N", 0, 10),
    ),
    (),
    20.0,
)


class Real(FakeRobot):
    real = True

    def __init__(self) -> None:
        super().__init__(FakeConfig())
        self.spec = SPEC


def test_each_missing_limit_is_named_and_what_is_proposed_will_do() -> None:
    with pytest.raises(ConfigError) as caught:
        require_limits(Real(), SafetyLimits(velocity={"joint": 45.0}, acceleration={"wheel": 2.0}))
    text = str(caught.value)
    assert "no velocity limit of move_x, wheel, grip; no acceleration limit of joint, move_x, grip; nobody" in text
    assert "measures grip" in text
    pasted = re.search(r"SafetyLimits\(.*\)", text)
    assert pasted
    limits = eval(pasted[0], {"SafetyLimits": SafetyLimits})
    require_limits(Real(), limits)
    compile_limits(SPEC, limits)
    assert limits.velocity == {"joint": 45.0, "move_x": 20.0, "wheel": 0.5, "grip": 2.5}
    assert limits.acceleration == {"joint": 90.0, "move_x": 40.0, "wheel": 2.0, "grip": 5.0}
    assert limits.rest == {"grip": 0.0}, "it presses only when somebody says so"


def test_the_block_is_what_is_proposed_and_keeps_what_is_there() -> None:
    given = SafetyLimits(workspace={"joint": (-90.0, 90.0)}, rest={"grip": 1.0})
    proposed = proposed_limits(SPEC, given)
    assert proposed.workspace == given.workspace and proposed.rest == {"grip": 1.0}
    assert limits_block(SPEC, given).startswith('safety=SafetyLimits(\n    velocity={"joint": 90.0, ')


DEGREES = 180 / 3.14159


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 360 deg of range: 90 deg/s twice divided by what a radian has
        (
            {"velocity": {"joint": 90 / DEGREES**2}},
            "velocity limit 0.0274155 of joint, which is in deg a second, crosses -180 to 180 in 1.31e+04 s: write "
            "about 90",
        ),
        ({"velocity": {"joint": 90 / DEGREES}}, "of joint, which is in deg a second, crosses -180 to 180 in 229 s"),
        ({"velocity": {"joint": 90 * DEGREES}}, "crosses -180 to 180 in 0.0698 s: write about 90"),
        ({"velocity": {"wheel": 100.0}}, "of wheel, which is in m/s a second, is 200 times what its bounds allow, 0.5"),
        ({"velocity": {"move_x": 0.01}}, "which is in cm/step a second, is 0.0005 times what its bounds allow, 20"),
        ({"acceleration": {"joint": 2.0}}, "acceleration limit 2 of joint, which is in deg a second squared, takes 45"),
        ({"acceleration": {"joint": 180 * DEGREES}}, "takes 0.00873 s to stop from its velocity limit 90, with 0.05 s"),
        ({"stop_deceleration": {"joint": 1e6}}, "stop_deceleration 1e+06 of joint, which is in deg a second squared"),
        ({"stop_deceleration": {"joint": 360 * DEGREES}}, "115 times its acceleration limit 180: write about 360"),
        ({"jerk": {"joint": 1e-6}}, "jerk 1e-06 of joint, which is in deg a second cubed, takes 1.8e+08 s until"),
        ({"jerk": {"joint": 1e9}}, "until it brakes by its acceleration limit 180: write about 1800"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused_and_one_proposed(
    changed: dict[str, dict[str, float]], said: str
) -> None:
    usual = proposed_limits(SPEC)
    limits = replace(usual, **{kind: {**getattr(usual, kind), **table} for kind, table in changed.items()})
    with pytest.raises(ConfigError) as caught:
        require_limits(Real(), limits)
    assert said in str(caught.value)
    assert len(unit_faults(SPEC, limits)) == 1
    pasted = re.search(r"SafetyLimits\(.*\)", str(caught.value))
    assert pasted
    require_limits(Real(), eval(pasted[0], {"SafetyLimits": SafetyLimits}))


@pytest.mark.parametrize("hz", [20.0, 125.0, 1000.0])
@pytest.mark.parametrize("span", [1.0, 1.5, 3.14159, 6.28318])
@pytest.mark.parametrize("pace", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("kinds", [("velocity",), ("acceleration",), ("velocity", "acceleration")])
def test_degrees_for_radians_are_refused(hz: float, span: float, pace: float, kinds: tuple[str, ...]) -> None:
    robot, right = radians(span, hz, pace)
    require_limits(robot, right)
    wrong = {kind: {"joint": DEGREES * getattr(right, kind)["joint"]} for kind in kinds}
    with pytest.raises(ConfigError, match=f"{kinds[0]} limit .* of joint, which is in rad a second"):
        require_limits(robot, replace(right, **wrong))
    assert not unit_faults(robot.spec, proposed_limits(robot.spec, replace(right, **wrong)))


def radians(span: float, hz: float, pace: float) -> tuple[Real, SafetyLimits]:
    """A real joint of as much to each side, and what is proposed for it, at `pace`."""
    robot, joint = Real(), Dimension("joint", "rad", -span, span)
    robot.spec = RobotSpec("arm", (joint,), (joint,), (), hz)
    usual = proposed_limits(robot.spec)
    return robot, SafetyLimits(*({n: pace * v for n, v in t.items()} for t in (usual.velocity, usual.acceleration)))


@pytest.mark.parametrize(
    ("dimension", "velocity", "acceleration"),
    [
        # by their data sheets: a collaborative arm at its limits, a fast gripper, a finger's servo, a light lift
        (Dimension("joint", "rad", -2.9, 2.9), 2.62, 15.0),
        (Dimension("joint", "rad", -6.28, 6.28), 3.14, 40.0),
        (Dimension("joint", "m", 0.0, 0.08), 0.2, 2.0),
        (Dimension("joint", "rad", -0.5, 0.5), 5.0, 60.0),
        (Dimension("joint", "rad", 0.0, 0.8), 1.4, 14.0),
        (Dimension("joint", "m", 0.0, 0.6), 0.01, 0.02),
        (Dimension("joint", "deg", -165, 165), 5.0, 10.0),
        (Dimension("joint", "%", 0.0, 100.0), 270.0, 2700.0),
    ],
)
def test_what_is_unusual_and_can_be_meant_is_not_refused(
    dimension: Dimension, velocity: float, acceleration: float
) -> None:
    robot = Real()
    for hz in (20.0, 30.0, 50.0, 125.0, 1000.0):
        robot.spec = RobotSpec("arm", (dimension,), (dimension,), (), hz)
        require_limits(robot, SafetyLimits({"joint": velocity}, {"joint": acceleration}, {"joint": 4 * acceleration}))


def test_where_a_position_begins_that_nobody_measures_is_not_proposed() -> None:
    robot, tool = Real(), Dimension("tool_z", "m", 0.0, 1.2)
    robot.spec = RobotSpec("servo", (Dimension("shoulder", "rad", -3, 3),), (tool,), (), 50.0)
    limits = proposed_limits(robot.spec)
    assert limits.rest == {}
    with pytest.raises(ConfigError, match="nobody measures tool_z: say in `moves` which state dimension does"):
        require_limits(robot, limits)
    require_limits(robot, replace(limits, rest={"tool_z": 0.3}))


def test_an_acceleration_that_is_reached_in_one_period_is_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    usual = proposed_limits(SPEC)
    for ticks, said in ((1.0, False), (0.6, True)):
        acceleration = {name: v * SPEC.control_hz / ticks for name, v in usual.velocity.items()}
        require_limits(Real(), SafetyLimits(velocity=usual.velocity, acceleration=acceleration, rest={"grip": 1.0}))
        assert ("is the unit right? acceleration limit" in caplog.text) is said


@pytest.mark.parametrize(
    ("workspace", "meant"), [((-90.0, 90.0), False), ((0.0, 90.0), True), ((-3.5, 3.5), True), ((-90.0, 1.0), True)]
)
def test_a_workspace_that_keeps_nothing_out_is_named(workspace: tuple[float, float], meant: bool) -> None:
    robot = Real()
    joint = Dimension("joint", "rad", -3, 3)
    robot.spec = RobotSpec("arm", (joint,), (joint,), (), 20.0)
    limits = replace(proposed_limits(robot.spec), workspace={"joint": workspace})
    if meant:
        require_limits(robot, limits)
    else:
        with pytest.raises(ConfigError, match="workspace -90 to 90 of joint, which is -3 to 3 rad, keeps nothing out"):
            require_limits(robot, limits)


def test_what_is_proposed_is_not_asked_about() -> None:
    assert unit_faults(SPEC, proposed_limits(SPEC)) == []


def test_who_is_real() -> None:
    require_limits(FakeRobot(), SafetyLimits())
    assert not is_real(FakeRobot()) and LeRobotRobot.real
    assert is_real(Ros2Robot(Ros2Config(SPEC)))
    assert not is_real(Ros2Robot(Ros2Config(SPEC, simulated=True)))
