"""lerobot's teleoperators as devices: a leader arm on a simulated bus, and others that are made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hal.drivers.fake import FakeConfig, fake_spec
from hal.drivers.lerobot import teleop as lerobot_teleop
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.lerobot.spec import DimensionConfig
from hal.drivers.lerobot.teleop import LeRobotTeleop, LeRobotTeleopConfig
from hal.interfaces.teleop import TeleopCommand, TeleopDevice
from hal.registry import TELEOPERATORS, make_teleoperator, read_config
from hal.teleop.pose import neutral_action, pose_of
from robot_edge.control.operator_override import OperatorOverride
from tests.extras import needs
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus
from tests.hal.drivers.lerobot.so_arm import JOINTS, calibrated, follower
from tests.people import Person
from wire.clock import ManualClock, MonotonicClock
from wire.errors import ConfigError, RobotError
from wire.types import CommandType, Dimension, RobotSpec

pytestmark = [needs("lerobot"), pytest.mark.slow]  # importing lerobot alone takes ten seconds

JOINT_SPECS = (
    *(Dimension(f"{joint}.pos", "deg", -88, 88) for joint in JOINTS[:5]),
    Dimension("gripper.pos", "%", 0, 100),
)
ARM = RobotSpec("so101_follower", JOINT_SPECS, JOINT_SPECS, (), 30.0)
COMMON = {f"{joint}.pos": DimensionConfig(low=-88, high=88) for joint in JOINTS[:5]}
STEP_DEG = 360 / 4095


@pytest.fixture
def bus() -> Iterator[FeetechBus]:
    with FeetechBus(position=2000) as bus:
        yield bus


def leader(bus: FeetechBus, directory: Path, **options: object) -> LeRobotTeleop:
    fields = calibrated(bus, directory, "leader")
    device = LeRobotTeleop(LeRobotTeleopConfig("so101_leader", fields, **options))  # type: ignore[arg-type]
    device.connect(ARM)
    return device


def heard(device: LeRobotTeleop, enough=lambda intent: True, here: np.ndarray | None = None, of=ARM) -> TeleopCommand:
    """The first intent that is `enough`, made of a reading, of a robot that is `here` and follows."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        intent = device.read(pose_of(of, None) if here is None else here, True)
        if device.hint != "waiting for the device" and enough(intent):
            return intent
        time.sleep(0.005)
    raise AssertionError(f"nothing came: {device.hint}")


def pose(pan: float = 0.0, gripper: float = 50.0) -> np.ndarray:
    return np.float32([pan, 0, 0, 0, 0, gripper])


def test_a_leader_is_followed_when_it_is_where_the_robot_is(bus: FeetechBus, tmp_path: Path) -> None:
    device = leader(bus, tmp_path)
    assert isinstance(device, TeleopDevice)
    assert not bus.torque(1), "a leader moves freely"
    assert heard(device).action is None
    assert device.hint == "waiting for the robot's pose"
    assert heard(device, here=pose(pan=-40)).action is None
    assert device.hint == "bring shoulder_pan.pos by -40 deg to where the robot is"
    both = pose(pan=-40)
    both[1] = 60
    assert heard(device, here=both).action is None
    assert device.hint == "bring shoulder_lift.pos by +60 deg, shoulder_pan.pos by -40 deg to where the robot is"
    bus.move(1, round(2000 - 39 / STEP_DEG))
    action = heard(device, lambda intent: intent.action is not None, pose(pan=-40)).action
    assert action == pytest.approx(pose(pan=-39), abs=1.1)
    device.close()
    device.close()


def test_the_first_motion_is_slow_and_then_it_follows(bus: FeetechBus, tmp_path: Path) -> None:
    device = leader(bus, tmp_path, engage="always", speed=0.5)
    first = heard(device, lambda intent: intent.action is not None, pose(pan=-60)).action
    assert first[0] == pytest.approx(-60, abs=5)
    assert device.hint == "going over to the device in 1.0 s"
    last, then, slow = first, time.monotonic(), 0
    while device.hint:
        action, now = device.read(pose(pan=-60), True).action, time.monotonic()
        if action is None:
            # The machine is so busy that what was read is old: it begins again from where the robot is.
            last, then = first, now
            continue
        assert abs(action[0] - last[0]) <= 60 * (now - then) + 3, "the difference fades evenly"
        last, then, slow = action, now, slow + 1
        time.sleep(0.01)
    assert last[0] == pytest.approx(0, abs=2)
    assert slow >= 5
    bus.move(1, 2300)
    assert heard(device, lambda intent: abs(intent.action[0] - 300 * STEP_DEG) < 0.2).engaged
    device.close()


