"""An arm of lerobot at the ends of its calibration and beyond, where a servo goes to its end whatever it is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.lerobot.spec import DimensionConfig
from hal.safety.limited_robot import LimitedRobot
from hal.safety.limits import SafetyLimits
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus
from tests.hal.drivers.lerobot.so_arm import JOINTS, RANGE, calibrated, follower
from wire.errors import RobotError

pytestmark = [needs("lerobot"), pytest.mark.slow]

END_DEG = (RANGE[1] - RANGE[0]) / 2 * 360 / 4095
NAMES = [f"{joint}.pos" for joint in JOINTS]
SPEED, ACCELERATION, HZ = 90.0, 360.0, 30.0
LIMITS = SafetyLimits(dict.fromkeys(NAMES, SPEED), dict.fromkeys(NAMES, ACCELERATION))
WIDE = {f"action.{name}": DimensionConfig("deg", -110, 110) for name in NAMES[:5]}
"""what the recipe says of every arm; this one is calibrated to less"""


def limited(bus: FeetechBus, directory: Path) -> LimitedRobot:
    robot = LimitedRobot(LeRobotRobot(follower(calibrated(bus, directory), dimensions=WIDE)), LIMITS)
    robot.connect()
    robot.reset("pick", 0)
    return robot


def test_it_brakes_before_the_end_of_its_calibration(bus: FeetechBus, tmp_path: Path) -> None:
    robot = limited(bus, tmp_path)
    assert (robot.spec.action[0].high, robot.robot.reach[1][0]) == (110, pytest.approx(END_DEG))
    robot.read()
    told = [robot.hold().executed.astype(np.float64)]
    for _ in range(60):
        told.append(robot.write(np.array([110, *told[0][1:]], np.float32)).executed.astype(np.float64))
    pan = np.array(told)[:, 0]
    assert pan[-1] == pytest.approx(END_DEG, abs=1e-3)
    assert np.abs(np.diff(pan, 2)).max() * HZ**2 <= ACCELERATION * 1.01
    robot.close()


def test_one_that_stands_beyond_it_gets_no_torque(bus: FeetechBus, tmp_path: Path) -> None:
    robot = LimitedRobot(LeRobotRobot(follower(calibrated(bus, tmp_path), dimensions=WIDE)), LIMITS)
    bus.move(1, RANGE[1] + 400)
    with pytest.raises(
        RobotError, match=r"no torque, for it would jump: shoulder_pan at 3400, calibrated from 1000 to"
    ):
        robot.connect()
    assert (bus.present(1), bus.torque(1)) == (RANGE[1] + 400, False)
    bus.move(1, RANGE[1])
    robot.connect()
    robot.close()


def test_pushed_beyond_it_nothing_is_sent_there_and_the_error_says_what_to_do(bus: FeetechBus, tmp_path: Path) -> None:
    robot, sent = limited(bus, tmp_path), []
    inside = robot.robot._robot
    send = inside.send_action
    inside.send_action = lambda action: (sent.append(action), send(action))[1]
    # somebody who is stronger than it
    bus.servos[1].blocked = True
    bus.move(1, RANGE[1] + 400)
    robot.read()
    robot.hold()
    robot.stop("1", "anna")
    for _ in range(3):
        robot.hold()
    robot.release("1")
    robot.start()
    robot.hold()
    assert all("shoulder_pan.pos" not in action for action in sent) and sent, "the others were stopped"
    with pytest.raises(RobotError, match=r"'shoulder_pan.pos' is measured at 123.* deg, outside -87.9\d* to 87.9\d*"):
        robot.write(np.zeros(6, np.float32))
    assert all("shoulder_pan.pos" not in action for action in sent)
    robot.close()
