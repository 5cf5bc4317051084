"""Controllers as ros2_control and MoveIt Servo document them, on rclpy alone: `python controllers.py OPTIONS`, JSON.

A stand-in for `ros2_control_node` with mock hardware: it refuses what they refuse, stops after their timeouts, and says
on `/report` what it took and what not. It knows nothing of this project, and nothing of this project is imported.

- joint_trajectory_controller, forward_command_controller, diff_drive_controller: control.ros.org, ros2_controllers
- MoveIt Servo: moveit.picknik.ai, "Realtime Servo"
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections import Counter
from typing import Any

import rclpy
from geometry_msgs.msg import PoseStamped, Twist, TwistStamped, WrenchStamped
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float64MultiArray, String
from trajectory_msgs.msg import JointTrajectory

RATE_HZ = 100.0
FLOAT_EPSILON = 1.1920929e-07


class Joint:
    def __init__(self, position: float) -> None:
        self.position = position
        self.velocity = self.effort = 0.0


Joints = dict[str, Joint]


def nanoseconds(time: Any) -> int:
    return time.sec * 1_000_000_000 + time.nanosec


class JointTrajectoryController:
    """Spline interpolation; `allow_nonzero_velocity_at_trajectory_end` and `allow_partial_joints_goal` as given."""

    types = (("joint_trajectory", JointTrajectory),)

    def __init__(self, joints: Joints, options: dict[str, Any]) -> None:
        self.joints = joints
        self.names: list[str] = options["joints"]
        self.partial = options.get("allow_partial_joints_goal", False)
        self.may_end_moving = options.get("allow_nonzero_velocity_at_trajectory_end", False)
        self.message: Any = None
        self.start_ns = self.heard_ns = 0
        self.origin: dict[str, tuple[float, float]] = {}

    def why_refused(self, message: Any, now_ns: int) -> str:
        names, points = list(message.joint_names), list(message.points)
        if not names:
            return "Empty joint names on incoming trajectory."
        if not self.partial and len(names) != len(self.names):
            return "Joints on incoming trajectory don't match the controller joints."
        if not points:
            return "Empty trajectory received."
        for name in names:
            if name not in self.names:
                return f"Incoming joint {name} doesn't match the controller's joints."
        if not self.may_end_moving:
            for name, velocity in zip(names, points[-1].velocities, strict=False):
                if abs(velocity) > FLOAT_EPSILON:
                    return f"Velocity of last trajectory point of joint {name} is not zero: {velocity}"
        start_ns = nanoseconds(message.header.stamp)
        if start_ns and start_ns + nanoseconds(points[-1].time_from_start) < now_ns:
            return "Received trajectory with non-zero start time that ends in the past"
        before_ns = 0
        for index, point in enumerate(points):
            time_ns = nanoseconds(point.time_from_start)
            if index and time_ns <= before_ns:
                return f"Time between points {index - 1} and {index} is not strictly increasing"
            before_ns = time_ns
            for field in ("positions", "velocities", "accelerations"):
                values = getattr(point, field)
                if (values or field == "positions") and len(values) != len(names):
                    return f"Mismatch between joint_names size and {field} at point #{index}."
            if point.effort:
                return "No effort command interface: effort must be empty."
        return ""

    def take(self, _: str, message: Any, now_ns: int) -> None:
        self.message, self.heard_ns = message, now_ns
        self.start_ns = nanoseconds(message.header.stamp) or now_ns
        self.origin = {name: (self.joints[name].position, self.joints[name].velocity) for name in message.joint_names}

    def sample(self, index: int, now_ns: int) -> tuple[float, float]:
        """(position, velocity) of one of the message's joints: cubic, or linear where there are no velocities."""
        position, velocity = self.origin[self.message.joint_names[index]]
        at_ns, has_velocity = self.heard_ns, True
        for point in self.message.points:
            end_ns = self.start_ns + nanoseconds(point.time_from_start)
            end, ends_with = point.positions[index], bool(point.velocities)
            speed = point.velocities[index] if ends_with else 0.0
            if now_ns < end_ns:
                span = (end_ns - at_ns) / 1e9
                t = (now_ns - at_ns) / (end_ns - at_ns)
                if not (ends_with and has_velocity):
                    return position + t * (end - position), (end - position) / span
                gap, a, b = end - position, velocity * span, speed * span
                c2, c3 = 3 * gap - 2 * a - b, a + b - 2 * gap
                return position + t * (a + t * (c2 + t * c3)), (a + t * (2 * c2 + 3 * t * c3)) / span
            position, velocity, at_ns, has_velocity = end, speed, end_ns, ends_with
        return position, 0.0

    def update(self, now_ns: int) -> None:
        if self.message is not None:
            for index, name in enumerate(self.message.joint_names):
                self.joints[name].position, self.joints[name].velocity = self.sample(index, now_ns)