def test_a_leader_leads_a_follower(bus: FeetechBus, tmp_path: Path) -> None:
    """Two buses, lerobot's own arms, and between them what a robot makes of a person's commands."""
    with FeetechBus(position=2300, speed=20_000) as other:
        robot = LeRobotRobot(follower(calibrated(other, tmp_path), dimensions=COMMON))
        robot.connect()
        robot.reset("pick", 0)
        device = LeRobotTeleop(
            LeRobotTeleopConfig("so101_leader", calibrated(bus, tmp_path, "leader"), engage="always")
        )
        device.connect(robot.spec)
        human, executed = OperatorOverride(robot.spec, MonotonicClock()), robot.read().state
        person = Person(MonotonicClock())
        human.handle_command(person("take_over"))
        before: np.ndarray | None = None
        steps = []
        for _ in range(100):
            here = pose_of(robot.spec, robot.read().state)
            action = device.read(here, True).action
            if action is not None:
                sent = neutral_action(robot.spec, here, action) if before is None else action
                human.handle_command(person("command", *sent))
                before = sent
            command = human.action(executed)
            done = robot.write(executed if command is None else command).executed
            steps.append(float(np.abs(done - executed)[:5].max()))
            executed = done
            time.sleep(0.02)
        assert robot.read().state == pytest.approx(np.append(np.zeros(5), 50), abs=1.0)
        assert max(steps) < 0.3 * 176 * 0.1 + 1, "no jump"
        bus.move(3, 2200)
        end = time.monotonic() + 60
        while abs(robot.read().state[2] - 200 * STEP_DEG) > 0.5:
            assert time.monotonic() < end
            if (action := device.read(pose_of(robot.spec, robot.read().state), True).action) is not None:
                human.handle_command(person("command", *action))
            if (command := human.action(executed)) is not None:
                executed = robot.write(command).executed
            time.sleep(0.02)
        device.close()
        robot.close()


def test_after_it_was_let_go_it_has_to_come_near_again(bus: FeetechBus, tmp_path: Path) -> None:
    device = leader(bus, tmp_path)
    assert heard(device, lambda intent: intent.action is not None, pose())
    device.read(pose(pan=70), False)
    assert heard(device, here=pose(pan=70)).action is None
    assert "bring shoulder_pan.pos by +70 deg" in device.hint
    device.close()


def test_an_unplugged_leader_is_named(bus: FeetechBus, tmp_path: Path) -> None:
    device = leader(bus, tmp_path, engage="always")
    heard(device, here=pose())
    bus.unplug()
    with pytest.raises(RobotError, match=r"so101_leader' cannot be read.*Check its cable and power"):
        heard(device, lambda intent: False)
    device.close()


def test_another_calibration_in_a_leader_is_refused_or_replaced(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path, "leader")
    bus.calibrate({1: (0, 4095)})
    with pytest.raises(RobotError, match="hold another calibration"):
        LeRobotTeleop(LeRobotTeleopConfig("so101_leader", fields)).connect(ARM)
    device = LeRobotTeleop(LeRobotTeleopConfig("so101_leader", fields, write_calibration=True))
    device.connect(ARM)
    device.close()


def test_units_that_differ_are_named(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path, "leader") | {"use_degrees": False}
    with pytest.raises(ConfigError, match=r"'shoulder_pan.pos' in %, .* in deg. Give both the same `use_degrees`"):
        LeRobotTeleop(LeRobotTeleopConfig("so101_leader", fields)).connect(ARM)


def test_a_robot_it_cannot_drive_is_named(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path, "leader")
    with pytest.raises(ConfigError, match=r"does not say 'move_x', 'move_y'.*It says shoulder_pan.pos"):
        LeRobotTeleop(LeRobotTeleopConfig("so101_leader", fields)).connect(fake_spec(FakeConfig()))


def test_a_missing_package_is_named() -> None:
    config = read_config("lerobot", {"type": "phone"}, TELEOPERATORS)
    with pytest.raises(RobotError, match="'phone' needs the package 'hebi'"):
        make_teleoperator("lerobot", config).connect(ARM)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'so101_leader'"):
        LeRobotTeleop(LeRobotTeleopConfig("so101_leder")).connect(ARM)


