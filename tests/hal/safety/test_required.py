"""A real robot is not run without limits, and the proposal is one that can be used."""

from __future__ import annotations

import re

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
    ],
)
def test_a_limit_that_cannot_be_meant_is_named(
    velocity: dict[str, float], acceleration: dict[str, float], said: str
) -> None:
    usual = proposed_limits(SPEC)
    limits = SafetyLimits(
        velocity={**usual.velocity, **velocity},
        acceleration={**dict.fromkeys(usual.velocity, 1000000000.0), **acceleration},
        rest={"grip": 1.0},
    )
    with pytest.raises(ConfigError) as caught:
        require_limits(Real(), limits)
    assert said in str(caught.value)
    assert len(unit_faults(SPEC, limits, (0.05, 1000.0))) == 1


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
