"""The messages of each kind of output, against controllers that refuse what ros2_control's and MoveIt's refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ros import needs_ros
from wire.errors import ConfigError, InvalidDataError
from wire.types import CommandType, Dimension, RobotSpec

pytestmark = needs_ros

from hal.drivers.ros2 import commands  # noqa: E402
from hal.drivers.ros2.commands import Commander, TrajectoryMaker  # noqa: E402
from hal.drivers.ros2.config import IntegrationTarget, Ros2Config, WrenchTopic, robot_spec  # noqa: E402
from hal.drivers.ros2.output_config import ORIENTATION_AXES, POSITION_AXES, Output, OutputKind  # noqa: E402
from hal.drivers.ros2.stall import StallMonitor  # noqa: E402
from hal.registry import read_config  # noqa: E402
from tests.hal.drivers.ros2 import controllers as peers  # noqa: E402

MS = 1_000_000
PERIOD_NS = 20 * MS
NOW_NS = 5_000_000_000_000


def joints(*names: str) -> dict[str, Any]:
    return {name: peers.Joint(0.0) for name in names}


def trajectory_controller(**options: Any) -> Any:
    names = ["lift", "turn"]
    return peers.JointTrajectoryController(joints(*names), {"joints": names, **options})


def trajectory(before: list[float], target: list[float], stamp_ns: int = NOW_NS, stamped: bool = True) -> Any:
    maker = TrajectoryMaker(["lift", "turn"], PERIOD_NS, stamped)
    maker.make(np.array(before), stamp_ns - 10 * PERIOD_NS)
    return maker.make(np.array(target), stamp_ns)


class TestTrajectory:
    def test_it_starts_at_its_stamp_and_rests_at_its_target(self) -> None:
        message = trajectory([0.1, 0.2], [0.2, 0.2])
        first, last = message.points
        assert peers.nanoseconds(message.header.stamp) == NOW_NS
        assert [peers.nanoseconds(point.time_from_start) for point in (first, last)] == [30 * MS, 50 * MS]
        assert list(first.positions) == pytest.approx([0.15, 0.2])
        assert list(first.velocities) == pytest.approx([5.0, 0.0])
        assert list(last.positions) == [0.2, 0.2]
        assert list(last.velocities) == [0.0, 0.0]
        assert peers.nanoseconds(trajectory([0, 0], [0, 0], stamped=False).header.stamp) == 0

    def test_a_motion_in_steps_is_followed_without_stopping_and_never_beyond_a_target(self) -> None:
        controller, maker = trajectory_controller(), TrajectoryMaker(["lift", "turn"], PERIOD_NS)
        targets = np.cumsum([0.0, 0.001, 0.002, *[0.003] * 20, 0.002, 0.001, *[0.0] * 4])
        speeds: list[tuple[int, float]] = []
        for tick, target in enumerate(targets):
            sent_ns = NOW_NS + tick * PERIOD_NS
            # Late, and not evenly so.
            late_ns, next_late_ns = (1 + 3 * tick % 7) * MS, (1 + 3 * (tick + 1) % 7) * MS
            message = maker.make(np.array([target, 0.0]), sent_ns)
            assert controller.why_refused(message, sent_ns + late_ns) == ""
            controller.update(sent_ns + late_ns)
            controller.take("", message, sent_ns + late_ns)
            for now_ns in range(sent_ns + late_ns, sent_ns + PERIOD_NS + next_late_ns, MS):
                controller.update(now_ns)
                speeds.append((tick, controller.joints["lift"].velocity))
                assert controller.joints["lift"].position <= target + 1e-9
        steady = [speed for tick, speed in speeds if 5 <= tick <= 20]
        assert min(steady) == pytest.approx(0.15) and max(steady) == pytest.approx(0.15), "3 mm each 20 ms"
        assert max(speed for _, speed in speeds) < 0.1501, "no faster than it was told"
        assert min(speed for _, speed in speeds) > -1e-9, "never back"
        assert controller.joints["lift"].position == pytest.approx(targets[-1])
        assert controller.joints["lift"].velocity == 0.0

    def test_a_command_that_is_left_out_is_braked_for_and_gone_on_from(self) -> None:
        controller, maker = trajectory_controller(), TrajectoryMaker(["lift", "turn"], PERIOD_NS)
        for tick in (0, 1, 2, 5, 6, 7):
            now_ns = NOW_NS + tick * PERIOD_NS
            controller.update(now_ns)
            message = maker.make(np.array([0.001 * tick, 0.0]), now_ns)
            assert controller.why_refused(message, now_ns) == ""
            due = [peers.nanoseconds(point.time_from_start) for point in message.points]
            assert due == ([10 * MS] if tick in (1, 2, 6, 7) else []) + [30 * MS, 50 * MS]
            controller.take("", message, now_ns)

    def test_when_commands_end_it_comes_to_rest_at_the_last(self) -> None:
        controller = trajectory_controller()
        controller.take("", trajectory([0.0, 0.0], [0.01, 0.0]), NOW_NS)
        controller.update(NOW_NS + 10 * PERIOD_NS)
        assert (controller.joints["lift"].position, controller.joints["lift"].velocity) == (0.01, 0.0)

    def test_the_controller_refuses_what_it_is_documented_to(self) -> None:
        controller, good = trajectory_controller(), trajectory([0.0, 0.0], [0.1, 0.0])
        assert controller.why_refused(good, NOW_NS) == ""
        late = NOW_NS + 50 * MS + 1
        assert "ends in the past" in controller.why_refused(good, late)
        assert controller.why_refused(trajectory([0, 0], [0.1, 0], stamped=False), late) == "", "starts when it comes"
        names = TrajectoryMaker(["lift", "wheel"], PERIOD_NS).make(np.zeros(2), NOW_NS)
        assert "Incoming joint wheel" in controller.why_refused(names, NOW_NS)
        one = TrajectoryMaker(["lift"], PERIOD_NS).make(np.zeros(1), NOW_NS)
        assert "don't match the controller joints" in controller.why_refused(one, NOW_NS)
        assert trajectory_controller(allow_partial_joints_goal=True).why_refused(one, NOW_NS) == ""
        unordered = trajectory([0.0, 0.0], [0.1, 0.0])
        unordered.points[1].time_from_start = unordered.points[0].time_from_start
        assert "not strictly increasing" in controller.why_refused(unordered, NOW_NS)
        moving = trajectory([0.0, 0.0], [0.1, 0.0])
        moving.points[1].velocities[0] = 0.5
        assert "is not zero" in controller.why_refused(moving, NOW_NS)
        assert trajectory_controller(allow_nonzero_velocity_at_trajectory_end=True).why_refused(moving, NOW_NS) == ""
        short = trajectory([0.0, 0.0], [0.1, 0.0])
        short.points[0].positions = [0.1]
        assert "Mismatch between joint_names size and positions" in controller.why_refused(short, NOW_NS)


def twist_output(kind: OutputKind = OutputKind.twist_stamped) -> Output:
    frame = "base_link" if kind is OutputKind.twist_stamped else ""
    return Output(kind=kind, topic="t", dimensions=("ahead", "yaw"), axes=("linear.x", "angular.z"), frame_id=frame)


def test_a_base_takes_twists_while_they_are_fresh() -> None:
    options = {"left": "left", "right": "right"}
    controller = peers.DiffDriveController(joints("left", "right"), options)
    message = commands.twist(twist_output(), np.array([0.2, -0.5]), NOW_NS)
    assert message.header.frame_id == "base_link"
    assert (message.twist.linear.x, message.twist.angular.z, message.twist.linear.y) == (0.2, -0.5, 0.0)
    assert controller.why_refused(message, NOW_NS + 499 * MS) == ""
    assert "older than the allowed timeout" in controller.why_refused(message, NOW_NS + 500 * MS)
    controller.take("", message, NOW_NS)
    controller.update(NOW_NS)
    assert controller.left.velocity > controller.right.velocity > 0, "ahead, and to the right"
    controller.update(NOW_NS + 501 * MS)
    assert controller.left.velocity == controller.right.velocity == 0.0
    bare = peers.DiffDriveController(joints("left", "right"), {**options, "stamped": False})
    unstamped = commands.twist(twist_output(OutputKind.twist), np.array([0.2, -0.5]), NOW_NS)
    assert bare.why_refused(unstamped, NOW_NS) == ""
    assert unstamped.linear.x == 0.2


POSE = Output(
    kind=OutputKind.pose_stamped,
    topic="servo/pose_target_cmds",
    dimensions=("x", "y", "z", "qx", "qy", "qz", "qw"),
    axes=POSITION_AXES + ORIENTATION_AXES,
    frame_id="base_link",
)
POSE_SPEC = RobotSpec(
    "tip",
    tuple(Dimension(name, "m", -1.0, 1.0) for name in "xyz"),
    tuple(Dimension(name, "1", -1.0, 1.0) for name in POSE.dimensions),
    (),
    50.0,
)


def test_servo_takes_poses_in_a_frame_with_a_quaternion_of_length_1() -> None:
    servo = peers.MoveItServo(joints("x", "y", "z"), {"joints": ["x", "y", "z"], "command_type": "pose"})
    commander = Commander(POSE_SPEC, Ros2Config(POSE_SPEC, outputs=(POSE,)))
    raw = np.array([0.1, 0.2, 0.3, 0.0, 0.0, 0.5, 0.5], np.float32)
    assert "rotation is not valid" in servo.why_refused(commands.pose(POSE, raw.astype(float), NOW_NS), NOW_NS)
    fitted = commander.fit(raw)
    assert fitted.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.0, 0.0, 2**-0.5, 2**-0.5])
    message = commands.pose(POSE, fitted.astype(float), NOW_NS)
    assert servo.why_refused(message, NOW_NS) == ""
    assert "stale" in servo.why_refused(message, NOW_NS + 100 * MS)
    nowhere = commands.pose(replace(POSE, frame_id="attic"), fitted.astype(float), NOW_NS)
    assert "'attic' is empty or unknown" in servo.why_refused(nowhere, NOW_NS)
    assert "pose is expected" in servo.why_refused(commands.twist(twist_output(), np.array([0.1, 0.0]), NOW_NS), NOW_NS)
    with pytest.raises(InvalidDataError, match=r"qx, qy, qz, qw are .* which is no orientation"):
        commander.fit(np.array([0.1, 0.2, 0.3, 0.0, 0.0, 0.01, 0.0], np.float32))
    fixed = replace(POSE, dimensions=("x", "y", "z"), axes=POSITION_AXES, orientation=(1.0, 0.0, 0.0, 0.0))
    message = commands.pose(fixed, np.array([0.1, 0.2, 0.3]), NOW_NS)
    assert (message.pose.orientation.x, message.pose.orientation.w) == (1.0, 0.0)
    assert servo.why_refused(message, NOW_NS) == ""


def test_a_forward_controller_takes_as_many_numbers_as_it_has_joints() -> None:
    controller = peers.ForwardCommandController(joints("a", "b"), {"joints": ["b", "a"]})
    assert "command size (1) does not match" in controller.why_refused(commands.multi_array(np.zeros(1)), NOW_NS)
    controller.take("", commands.multi_array(np.array([0.25, 0.5])), NOW_NS)
    assert [joint.position for joint in controller.joints] == [0.25, 0.5], "in the order that they are named in"


# --- configuration ----------------------------------------------------------------------------------------------------

ROBOT = RobotSpec(
    "mobile",
    (Dimension("lift", "rad", -2.0, 2.0), Dimension("grip", "N", 0.0, 10.0), Dimension("wheel", "rad/s", -9.0, 9.0)),
    (
        Dimension("lift", "rad", -2.0, 2.0),
        Dimension("grip", "N", 0.0, 10.0),
        Dimension("ahead", "m/s", -0.5, 0.5, CommandType.velocity),
        Dimension("up", "m", -0.1, 0.1, CommandType.delta),
    ),
    (),
    50.0,
)
ARM = Output(kind=OutputKind.trajectory, topic="arm/joint_trajectory", dimensions=("lift", "up"))
GRIP = Output(kind=OutputKind.forward, topic="grip/commands", dimensions=("grip",), interface="effort", stall_s=0.0)
BASE = Output(
    kind=OutputKind.twist_stamped,
    topic="base/cmd_vel",
    dimensions=("ahead",),
    axes=("linear.x",),
    frame_id="base_link",
    timeout_s=0.5,
)
GOOD = Ros2Config(
    ROBOT,
    outputs=(ARM, GRIP, BASE),
    targets={"up": IntegrationTarget("lift")},
    fields={"grip": "effort", "wheel": "velocity"},
)


def test_every_dimension_goes_to_one_controller_that_can_take_it() -> None:
    assert robot_spec(GOOD) is ROBOT


def test_the_example_of_the_guide_can_be_used() -> None:
    text = (Path(__file__).parents[4] / "docs" / "ros2.md").read_text()
    blocks = [block for block in re.findall(r"```json\n(.*?)```", text, re.S) if '"outputs"' in block]
    assert len(blocks) == 1
    names = ("lift", "turn", "finger", "ahead", "yaw")
    wheel = Dimension("left_wheel", "rad/s", -9.0, 9.0)
    meanings = [CommandType.absolute] * 3 + [CommandType.velocity] * 2
    action = tuple(Dimension(name, "1", -1.0, 1.0, means) for name, means in zip(names, meanings, strict=True))
    spec = RobotSpec("mobile", (*action[:3], wheel), action, (), 20.0)
    robot_spec(replace(read_config("ros2", json.loads(blocks[0])), spec=spec))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(GOOD, outputs=(ARM, GRIP)), "no output takes ahead"),
        (replace(GOOD, outputs=(ARM, GRIP, BASE, replace(GRIP, topic="x"))), "'grip' is sent twice"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, topic=GRIP.topic))), "a topic of its own"),
        (replace(GOOD, outputs=(replace(ARM, dimensions=("lift", "upp")), GRIP, BASE)), "Did you mean 'up'"),
        (replace(GOOD, outputs=(replace(ARM, dimensions=()), GRIP, BASE)), "`dimensions` is empty"),
        (replace(GOOD, targets={}), "'up' commands delta values; this controller takes position.*`targets`"),
        (replace(GOOD, outputs=(ARM, replace(GRIP, interface="velocity"), BASE)), "'grip' commands absolute values"),
        (replace(GOOD, fields={}), "'grip' reads position and its command is effort"),
        (replace(GOOD, outputs=(replace(ARM, interface="velocity"), GRIP, BASE)), "`interface` is for kind forward"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, frame_id=" "))), "give the `frame_id`"),
        (replace(GOOD, outputs=(replace(ARM, frame_id="base"), GRIP, BASE)), "it takes no `frame_id`"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, axes=("linear",)))), "names 'linear'"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, axes=()))), "0 axes for 1 dimensions"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, timeout_s=0.02))), "it would stop and go"),
        (replace(GOOD, outputs=(ARM, GRIP, replace(BASE, stall_s=-1.0))), "stall_s is -1.0"),
        (replace(GOOD, outputs=(replace(ARM, measured={"lift": "lifd"}), GRIP, BASE)), "Did you mean 'lift'"),
        (replace(GOOD, wrenches=(WrenchTopic("ft", {"grip": "force.z"}),)), "'grip' comes from elsewhere already"),
        (replace(GOOD, wrenches=(WrenchTopic("ft", {"lift": "force.w"}),)), "Did you mean 'force"),
        (replace(GOOD, wrenches=(WrenchTopic("ft", {"lift": "force.z"}),)), "'lift' reads effort"),
        (Ros2Config(POSE_SPEC, outputs=(replace(POSE, orientation=(0.0, 0.0, 0.0, 2.0)),)), "a pose needs"),
        (
            Ros2Config(
                RobotSpec("tip", POSE_SPEC.state, POSE_SPEC.action[:3], (), 50.0),
                outputs=(replace(POSE, dimensions=("x", "y", "z"), axes=POSITION_AXES),),
            ),
            "or the first three and a fixed `orientation`",
        ),
    ],
)
def test_what_a_controller_would_not_take_is_refused_before_anything_moves(wrong: Ros2Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        robot_spec(wrong)


def test_an_orientation_is_measured_whole_or_not_at_all() -> None:
    half = RobotSpec("tip", (*POSE_SPEC.state, Dimension("qx", "1", -1.0, 1.0)), POSE_SPEC.action, (), 50.0)
    with pytest.raises(ConfigError, match="of qx, qy, qz, qw only qx are measured"):
        robot_spec(Ros2Config(half, outputs=(POSE,)))


def test_a_robot_with_controllers_does_not_wait_for_what_they_never_say() -> None:
    with pytest.raises(ConfigError, match=r"executed .* `outputs` says none"):
        replace(GOOD, executed=True)


# --- a controller that does not follow --------------------------------------------------------------------------------


def monitor(output: Output, **measured: str) -> StallMonitor:
    return StallMonitor(ROBOT, output, measured, {"wheel": "velocity"})


def noted(watch: StallMonitor, sent: list[float], measured: list[float], at_s: float) -> str:
    return watch.note(np.array(sent, np.float32), np.array(measured, np.float32), int(at_s * 1e9))


class TestStall:
    def test_a_target_that_runs_away_from_a_robot_at_rest_is_an_error_until_it_begins_anew(self) -> None:
        watch = monitor(ARM)
        for tenth in range(20):
            assert noted(watch, [0.02 * tenth, 0, 0, 0], [0.0, 0, 0], tenth / 10) == ""
        assert "nothing has moved for 2 s although lift should" in noted(watch, [1.0, 0, 0, 0], [0.0, 0, 0], 4.2)
        assert noted(watch, [0.0, 0, 0, 0], [0.0, 0, 0], 4.3), "its next target is no better"
        watch.restart()
        assert noted(watch, [1.0, 0, 0, 0], [0.0, 0, 0], 5.0) == ""

    def test_a_robot_that_is_slow_or_there_is_left_alone(self) -> None:
        watch = monitor(ARM)
        for second in range(30):
            assert noted(watch, [1.0, 0, 0, 0], [0.01 * second, 0, 0], second) == "", "it moves"
        for second in range(30, 60):
            assert noted(watch, [1.0, 0, 0, 0], [0.95, 0, 0], second) == "", "it is there"

    def test_a_robot_that_stops_on_its_way_is_named(self) -> None:
        watch = monitor(ARM)
        for second in range(5):
            assert noted(watch, [1.0, 0, 0, 0], [0.1 * second, 0, 0], second) == ""
        assert "lift should" in noted(watch, [1.0, 0, 0, 0], [0.4, 0, 0], 7.0)

    def test_a_base_that_is_driven_and_whose_wheels_stand_is_named(self) -> None:
        watch = monitor(BASE, ahead="wheel")
        for second in range(10):
            assert noted(watch, [0, 0, 0.2, 0], [0, 0, 2.0], second) == "", "at a constant speed"
        for second in range(10, 13):
            assert noted(watch, [0, 0, 0.0, 0], [0, 0, 0.0], second) == "", "told to stand"
        said = [noted(watch, [0, 0, 0.2, 0], [0, 0, 0.0], second) for second in range(20, 24)]
        assert said[0] == "" and "ahead should" in said[-1]

    def test_what_nobody_measures_is_not_watched(self) -> None:
        watch = monitor(BASE)
        assert [noted(watch, [0, 0, 0.2, 0], [0, 0, 0], second) for second in range(9)] == [""] * 9
