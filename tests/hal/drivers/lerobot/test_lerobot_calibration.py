"""An arm whose calibration is not its own gets no torque, and is told what to do; ports that cannot be opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hal.drivers.lerobot import serial_ports
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.lerobot.spec import DimensionConfig
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import OFFSET, FeetechBus
from tests.hal.drivers.lerobot.so_arm import JOINTS, calibrated, follower
from wire.errors import RobotError

pytestmark = [needs("lerobot"), pytest.mark.slow]  # importing lerobot alone takes ten seconds

COMMON = {f"action.{joint}.pos": DimensionConfig("deg", -88, 88) for joint in JOINTS[:5]}


def refused(bus: FeetechBus, fields: dict, message: str) -> str:
    """What connecting says; no servo got torque, and none moved."""
    robot = LeRobotRobot(follower(fields, dimensions=COMMON))
    before = [bus.present(number) for number in range(1, 7)]
    with pytest.raises(RobotError, match=message) as raised:
        robot.connect()
    robot.close()
    assert [servo.wakings for servo in bus.servos.values()] == [0] * 6
    assert [bus.present(number) for number in range(1, 7)] == before
    return str(raised.value)


def test_an_arm_that_was_never_calibrated_says_how(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path) | {"id": "never"}
    refused(
        bus,
        fields,
        rf"no calibration at .*never.json. Run `lerobot-calibrate --robot.type=so101_follower "
        rf"--robot.port={bus.port} --robot.id=never`",
    )


def test_a_file_of_other_motors_is_refused(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path)
    file = tmp_path / "arm.json"
    joints = json.loads(file.read_text())
    joints["gripper"]["id"] = 9
    file.write_text(json.dumps(joints))
    refused(bus, fields, r"is of other motors: 'gripper' is motor 9 there and 6 here. Run `lerobot-calibrate")


def test_another_homing_offset_or_range_is_named(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path)
    bus.servos[3].put(OFFSET, 120)
    bus.calibrate({5: (1000, 2900)})
    said = refused(bus, fields, "hold another calibration than .*arm.json: elbow_flex: homing offset 120 instead of 0;")
    assert "wrist_roll: range max 2900 instead of 3000. Positions would be wrong. Run `lerobot-calibrate" in said


def test_a_right_one_gets_torque(bus: FeetechBus, tmp_path: Path) -> None:
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path), dimensions=COMMON))
    robot.connect()
    assert all(bus.torque(number) for number in range(1, 7))
    robot.close()


def test_a_port_of_somebody_else_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "ttyACM0"
    port.touch()
    assert serial_ports.port_fault(str(port)) == ""
    monkeypatch.setattr(serial_ports.os, "access", lambda path, mode: False)
    assert f"{port} may not be opened by this user: `sudo adduser $USER" in serial_ports.port_fault(str(port))


def test_a_port_that_is_not_there_lists_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serial_ports, "serial_ports", lambda: ["/dev/ttyACM3", "/dev/ttyUSB0"])
    assert "There are: /dev/ttyACM3, /dev/ttyUSB0." in serial_ports.port_fault("/dev/ttyACM9")
