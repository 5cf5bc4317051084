"""Robots of lerobot: real SO-100 and SO-101 drivers on a simulated serial bus."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hal.conformance import check_robot
from hal.drivers.lerobot.robot import LeRobotRobot
from hal.drivers.lerobot.spec import DimensionConfig, LeRobotConfig
from hal.registry import ROBOTS, make_robot, read_config
from robot_edge.control.rest_motion import RestMotion
from tests.extras import needs
from tests.hal.drivers.lerobot import feetech_bus
from tests.hal.drivers.lerobot.feetech_bus import FeetechBus
from tests.hal.drivers.lerobot.so_arm import JOINTS, TASKS, calibrated, follower
from wire.clock import MonotonicClock
from wire.errors import ConfigError, RobotError

pytestmark = [needs("lerobot"), pytest.mark.slow]  # importing lerobot alone takes ten seconds

HALF_RANGE_DEG = 1000 * 360 / 4095


def at_work(config: LeRobotConfig) -> LeRobotRobot:
    robot = LeRobotRobot(config)
    robot.connect()
    robot.reset("pick", 0)
    return robot


def wait_for(what: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


# --- the spec --------------------------------------------------------------------------------------------------------


def test_degrees_have_the_limits_of_the_calibration(bus: FeetechBus, tmp_path: Path) -> None:
    spec = LeRobotRobot(follower(calibrated(bus, tmp_path))).spec
    assert [d.name for d in spec.action] == [f"{joint}.pos" for joint in JOINTS]
    assert [d.unit for d in spec.action] == ["deg"] * 5 + ["%"]
    assert spec.action[0].high == pytest.approx(HALF_RANGE_DEG)
    assert (spec.action[5].low, spec.action[5].high) == (0, 100)
    assert spec.embodiment == "so101_follower"


def test_per_cent_needs_no_calibration_and_is_the_same_for_every_arm(bus: FeetechBus, tmp_path: Path) -> None:
    fields = {**calibrated(bus, tmp_path), "use_degrees": False}
    robot = LeRobotRobot(follower(fields))
    other = LeRobotRobot(follower({**fields, "id": "never-calibrated"}))
    assert robot.spec.hash == other.spec.hash
    assert (robot.spec.action[0].low, robot.spec.action[0].high, robot.spec.action[0].unit) == (-100, 100, "%")


def test_what_is_missing_is_named(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path) | {"id": "never-calibrated"}
    with pytest.raises(
        ConfigError, match=r"no low, high \(no calibration at .*never-calibrated.json\) of .*elbow_flex.pos"
    ):
        LeRobotRobot(follower(fields))
    limits = {f"{joint}.pos": DimensionConfig(low=-80, high=80) for joint in JOINTS[:5]}
    spec = LeRobotRobot(follower(fields, dimensions=limits)).spec
    assert (spec.action[0].unit, spec.action[0].high, spec.state[0].high) == ("deg", 80, 80)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "so101_folower"}, "Did you mean 'so101_follower'"),
        ({"fields": {"prt": "/dev/null"}}, "fields are not valid"),
        ({"dimensions": {"elbow.pos": DimensionConfig("deg")}}, "Did you mean 'elbow_flex.pos'"),
        ({"rest_pose": {"elbow_flex": 0.0}}, "Did you mean 'elbow_flex.pos'"),
        ({"images": {"top": (64, 64)}}, "`images` names 'top'. It has none"),
        ({"tasks": {}}, "no tasks"),
        ({"control_hz": 0.0}, "control_hz must be positive"),
        ({"rest_tolerance": 0.0}, "rest_tolerance must be positive"),
    ],
)
def test_a_wrong_configuration_is_named(bus: FeetechBus, tmp_path: Path, wrong: dict, message: str) -> None:
    right = {"type": "so101_follower", "fields": calibrated(bus, tmp_path), "tasks": TASKS}
    with pytest.raises(ConfigError, match=message):
        LeRobotRobot(LeRobotConfig(**(right | wrong)))


def test_no_configuration_at_all_is_named() -> None:
    with pytest.raises(ConfigError, match="'lerobot' needs a configuration with type;"):
        make_robot("lerobot")


def test_a_robot_without_motors_of_lerobot_needs_all_said() -> None:
    with pytest.raises(ConfigError, match=r"no unit, low, high of neck_yaw.pos, .*mobile_base.vx"):
        LeRobotRobot(LeRobotConfig("reachy2", {}, TASKS))


def test_it_is_configured_by_plain_values(bus: FeetechBus, tmp_path: Path) -> None:
    given = {
        "type": "so100_follower",
        "fields": calibrated(bus, tmp_path),
        "tasks": TASKS,
        "dimensions": {"gripper.pos": {"unit": "percent"}},
    }
    config = read_config("lerobot", given, ROBOTS)
    assert LeRobotRobot(config).spec.action[5].unit == "percent"


# --- at work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["so100_follower", "so101_follower"])
def test_an_arm_keeps_the_contract(kind: str, tmp_path: Path) -> None:
    with FeetechBus(speed=20_000) as bus:
        config = follower(calibrated(bus, tmp_path), kind, control_hz=60.0)
        report = check_robot(lambda: LeRobotRobot(config), "pick", ticks=8, seeded=False)
    assert report.passed, str(report)
    heard = {feetech_bus.PING, feetech_bus.READ, feetech_bus.WRITE, feetech_bus.SYNC_READ, feetech_bus.SYNC_WRITE}
    assert heard <= set(bus.packets)


def test_it_moves_where_it_is_told_and_says_so(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    target = np.array([10, -20, 30, 5, -5, 70], np.float32)
    feedback = robot.write(target)
    assert feedback.executed == pytest.approx(target)
    wait_for(lambda: np.abs(robot.read().state - target).max() < 0.2)
    assert bus.present(1) == pytest.approx(2000 + 10 * 4095 / 360, abs=1)
    assert robot.read().task == "pick up the cube"
    robot.close()


@pytest.mark.parametrize("limit", [5.0, 5])
def test_a_relative_limit_of_lerobot_shows_in_what_was_executed(bus: FeetechBus, tmp_path: Path, limit: float) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path) | {"max_relative_target": limit}))
    start = robot.read().state
    executed = robot.write(start + np.float32([40, 0, 0, 0, 0, 0])).executed
    assert executed[0] == pytest.approx(start[0] + 5, abs=0.2)
    robot.close()


def test_common_limits_are_narrowed_to_this_arm(bus: FeetechBus, tmp_path: Path) -> None:
    wide = {"shoulder_pan.pos": DimensionConfig(low=-170, high=170)}
    robot = at_work(follower(calibrated(bus, tmp_path), dimensions=wide))
    assert robot.spec.action[0].high == 170
    far = robot.read().state
    far[0] = 160
    assert robot.write(far).executed[0] == pytest.approx(HALF_RANGE_DEG)
    robot.close()


def begin(robot: LeRobotRobot) -> None:
    """Reset it and go to its rest pose, as control does."""
    clock = MonotonicClock()
    motion = RestMotion(robot.spec, robot.reset("pick", 0), robot.read().state)
    due_ns = clock.now_ns()
    while (action := motion.next_action(robot.read().state)) is not None:
        motion.on_executed(robot.write(action).executed)
        due_ns += robot.spec.period_ns
        clock.sleep_until(due_ns)


def test_reset_goes_to_the_rest_pose_no_faster_than_told(bus: FeetechBus, tmp_path: Path) -> None:
    rest = {"shoulder_pan.pos": 40.0, "gripper.pos": 10.0}
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path), rest_pose=rest, rest_speed=0.5))
    robot.connect()
    started = time.monotonic()
    begin(robot)
    travel_s = (40 - 4.2) / (2 * HALF_RANGE_DEG * 0.5)
    assert time.monotonic() - started >= travel_s
    state = robot.read().state
    assert state[0] == pytest.approx(40, abs=0.05 * 2 * HALF_RANGE_DEG)
    assert state[5] == pytest.approx(10, abs=5)
    assert state[1] == pytest.approx(4.2, abs=0.2), "what the pose does not name stays"
    robot.close()


def test_a_blocked_joint_ends_the_reset_by_name(bus: FeetechBus, tmp_path: Path) -> None:
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path), rest_pose={"elbow_flex.pos": -60.0}, rest_speed=2.0))
    bus.servos[3].blocked = True
    robot.connect()
    with pytest.raises(RobotError, match=r"'elbow_flex.pos' is at 4.2 instead of -60.0"):
        begin(robot)
    robot.close()


def test_a_joint_may_be_as_far_off_its_rest_as_told(bus: FeetechBus, tmp_path: Path) -> None:
    rest = {"rest_pose": {"elbow_flex.pos": -60.0}, "rest_speed": 2.0, "rest_tolerance": 0.6}
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path), **rest))
    bus.servos[3].blocked = True
    robot.connect()
    begin(robot)
    assert robot.read().state[2] == pytest.approx(4.2, abs=0.2)
    robot.close()


@pytest.mark.parametrize("off", [True, False])
def test_torque_after_close_is_as_lerobot_is_configured(
    bus: FeetechBus, tmp_path: Path, off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path) | {"disable_torque_on_disconnect": off}))
    assert bus.torque(1)
    with caplog.at_level("INFO"):
        robot.close()
    assert bus.torque(1) is not off
    assert ("its torque goes off now" in caplog.text, "its torque stays on" in caplog.text) == (off, not off)


def test_stopped_from_another_thread_it_stays_where_it_is_on_its_way(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    far = np.array([60, 0, 0, 0, 0, 50], np.float32)
    start = float(robot.read().state[0])
    robot.write(far)
    wait_for(lambda: robot.read().state[0] > start + 5)
    stopper = threading.Thread(target=robot.stop_motion)
    stopper.start()
    while stopper.is_alive():
        robot.read()
    stopper.join()
    stopped = float(robot.read().state[0])
    time.sleep(0.3)
    # It goes back to where it was read, which on a busy machine is some degrees ago.
    assert float(robot.read().state[0]) == pytest.approx(stopped, abs=5.0) and stopped < 50
    robot.close()


def test_a_stop_does_not_wait_for_a_bus_that_another_call_has(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    asked, over = threading.Event(), threading.Event()
    robot._robot.get_observation = lambda: (asked.set(), over.wait(60), {})[2]
    reader = threading.Thread(target=robot._observe)
    reader.start()
    asked.wait(60)
    begun = time.monotonic()
    with pytest.raises(RobotError, match="its bus is taken by another call"):
        robot.stop_motion()
    assert time.monotonic() - begun < 1.0
    over.set()
    reader.join()


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_another_calibration_in_the_motors_is_refused_or_replaced(bus: FeetechBus, tmp_path: Path) -> None:
    fields = calibrated(bus, tmp_path)
    bus.calibrate({2: (900, 3000)})
    robot = LeRobotRobot(follower(fields))
    with pytest.raises(RobotError, match=r"hold another calibration than .*arm.json"):
        robot.connect()
    assert not bus.torque(2), "a robot that was refused is let go"
    robot = at_work(follower(fields, write_calibration=True))
    assert bus.servos[2].get(feetech_bus.MIN_LIMIT) == 1000
    assert bus.torque(2)
    robot.close()


def test_a_homing_offset_is_followed(tmp_path: Path) -> None:
    with FeetechBus(position=1500) as bus:
        robot = at_work(follower(calibrated(bus, tmp_path, offset=-500), write_calibration=True))
        assert robot.read().state[0] == pytest.approx(0, abs=0.1)
        robot.close()


def test_a_lost_packet_is_asked_for_again(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    bus.mute = 1
    assert np.isfinite(robot.read().state).all()
    assert bus.mute == 0
    robot.close()


def test_a_silent_bus_is_named_and_comes_back(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    bus.mute = 10**6
    with pytest.raises(RobotError, match=r"does not answer.*Check its cable and power"):
        robot.read()
    bus.mute = 0
    assert robot.read().state.shape == (6,)
    robot.close()


def test_a_port_that_is_not_there_is_named(bus: FeetechBus, tmp_path: Path) -> None:
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path) | {"port": str(tmp_path / "ttyACM9")}))
    with pytest.raises(RobotError, match=r"there is no serial port .*ttyACM9. There are: "):
        robot.connect()
    robot.close()


def test_a_missing_servo_is_named_and_a_later_connect_succeeds(bus: FeetechBus, tmp_path: Path) -> None:
    robot = LeRobotRobot(follower(calibrated(bus, tmp_path)))
    gone = bus.servos.pop(4)
    with pytest.raises(RobotError, match=r"(?s)Missing motor IDs.*4"):
        robot.connect()
    bus.servos[4] = gone
    robot.connect()
    robot.reset("pick", 0)
    robot.close()


def test_an_unplugged_arm_says_so_and_closes(bus: FeetechBus, tmp_path: Path) -> None:
    robot = at_work(follower(calibrated(bus, tmp_path)))
    bus.unplug()
    with pytest.raises(RobotError, match="so101_follower"):
        robot.read()
    with pytest.raises(RobotError, match="did not take its command"):
        robot.write(np.zeros(6, np.float32))
    robot.close()
    robot.close()