# --- devices that are not arms: what lerobot's object says is made up here, the mapping is real ----------------------


class Phone:
    """Speaks as lerobot's phone does: a position, whether it is enabled, and a slider."""

    action_features = {"phone.pos": np.ndarray, "phone.enabled": bool, "phone.raw_inputs": dict}  # noqa: RUF012
    is_connected = is_calibrated = True

    def __init__(self) -> None:
        self.said = {"phone.pos": np.zeros(3), "phone.enabled": False, "phone.raw_inputs": {"a3": 0.5}}

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def get_action(self) -> dict:
        return self.said


SPEC = RobotSpec(
    "hand",
    (),
    (
        Dimension("x", "m/s", -0.5, 0.5, CommandType.velocity),
        Dimension("up", "m/step", -0.01, 0.01, CommandType.delta),
        Dimension("grip", "%", 0, 100),
    ),
    (),
    50.0,
)
NAMES = {"x": "phone.pos[0]", "up": "phone.pos[2]", "grip": "phone.raw_inputs[a3]"}


@pytest.fixture
def phone(monkeypatch: pytest.MonkeyPatch) -> Phone:
    phone = Phone()
    monkeypatch.setattr(lerobot_teleop, "make_lerobot", lambda *_: phone)
    return phone


def test_a_phone_moves_the_hand_as_it_moves_while_it_is_enabled(phone: Phone) -> None:
    clock = ManualClock(10**9)
    config = LeRobotTeleopConfig(
        "phone", names=NAMES, scale={"grip": 100.0}, changes=("x", "up"), engage="phone.enabled"
    )
    device = LeRobotTeleop(config, clock)
    device.connect(SPEC)

    def say(x: float, up: float, enabled: bool = True) -> TeleopCommand:
        phone.said = {"phone.pos": np.array([x, 0, up]), "phone.enabled": enabled, "phone.raw_inputs": {"a3": 0.25}}
        clock.advance(100_000_000)
        return heard(
            device, lambda _: device._reading[1] is not None and device._reading[1]["phone.pos"][0] == x, of=SPEC
        )

    assert say(0, 0, enabled=False).action is None
    assert device.hint == "phone.enabled to drive"
    say(0.01, 0)
    action = say(0.03, 0.02).action
    assert action == pytest.approx([0.2, 0.004, 25], rel=1e-3), "0.02 m in 0.1 s; 0.2 m/s is 0.004 m a step at 50 Hz"
    device.close()


def test_what_it_cannot_be_told_is_named(phone: Phone) -> None:
    for options, message in (
        ({"names": {"z": "phone.pos[2]"}}, "`names` names 'z'"),
        ({"names": NAMES, "changes": ("grip",)}, "'grip' is an absolute target and cannot follow changes"),
        ({"names": NAMES, "engage": "phone.enable"}, "Did you mean 'phone.enabled'"),
        ({}, r"does not say 'x', 'up', 'grip' of robot 'hand'"),
    ):
        with pytest.raises(ConfigError, match=message):
            LeRobotTeleop(LeRobotTeleopConfig("phone", **options)).connect(SPEC)  # type: ignore[arg-type]


def test_a_number_that_is_not_there_is_named(phone: Phone) -> None:
    device = LeRobotTeleop(
        LeRobotTeleopConfig("phone", names=NAMES | {"grip": "phone.raw_inputs[a4]"}, engage="always")
    )
    device.connect(SPEC)
    with pytest.raises(RobotError, match=r"gives no number as 'phone.raw_inputs\[a4\]': \{'a3': 0.5\}"):
        heard(device, of=SPEC)
    device.close()


def test_a_device_that_stands_still_holds(phone: Phone) -> None:
    clock = ManualClock(10**9)
    config = LeRobotTeleopConfig("phone", names=NAMES, scale={"grip": 100.0}, engage="always", rate_hz=0.5)
    device = LeRobotTeleop(config, clock)
    device.connect(SPEC)
    said = heard(device, lambda intent: intent.action is not None, of=SPEC)
    clock.advance(200_000_000)
    again = device.read(pose_of(SPEC, None), True)
    assert again.action is not None
    assert said.time_ns == again.time_ns == 10**9, "no fresher for being asked for again"
    clock.advance(100_000_000)
    assert device.read(pose_of(SPEC, None), True).action is None
    assert device.hint == "lerobot teleoperator 'phone' says nothing any more: the robot holds"
    device.close()