class ForwardCommandController:
    types = (("commands", Float64MultiArray),)

    def __init__(self, joints: Joints, options: dict[str, Any]) -> None:
        self.joints = [joints[name] for name in options["joints"]]
        self.interface = options.get("interface_name", "position")

    def why_refused(self, message: Any, now_ns: int) -> str:
        if len(message.data) != len(self.joints):
            return f"command size ({len(message.data)}) does not match number of interfaces ({len(self.joints)})"
        return ""

    def take(self, _: str, message: Any, now_ns: int) -> None:
        for joint, value in zip(self.joints, message.data, strict=True):
            setattr(joint, self.interface, value)

    def update(self, now_ns: int) -> None:
        if self.interface == "velocity":
            for joint in self.joints:
                joint.position += joint.velocity / RATE_HZ


class DiffDriveController:
    """`stamped` False is what takes Twist, such as Humble's `~/cmd_vel_unstamped`."""

    def __init__(self, joints: Joints, options: dict[str, Any]) -> None:
        self.left, self.right = joints[options["left"]], joints[options["right"]]
        self.timeout_ns = int(options.get("cmd_vel_timeout", 0.5) * 1e9)
        self.radius, self.separation = 0.1, 0.4
        self.stamped = options.get("stamped", True)
        self.types = (("cmd_vel", TwistStamped if self.stamped else Twist),)
        self.stamp_ns = 0
        self.linear = self.angular = 0.0

    def _stamp(self, message: Any, now_ns: int) -> int:
        # A stamp of zero is taken for now.
        return (nanoseconds(message.header.stamp) or now_ns) if self.stamped else now_ns

    def why_refused(self, message: Any, now_ns: int) -> str:
        twist = message.twist if self.stamped else message
        if not (math.isfinite(twist.linear.x) and math.isfinite(twist.angular.z)):
            return "Velocity command is not finite."
        if self.timeout_ns and now_ns - self._stamp(message, now_ns) >= self.timeout_ns:
            return "Ignoring the received message because it is older than the allowed timeout"
        return ""

    def take(self, _: str, message: Any, now_ns: int) -> None:
        twist = message.twist if self.stamped else message
        self.stamp_ns = self._stamp(message, now_ns)
        self.linear, self.angular = twist.linear.x, twist.angular.z

    def update(self, now_ns: int) -> None:
        if self.timeout_ns and now_ns - self.stamp_ns > self.timeout_ns:
            self.linear = self.angular = 0.0
        turn = self.angular * self.separation / 2
        for wheel, speed in ((self.left, self.linear - turn), (self.right, self.linear + turn)):
            wheel.velocity = speed / self.radius
            wheel.position += wheel.velocity / RATE_HZ


class MoveItServo:
    """Of a robot whose first three joints are x, y and z of its tip; `command_type`: what its service was set to."""

    types = (("delta_twist_cmds", TwistStamped), ("pose_target_cmds", PoseStamped))

    def __init__(self, joints: Joints, options: dict[str, Any]) -> None:
        self.axes = [joints[name] for name in options["joints"]]
        self.command_type = options["command_type"]
        self.timeout_ns = int(options.get("incoming_command_timeout", 0.1) * 1e9)
        self.frames: list[str] = options.get("frames", ["base_link"])
        self.newest: Any = None

    def why_refused(self, message: Any, now_ns: int) -> str:
        kind = "twist" if isinstance(message, TwistStamped) else "pose"
        if kind != self.command_type:
            return f"{kind} command while {self.command_type} is expected"
        if message.header.frame_id not in self.frames:
            return f"frame '{message.header.frame_id}' is empty or unknown"
        if now_ns - nanoseconds(message.header.stamp) >= self.timeout_ns:
            return "command is stale, will not process"
        body = message.twist if kind == "twist" else message.pose
        parts = (body.linear, body.angular) if kind == "twist" else (body.position, body.orientation)
        values = [getattr(part, name) for part in parts for name in part.get_fields_and_field_types()]
        if not all(map(math.isfinite, values)):
            return "command holds what is no number"
        if kind == "pose" and abs(math.hypot(*values[3:]) - 1) > 1e-5:
            return "rotation is not valid"
        return ""

    def take(self, _: str, message: Any, now_ns: int) -> None:
        self.newest = message

    def update(self, now_ns: int) -> None:
        message, speeds = self.newest, [0.0] * 3
        if message is not None and now_ns - nanoseconds(message.header.stamp) < self.timeout_ns:
            if self.command_type == "twist":
                speeds = [message.twist.linear.x, message.twist.linear.y, message.twist.linear.z]
            else:
                goal = message.pose.position
                gaps = [to - one.position for to, one in zip((goal.x, goal.y, goal.z), self.axes, strict=True)]
                speeds = [min(max(gap * RATE_HZ, -0.5), 0.5) for gap in gaps]
        for axis, speed in zip(self.axes, speeds, strict=True):
            axis.velocity = speed
            axis.position += speed / RATE_HZ


