"""The driver `ros2` on controllers in another process: they take what it sends, and what they do not do is named."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ros import needs_ros, wait_until
from tests.ros import ros as ros
from wire.errors import ConfigError, RobotError
from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

pytestmark = [needs_ros, pytest.mark.slow]

from hal.drivers.ros2.config import DepthRange, ImageTopic, QosConfig, Ros2Config, WrenchTopic  # noqa: E402
from hal.drivers.ros2.output_config import ORIENTATION_AXES, POSITION_AXES, Output, OutputKind  # noqa: E402
from hal.drivers.ros2.robot import Ros2Robot  # noqa: E402
from hal.drivers.ros2.wrapper import RosNode  # noqa: E402
from hal.safety.limited_robot import LimitedRobot  # noqa: E402
from hal.safety.limits import SafetyLimits  # noqa: E402
from hal.safety.required import proposed_limits, require_limits  # noqa: E402

PROGRAM = Path(__file__).with_name("controllers.py")
HZ = 20.0
PATIENT = {"max_age_s": 5.0, "connect_timeout_s": 30.0, "max_skew_s": 5.0}


class Witness:
    """What the controllers report."""

    def __init__(self) -> None:
        self.node = RosNode("witness")
        self.node.open()
        self.controllers: dict[str, Any] = {}
        self.joints: dict[str, list[float]] = {}
        self.heard = 0
        self.node.subscribe("std_msgs/msg/String", "report", self._on_report)

    def _on_report(self, message: Any) -> None:
        said = json.loads(message.data)
        self.controllers |= said["controllers"]
        self.joints |= said["joints"]
        self.heard += 1

    def settle(self) -> None:
        """Until what was sent so far is in a report."""
        heard = self.heard
        wait_until(lambda: self.heard > heard + 20)

    @property
    def refused(self) -> list[str]:
        """Why commands were, except for coming late on a busy machine."""
        late = ("in the past", "older than", "is stale")
        every = [why for one in self.controllers.values() for why in one["refused"]]
        return [why for why in every if not any(words in why for words in late)]


@contextlib.contextmanager
def running(witness: Witness, **options: Any) -> Iterator[subprocess.Popen]:
    """`controllers.py` in a process of its own, which `witness` hears of; ended at the end."""
    process = subprocess.Popen([sys.executable, str(PROGRAM), json.dumps(options)])
    try:
        witness.settle()
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


@pytest.fixture
def witness(ros: Mapping[str, str]) -> Iterator[Witness]:
    made = Witness()
    yield made
    made.node.close()


def drive(robot: LimitedRobot | Ros2Robot, actions: Iterator[list[float]] | list[list[float]]) -> None:
    """One action each control period."""
    due = time.monotonic()
    for action in actions:
        robot.write(np.array(action, np.float32))
        due += 1 / HZ
        time.sleep(max(due - time.monotonic(), 0.0))


def joint(name: str, unit: str = "rad", most: float = 2.0) -> Dimension:
    return Dimension(name, unit, -most, most)


def speed(name: str, unit: str, most: float) -> Dimension:
    return Dimension(name, unit, -most, most, CommandType.velocity)


MOBILE = RobotSpec(
    "mobile",
    (joint("lift"), joint("turn"), joint("finger", "m", 0.1), joint("left", "rad/s", 20.0)),
    (joint("lift"), joint("turn"), joint("finger", "m", 0.1), speed("ahead", "m/s", 0.5), speed("yaw", "rad/s", 1.0)),
    (),
    HZ,
)
ARM = Output(kind=OutputKind.trajectory, topic="arm/joint_trajectory", dimensions=("lift", "turn"))
FINGER = Output(kind=OutputKind.forward, topic="gripper/commands", dimensions=("finger",), stall_s=0.0)
BASE = Output(
    kind=OutputKind.twist_stamped,
    topic="base/cmd_vel",
    dimensions=("ahead", "yaw"),
    axes=("linear.x", "angular.z"),
    frame_id="base_link",
    timeout_s=0.5,
    measured={"ahead": "left"},
)
CONFIG = Ros2Config(MOBILE, outputs=(ARM, FINGER, BASE), fields={"left": "velocity"}, **PATIENT)
JOINTS = {"lift": 0.2, "turn": -0.1, "finger": 0.03, "left": 0.0, "right": 0.0}
ARM_PEER = {"type": "joint_trajectory_controller", "joints": ["lift", "turn"]}
FINGER_PEER = {"type": "forward_command_controller", "joints": ["finger"]}
# Without a timeout of its own soon: what stops it here is what it is told.
BASE_PEER = {"type": "diff_drive_controller", "left": "left", "right": "right", "cmd_vel_timeout": 600.0}
LIMITS = SafetyLimits(
    velocity={"lift": 0.5, "turn": 0.5, "finger": 0.2, "ahead": 0.3, "yaw": 0.5},
    acceleration={"lift": 4.0, "turn": 4.0, "finger": 2.0, "ahead": 2.0, "yaw": 4.0},
)


@contextlib.contextmanager
def connected(config: Ros2Config, limits: SafetyLimits | None = None) -> Iterator[LimitedRobot]:
    robot = LimitedRobot(Ros2Robot(config), limits)
    try:
        robot.connect()
        robot.reset("anything", 0)
        yield robot
    finally:
        robot.close()


def test_arm_gripper_and_base_take_what_is_theirs_and_stand_when_it_closes(witness: Witness) -> None:
    with running(witness, joints=JOINTS, controllers={"arm": ARM_PEER, "gripper": FINGER_PEER, "base": BASE_PEER}):
        with connected(CONFIG, LIMITS) as robot:
            robot.read()
            drive(robot, [[2.0, -0.1, 0.08, 0.5, 0.0]] * 20)
            wait_until(lambda: witness.joints["left"][1] > 2.9)
            driven = dict(witness.joints)
            assert 0.3 < driven["lift"][0] < 0.2 + 0.5 * 20 / HZ + 0.01, "at the limit of its velocity"
            assert driven["left"][1] == driven["right"][1] == pytest.approx(3.0, abs=1e-5), "0.3 m/s on 0.1 m wheels"
            wait_until(lambda: witness.joints["finger"][0] == pytest.approx(0.08))
        wait_until(lambda: witness.joints["left"][1] == 0.0)
        witness.settle()
        still = dict(witness.joints)
        witness.settle()
        assert witness.joints == still
        assert still["turn"][0] == pytest.approx(-0.1, abs=1e-6)
        assert not witness.refused
        assert all(15 < one["taken"] <= 22 for one in witness.controllers.values()), "connecting and closing it too"


SLOW_ARM = RobotSpec("slow", (joint("lift"),), (joint("lift"),), (), 2.0)


def test_closed_on_its_way_an_arm_stays_where_it_is_measured(witness: Witness) -> None:
    output = replace(ARM, dimensions=("lift",))
    peer = {"type": "joint_trajectory_controller", "joints": ["lift"]}
    with running(witness, joints={"lift": 0.2}, controllers={"arm": peer}):
        robot = Ros2Robot(Ros2Config(SLOW_ARM, outputs=(output,), **PATIENT))
        robot.connect()
        robot.reset("anything", 0)
        robot.write(np.array([2.0], np.float32))
        wait_until(lambda: witness.joints["lift"][0] > 0.4)
        robot.close()
        wait_until(lambda: witness.controllers["arm"]["taken"] == 2)
        wait_until(lambda: witness.joints["lift"][1] == 0.0)
        # it goes by what it had last heard, which may be some ticks old
        assert 0.25 < witness.joints["lift"][0] < 1.9
        assert not witness.refused


@pytest.mark.parametrize("measured", [True, False])
def test_closed_while_it_grips_it_goes_on_gripping(witness: Witness, measured: bool) -> None:
    grip = Dimension("grip", "N", 0.0, 10.0)
    output = replace(FINGER, dimensions=("grip",), interface="effort")
    peer = {**FINGER_PEER, "interface_name": "effort"}
    config = Ros2Config(
        RobotSpec("gripper", (joint("finger", "m", 0.1),), (grip,), (), HZ), outputs=(output,), **PATIENT
    )
    if measured:
        spec = RobotSpec("gripper", (grip,), (grip,), (), HZ)
        config = replace(config, spec=spec, joints={"grip": "finger"}, fields={"grip": "effort"})
    with running(witness, joints={"finger": 0.03}, controllers={"gripper": peer}):
        robot = Ros2Robot(config)
        robot.connect()
        robot.reset("anything", 0)
        robot.write(np.array([4.0], np.float32))
        wait_until(lambda: witness.joints["finger"][2] == 4.0)
        robot.close()
        witness.settle()
        assert witness.joints["finger"] == [0.03, 0.0, 4.0]
        assert witness.controllers["gripper"]["taken"] == 1


def test_a_real_robot_on_controllers_does_not_run_without_limits() -> None:
    with pytest.raises(ConfigError, match="is real and may not run a policy: no velocity limit of lift, turn"):
        require_limits(Ros2Robot(CONFIG), SafetyLimits())
    require_limits(Ros2Robot(CONFIG), proposed_limits(MOBILE))
    require_limits(Ros2Robot(replace(CONFIG, simulated=True)), SafetyLimits())


CARTESIAN = tuple(joint(name, "m", 1.0) for name in "xyz")
QUATERNION = tuple(joint(name, "1", 1.0) for name in ("qx", "qy", "qz", "qw"))
SERVO = {"type": "moveit_servo", "joints": ["x", "y", "z"]}


def test_servo_follows_twists_until_it_closes(witness: Witness) -> None:
    axes = ("linear.x", "linear.y", "linear.z")
    output = Output(
        kind=OutputKind.twist_stamped,
        topic="servo/delta_twist_cmds",
        dimensions=("vx", "vy", "vz"),
        axes=axes,
        frame_id="base_link",
        measured={"vx": "x"},
    )
    twist = {**SERVO, "command_type": "twist", "incoming_command_timeout": 600.0}
    spec = RobotSpec("tip", CARTESIAN, tuple(speed(f"v{axis}", "m/s", 0.2) for axis in "xyz"), (), HZ)
    with running(witness, joints=dict.fromkeys("xyz", 0.1), controllers={"servo": twist}):
        robot = Ros2Robot(Ros2Config(spec, outputs=(output,), **PATIENT))
        robot.connect()
        robot.reset("anything", 0)
        drive(robot, [[0.2, 0.0, -0.1]] * 10)
        wait_until(lambda: witness.joints["x"][0] > 0.15 and witness.joints["z"][0] < 0.09)
        robot.close()
        witness.settle()
        assert witness.joints["x"][1] == 0.0
        assert witness.joints["y"] == [0.1, 0.0, 0.0]
        assert not witness.refused


def test_servo_follows_poses(witness: Witness) -> None:
    output = Output(
        kind=OutputKind.pose_stamped,
        topic="servo/pose_target_cmds",
        dimensions=("x", "y", "z", "qx", "qy", "qz", "qw"),
        axes=POSITION_AXES + ORIENTATION_AXES,
        frame_id="base_link",
    )
    spec = RobotSpec("tip", CARTESIAN, CARTESIAN + QUATERNION, (), HZ)
    with running(witness, joints=dict.fromkeys("xyz", 0.1), controllers={"servo": {**SERVO, "command_type": "pose"}}):
        robot = Ros2Robot(Ros2Config(spec, outputs=(output,), **PATIENT))
        robot.connect()
        robot.reset("anything", 0)
        done = robot.write(np.array([0.3, 0.1, 0.1, 0, 0, 0.5, 0.5], np.float32))
        assert done.executed[3:].tolist() == pytest.approx([0, 0, 2**-0.5, 2**-0.5]), "as it was sent"
        drive(robot, [[0.3, 0.1, 0.1, 0, 0, 0.5, 0.5]] * 20)
        wait_until(lambda: witness.joints["x"][0] == pytest.approx(0.3, abs=0.01))
        # Closed on its way, it stays where it is measured.
        drive(robot, [[-0.9, 0.1, 0.1, 0, 0, 0.5, 0.5]] * 2)
        robot.close()
        witness.settle()
        assert witness.joints["x"][0] > 0.1
        assert not witness.refused


# --- what cannot be commanded -----------------------------------------------------------------------------------------


def test_a_controller_that_is_not_there_or_takes_something_else_is_named(witness: Witness) -> None:
    controllers = {"arm": {**ARM_PEER, "transient_local": True}, "base": {**BASE_PEER, "stamped": False}}
    robot = Ros2Robot(replace(CONFIG, connect_timeout_s=4.0))
    with running(witness, joints=JOINTS, controllers=controllers):
        with pytest.raises(RobotError, match="It cannot be commanded") as raised:
            robot.connect()
        said = str(raised.value)
        assert "'/arm/joint_trajectory' is taken by /arm with another quality of service" in said
        assert "Volatile publisher" in said
        assert "nobody listens on '/gripper/commands'" in said
        assert "'/base/cmd_vel' is taken by /base as geometry_msgs/msg/Twist, not as geometry_msgs/msg/Twist" in said
        witness.settle()
        assert all(one["taken"] == 0 for one in witness.controllers.values()), "nobody was sent anything"
        slack = Ros2Robot(replace(CONFIG, connect_timeout_s=4.0, qos=QosConfig(command="best_effort")))
        with pytest.raises(RobotError, match="eliab"):
            slack.connect()


def test_a_base_that_a_killed_process_left_driving_is_stopped_though_the_robot_is(witness: Witness) -> None:
    with running(witness, joints=JOINTS, controllers={"arm": ARM_PEER, "gripper": FINGER_PEER, "base": BASE_PEER}):
        killed = Ros2Robot(CONFIG)
        killed.connect()
        killed.reset("anything", 0)
        drive(killed, [[0.2, -0.1, 0.03, 0.2, 0.0]] * 5)
        wait_until(lambda: witness.joints["left"][1] > 1.9)
        killed._release()
        arm = witness.controllers["arm"]["taken"]
        robot = LimitedRobot(Ros2Robot(CONFIG), LIMITS)
        robot.stop("1", "anna")
        robot.connect()
        wait_until(lambda: witness.joints["left"][1] == 0.0)
        assert witness.controllers["arm"]["taken"] == arm
        robot.close()


def test_a_controller_that_goes_away_stops_the_base_and_sends_nobody_a_target(witness: Witness) -> None:
    with running(witness, joints=JOINTS, controllers={"arm": ARM_PEER, "base": BASE_PEER}):
        with running(
            witness, joints={"finger": 0.03}, broadcast=False, name="other", controllers={"gripper": FINGER_PEER}
        ) as other:
            robot = Ros2Robot(CONFIG)
            robot.connect()
            robot.reset("anything", 0)
            action = [0.25, -0.1, 0.03, 0.2, 0.0]
            drive(robot, [action] * 5)
            wait_until(lambda: witness.joints["left"][1] > 1.9)
            other.terminate()
            other.wait(30)

            def lost() -> bool:
                try:
                    drive(robot, [action])
                except RobotError as error:
                    return "nobody listens on '/gripper/commands'" in str(error) and "not sent" in str(error)
                return False

            wait_until(lost)
        wait_until(lambda: witness.joints["left"][1] == 0.0)
        witness.settle()
        taken = witness.controllers["arm"]["taken"]
        with pytest.raises(RobotError, match="nobody listens"):
            robot.write(np.array([0.5, 0.5, 0.0, 0.5, 0.0], np.float32))
        witness.settle()
        assert witness.controllers["arm"]["taken"] == taken
        assert witness.joints["left"][1] == 0.0
        robot.close()


def test_a_controller_that_is_not_active_is_named_and_no_target_runs_away(witness: Witness) -> None:
    outputs = (replace(ARM, stall_s=0.5), FINGER, BASE)
    controllers = {"arm": {**ARM_PEER, "active": False}, "gripper": FINGER_PEER, "base": BASE_PEER}
    with (
        running(witness, joints=JOINTS, controllers=controllers),
        connected(replace(CONFIG, outputs=outputs), LIMITS) as robot,
    ):
        robot.read()
        with pytest.raises(
            RobotError, match=r"although lift should.* '/arm/joint_trajectory'; the command was not sent"
        ):
            drive(robot, [[2.0, -0.1, 0.03, 0.0, 0.0]] * 60)
        witness.settle()
        taken = witness.controllers["gripper"]["taken"]
        with pytest.raises(RobotError, match="although lift should"):
            robot.hold()
        witness.settle()
        assert witness.controllers["gripper"]["taken"] == taken
        robot.robot.reset("anything", 0)
        assert robot.robot.write(np.array([0.2, -0.1, 0.03, 0.0, 0.0], np.float32)).executed[0] == pytest.approx(0.2)


# --- wrench and depth -------------------------------------------------------------------------------------------------


def test_forces_are_state_and_distances_are_a_picture(witness: Witness) -> None:
    spec = RobotSpec(
        "feeling",
        (joint("lift"), Dimension("push", "N", -100.0, 100.0), Dimension("twist", "N.m", -9.0, 9.0)),
        (joint("lift"),),
        (CameraSpec("deep", 2, 2, 30.0),),
        HZ,
    )
    config = Ros2Config(
        spec,
        wrenches=(WrenchTopic("ft", {"push": "force.z", "twist": "torque.x"}),),
        cameras={"deep": ImageTopic("depth/image", depth=DepthRange(0.5, 2.5))},
        **PATIENT,
    )
    robot = Ros2Robot(replace(config, max_age_s=3.0))
    with running(witness, joints={"lift": 0.5}, wrench="ft", depth="depth/image"):
        robot.connect()
        robot.reset("anything", 0)
        seen = robot.read()
        assert seen.state.tolist() == [0.5, -9.5, 0.25]
        assert seen.images["deep"].image[..., 0].tolist() == [[0, 1], [128, 255]], "none, 0.5 m, half way, farther"
        assert seen.images["deep"].image.shape == (2, 2, 3)
        robot.close()
    with running(witness, joints={"lift": 0.5}, depth="depth/image"):
        robot = Ros2Robot(replace(config, connect_timeout_s=3.0))
        robot.connect()
        with pytest.raises(RobotError, match="nothing on /ft after the reset"):
            robot.reset("anything", 0)
        robot.close()
