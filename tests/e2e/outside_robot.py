"""A robot from outside this project: standard ROS 2 messages and nothing else. Run as a program by the tests.

Four joints that follow position set-points at a limited speed. Publishes `joint_states` at 100 Hz, listens on
`joint_trajectory`, offers `reset` (go home) and `stop`; holds by itself when commands stop coming.
"""

import contextlib
import sys

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.node import Node
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

JOINTS = ["shoulder", "elbow", "wrist", "grip"]
HZ = 100
SPEED = 2.0  # rad/s
SILENCE_S = 0.2


class Arm(Node):
    def __init__(self):
        super().__init__("arm")
        self.position = dict.fromkeys(JOINTS, 0.0)
        self.target = dict(self.position)
        self.heard = 0.0
        self.state = self.create_publisher(JointState, "joint_states", 10)
        self.create_subscription(JointTrajectory, "joint_trajectory", self.follow, 1)
        self.create_service(Trigger, "reset", self.reset)
        self.create_service(Trigger, "stop", self.stop)
        self.create_timer(1 / HZ, self.turn)

    def now(self):
        return self.get_clock().now().nanoseconds / 1e9

    def follow(self, message):
        self.target.update(zip(message.joint_names, message.points[0].positions, strict=True))
        self.heard = self.now()

    def reset(self, request, response):
        self.target = dict.fromkeys(JOINTS, 0.0)
        self.position = dict(self.target)
        response.success = True
        return response

    def stop(self, request, response):
        self.target = dict(self.position)
        response.success, response.message = True, "stands still"
        return response

    def turn(self):
        if self.now() - self.heard > SILENCE_S:
            self.target = dict(self.position)
        velocity = []
        for joint in JOINTS:
            step = max(-SPEED / HZ, min(SPEED / HZ, self.target[joint] - self.position[joint]))
            self.position[joint] += step
            velocity.append(step * HZ)
        message = JointState(name=JOINTS, position=list(self.position.values()), velocity=velocity)
        message.header.stamp = self.get_clock().now().to_msg()
        self.state.publish(message)


def main():
    rclpy.init(args=sys.argv)
    with contextlib.suppress(KeyboardInterrupt, ExternalShutdownException):
        rclpy.spin(Arm())


if __name__ == "__main__":
    main()