TYPES = {
    "joint_trajectory_controller": JointTrajectoryController,
    "forward_command_controller": ForwardCommandController,
    "diff_drive_controller": DiffDriveController,
    "moveit_servo": MoveItServo,
}


class Manager(Node):
    """Joint states, a report, and each controller on a node of its own name; sensors where they are wanted."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options.get("name", "controller_manager"))
        self.joints = {name: Joint(position) for name, position in options["joints"].items()}
        self.reports: dict[str, dict[str, Any]] = {}
        self.controllers: list[Any] = []
        self.nodes: list[Node] = [self]
        for name, one in options.get("controllers", {}).items():
            self._load(name, one)
        self.states = self.create_publisher(JointState, "joint_states", 10) if options.get("broadcast", True) else None
        self.report = self.create_publisher(String, "report", 10)
        self.wrench = self.create_publisher(WrenchStamped, options["wrench"], 10) if "wrench" in options else None
        self.depth = self.create_publisher(Image, options["depth"], 4) if "depth" in options else None
        self.create_timer(1 / RATE_HZ, self.update)

    def _load(self, name: str, options: dict[str, Any]) -> None:
        controller = TYPES[options["type"]](self.joints, options)
        report = self.reports[name] = {"taken": 0, "refused": Counter()}
        node = Node(name)
        quality = QoSProfile(depth=10)
        if options.get("transient_local"):
            quality.durability = DurabilityPolicy.TRANSIENT_LOCAL
        # One that is loaded and not active hears its commands and drops them.
        active = options.get("active", True)

        def on_message(topic: str, message: Any) -> None:
            now_ns = self.get_clock().now().nanoseconds
            if not active:
                return
            why = controller.why_refused(message, now_ns)
            if why:
                report["refused"][why] += 1
            else:
                report["taken"] += 1
                controller.take(topic, message, now_ns)

        for topic, kind in controller.types:
            node.create_subscription(kind, f"{name}/{topic}", lambda m, topic=topic: on_message(topic, m), quality)
        self.controllers.append(controller)
        self.nodes.append(node)

    def update(self) -> None:
        now = self.get_clock().now()
        for controller in self.controllers:
            controller.update(now.nanoseconds)
        if self.states is not None:
            message = JointState(name=list(self.joints))
            message.header.stamp = now.to_msg()
            for field in ("position", "velocity", "effort"):
                setattr(message, field, [getattr(joint, field) for joint in self.joints.values()])
            self.states.publish(message)
        if self.wrench is not None:
            felt = WrenchStamped()
            felt.header.stamp = now.to_msg()
            felt.wrench.force.z, felt.wrench.torque.x = -9.5, 0.25
            self.wrench.publish(felt)
        if self.depth is not None:
            picture = Image(height=2, width=2, encoding="16UC1", step=4)
            picture.header.stamp = now.to_msg()
            picture.data = b"".join(mm.to_bytes(2, "little") for mm in (0, 500, 1500, 9000))
            self.depth.publish(picture)
        joints = {name: [one.position, one.velocity, one.effort] for name, one in self.joints.items()}
        self.report.publish(String(data=json.dumps({"controllers": self.reports, "joints": joints})))


def main() -> None:
    rclpy.init()
    manager = Manager(json.loads(sys.argv[1]))
    executor = SingleThreadedExecutor()
    for node in manager.nodes:
        executor.add_node(node)
    signal.signal(signal.SIGTERM, lambda *_: rclpy.try_shutdown())
    with contextlib.suppress(ExternalShutdownException, KeyboardInterrupt):
        executor.spin()
    rclpy.try_shutdown()


if __name__ == "__main__":
    main()
