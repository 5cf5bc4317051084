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
    assert limits.rest == {"grip": 5.0}


def test_the_block_is_what_is_proposed_and_keeps_what_is_there() -> None:
    given = SafetyLimits(workspace={"joint": (-90.0, 90.0)}, rest={"grip": 1.0})
    proposed = proposed_limits(SPEC, given)
    assert proposed.workspace == given.workspace and proposed.rest == {"grip": 1.0}
    assert limits_block(SPEC, given).startswith('safety=SafetyLimits(\n    velocity={"joint": 90.0, ')


DEGREES = 180 / 3.14159


@pytest.mark.parametrize(
    ("velocity", "acceleration", "said"),
    [
        # 360 deg of range: 90 deg/s twice divided by what a radian has
        ({"joint": 90 / DEGREES**2}, {}, "of joint, which is in deg a second, crosses -180 to 180 in"),
        ({"joint": 9000.0}, {}, "crosses -180 to 180 in 0.04 s"),
        ({"wheel": 100.0}, {}, "of wheel, which is in m/s a second, is 200 times what its bounds allow, 0.5"),
        ({"move_x": 0.01}, {}, "move_x, which is in cm/step a second, is 0.0005 times what its bounds allow, 20"),
        ({"joint": 90.0}, {"joint": 2.0}, "acceleration limit 2 of joint takes 45 s to stop"),
        (
            {"joint": 90.0},
            {"joint": 180 * DEGREES},
            "of joint takes 0.00873 s to stop from its velocity limit 90",
        ),
    ],
)
def test_a_limit_that_cannot_be_meant_is_named(
    velocity: dict[str, float], acceleration: dict[str, float], said: str
) -> None:
    usual = proposed_limits(SPEC)
    limits = SafetyLimits(
        velocity={**usual.velocity, **velocity},
        acceleration={n: v / 0.06 for n, v in {**usual.velocity, **velocity}.items()} | acceleration,
        rest={"grip": 1.0},
    )
    with pytest.raises(ConfigError) as caught:
        require_limits(Real(), limits)
    assert said in str(caught.value)
    assert len(unit_faults(SPEC, limits, (0.05, 1000.0))) == 1


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


@pytest.mark.parametrize("factor", [DEGREES, 1 / DEGREES])
def test_degrees_for_radians_are_asked_about(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    usual = proposed_limits(SPEC)
    limits = SafetyLimits(
        velocity={**usual.velocity, "joint": 90.0 * factor},
        acceleration={**usual.acceleration, "joint": 180.0 * factor},
        rest={"grip": 1.0},
    )
    require_limits(Real(), limits)
    assert "is the unit right? velocity limit" in caplog.text
    assert "joint" in caplog.text and "wheel" not in caplog.text


def test_what_is_proposed_is_not_asked_about() -> None:
    assert unit_faults(SPEC, proposed_limits(SPEC)) == []


def test_who_is_real() -> None:
    require_limits(FakeRobot(), SafetyLimits())
    assert not is_real(FakeRobot()) and LeRobotRobot.real
    assert is_real(Ros2Robot(Ros2Config(SPEC)))
    assert not is_real(Ros2Robot(Ros2Config(SPEC, simulated=True)))
