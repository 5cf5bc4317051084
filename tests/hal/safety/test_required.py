"""A real robot is not run without limits, and the proposal is one that can be used."""

from __future__ import annotations

import re

import pytest

from hal.drivers.fake import FakeConfig, FakeRobot
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.ros2.config import Ros2Config
from hal.drivers.ros2.robot import Ros2Robot
from hal.interfaces.robot import is_real
from hal.safety.limiter import SafetyLimits, compile_limits
from hal.safety.required import limits_block, proposed_limits, require_limits
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


def test_who_is_real() -> None:
    require_limits(FakeRobot(), SafetyLimits())
    assert not is_real(FakeRobot()) and LeRobotRobot.real
    assert is_real(Ros2Robot(Ros2Config(SPEC)))
    assert not is_real(Ros2Robot(Ros2Config(SPEC, simulated=True)))
