"""Actions as the messages of `Ros2Config.outputs`, each to its controller; without outputs, the one of docs/ros2.md.

What a controller would refuse is not sent: numbers are checked, and every controller heard of, before the first goes.
"""

from __future__ import annotations

import array
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hal.drivers.ros2.config import Ros2Config
from hal.drivers.ros2.messages import TRAJECTORY, command, set_stamp
from hal.drivers.ros2.output_config import ORIENTATION_AXES, Output, OutputKind
from hal.drivers.ros2.stall import StallMonitor
from hal.drivers.ros2.wrapper import Publisher, RosNode, interface
from wire.errors import FleetError, InvalidDataError, RobotError
from wire.types import CommandType, RobotSpec

log = logging.getLogger(__name__)

_SHORTEST_QUATERNION = 0.1
"""less than this is no direction but noise"""
_POLL_S = 0.02


class TrajectoryMaker:
    """JointTrajectories from target to target that neither stop in between nor go beyond.

    What joint_trajectory_controller follows, cubic by cubic, is the quadratic B-spline of the targets, one control
    period late: half way between two targets with their mean velocity, and at the last one at rest, for the last
    velocity must be 0. The next command replaces that rest before it begins, also one that comes up to half a period
    late, for each trajectory begins with the knot that the one before it leads to.
    """

    def __init__(self, joints: Sequence[str], period_ns: int, stamped: bool = True) -> None:
        """`stamped`: see `Output.stamped`."""
        self._joints = list(joints)
        self._period_ns = period_ns
        self._stamped = stamped
        self.forget()

    def forget(self) -> None:
        """The next trajectory begins wherever the joints are then."""
        self._before: np.ndarray | None = None
        self._knot: tuple[int, np.ndarray, np.ndarray] | None = None
        """when the trajectory before is half way to its target, where, and how fast"""

    def make(self, target: np.ndarray, stamp_ns: int) -> Any:
        """The trajectory to `target`, float64[n], from the one before."""
        before = target if self._before is None else self._before
        knots = [] if self._knot is None or not 0 < self._knot[0] - stamp_ns <= self._period_ns else [self._knot]
        half_way_ns = stamp_ns + self._period_ns * 3 // 2
        self._before = target
        self._knot = half_way_ns, (before + target) / 2, (target - before) / (self._period_ns / 1e9)
        message = interface(TRAJECTORY)()
        if self._stamped:
            set_stamp(message, stamp_ns)
        message.joint_names = self._joints
        rest = half_way_ns + self._period_ns, target, np.zeros_like(target)
        for due_ns, position, velocity in (*knots, self._knot, rest):
            point = interface("trajectory_msgs/msg/JointTrajectoryPoint")()
            point.positions, point.velocities = _doubles(position), _doubles(velocity)
            point.time_from_start.sec, point.time_from_start.nanosec = divmod(due_ns - stamp_ns, 1_000_000_000)
            message.points.append(point)
        return message


def multi_array(values: np.ndarray) -> Any:
    """A Float64MultiArray of float64[n]."""
    message = interface(OutputKind.forward.type)()
    message.data = _doubles(values)
    return message


def twist(output: Output, values: np.ndarray, stamp_ns: int) -> Any:
    """A Twist or TwistStamped of float64[n], one for each of the output's axes."""
    message = interface(output.kind.type)()
    inner = message
    if output.kind is OutputKind.twist_stamped:
        set_stamp(message, stamp_ns)
        message.header.frame_id = output.frame_id
        inner = message.twist
    _fill(inner, output.axes, values)
    return message


def pose(output: Output, values: np.ndarray, stamp_ns: int) -> Any:
    """A PoseStamped of float64[n], one for each of the output's axes; its quaternion has length 1 (`Commander.fit`)."""
    message = interface(output.kind.type)()
    set_stamp(message, stamp_ns)
    message.header.frame_id = output.frame_id
    if output.orientation is not None:
        _fill(message.pose, ORIENTATION_AXES, np.array(output.orientation) / np.linalg.norm(output.orientation))
    _fill(message.pose, output.axes, values)
    return message


def _fill(message: Any, axes: Sequence[str], values: np.ndarray) -> None:
    for axis, value in zip(axes, values.tolist(), strict=True):
        part, _, letter = axis.partition(".")
        setattr(getattr(message, part), letter, value)


def _doubles(values: np.ndarray) -> array.array[float]:
    return array.array("d", np.asarray(values, np.float64).tobytes())


class _Route:
    """One topic that commands go to."""

    def __init__(self, topic: str, type_: str, which: Sequence[int], make: Callable[[np.ndarray, int], Any]) -> None:
        """`which`: indices of its action dimensions; `make`: its message of them and a stamp."""
        self.topic = topic
        self.type = type_
        self.which = np.array(which, int)
        self.make = make
        self.publisher: Publisher | None = None
        self.forget: Callable[[], None] = lambda: None
        """what was sent before leads nowhere any more"""
        self.stall: StallMonitor | None = None
        self.keeps_velocity = False
        """what it was told last moves the robot until it is told otherwise"""
        self.is_effort = False
        self.quaternion: np.ndarray | None = None
        """indices of the action dimensions x, y, z, w of one that it takes"""

    @property
    def heard(self) -> bool:
        return self.publisher is not None and self.publisher.subscriptions > 0


class Commander:
    """All outputs of one robot."""

    def __init__(self, spec: RobotSpec, config: Ros2Config) -> None:
        self._spec = spec
        self._config = config
        self._who = f"robot '{spec.embodiment}'"
        self._node: RosNode | None = None
        self._velocities = np.array([d.meaning is CommandType.velocity for d in spec.action], bool)
        self._before: np.ndarray | None = None
        """float32[da]: what was sent before, None when nothing was since the robot was last lost sight of"""
        whole = range(spec.action_dim)
        self._routes = [self._route(output) for output in config.outputs] or [
            _Route(config.topics.command, TRAJECTORY, whole, lambda v, ns: command(spec, config.joints, v, ns))
        ]

    def _route(self, output: Output) -> _Route:
        spec, config = self._spec, self._config
        which = [[d.name for d in spec.action].index(name) for name in output.dimensions]
        joints = [config.joints.get(name, name) for name in output.dimensions]

        maker = TrajectoryMaker(joints, spec.period_ns, output.stamped)
        make: dict[OutputKind, Callable[[np.ndarray, int], Any]] = {
            OutputKind.trajectory: maker.make,
            OutputKind.forward: lambda values, _: multi_array(values),
            OutputKind.twist: lambda values, ns: twist(output, values, ns),
            OutputKind.twist_stamped: lambda values, ns: twist(output, values, ns),
            OutputKind.pose_stamped: lambda values, ns: pose(output, values, ns),
        }
        route = _Route(output.topic, output.kind.type, which, make[output.kind])
        route.forget = maker.forget
        route.is_effort = output.moves == "effort"
        if ORIENTATION_AXES[0] in output.axes:
            route.quaternion = np.array([which[output.axes.index(axis)] for axis in ORIENTATION_AXES], int)
        if output.stall_s:
            moved = {name: target.state for name, target in config.targets.items()} | output.measured
            route.stall = StallMonitor(spec, output, moved, config.fields)
        return route

    def open(self, node: RosNode) -> None:
        """Make the publishers."""
        self._node = node
        for route in self._routes:
            route.publisher = node.publisher(route.type, route.topic, self._config.qos.command, depth=1)
            route.keeps_velocity = False
        self.forget()

    def wait_for_controllers(self, timeout_s: float) -> None:
        """Wait until every output is heard. Raises `RobotError` naming those that are not, and why."""
        deadline = time.monotonic() + timeout_s
        while not all(route.heard for route in self._routes):
            if time.monotonic() >= deadline:
                raise RobotError(f"{self._who}: {self._unheard()} It cannot be commanded; waited {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def fit(self, action: np.ndarray) -> np.ndarray:
        """`action`, float32[da], with quaternions of length 1. Raises `InvalidDataError` for one that is none."""
        for route in self._routes:
            action = self._fit(route, action)
        return action

    def _fit(self, route: _Route, action: np.ndarray) -> np.ndarray:
        if (which := route.quaternion) is None:
            return action
        length = float(np.linalg.norm(action[which].astype(np.float64)))
        if length < _SHORTEST_QUATERNION:
            names = ", ".join(self._spec.action[index].name for index in which)
            raise InvalidDataError(
                f"{self._who}: {names} are {action[which].tolist()}, which is no orientation; it was not sent."
            )
        fitted = action.copy()
        fitted[which] = action[which] / length
        return fitted

    def require_controllers(self, measured: np.ndarray | None, now_ns: int) -> None:
        """Raise `RobotError`, and stop what is driven by velocity, when an output is not heard or nothing of it moves.

        `measured`: float32[ds] now, None when nobody knows.
        """
        why = "" if all(route.heard for route in self._routes) else f"{self._unheard()} The command was not sent."
        for route in self._routes:
            if route.stall is not None and measured is not None and self._before is not None and not why:
                why = route.stall.note(self._before, measured, now_ns)
                why += f" Topic '{self._full(route)}'; the command was not sent." if why else ""
        if why:
            self.stop_what_moves()
            raise RobotError(f"{self._who}: {why}")

    def send(self, values: np.ndarray, stamp_ns: int) -> None:
        """Publish `values`, float32[da], to all. Raises `RobotError` when the transport does not take it."""
        for route in self._routes:
            self._send(route, values, stamp_ns)
        self._before = values.copy()

    def stop_what_moves(self) -> None:
        """Have whatever is driven by velocity, and was last told to move, stand still; one that fails is logged."""
        assert self._node is not None, "open() comes first"
        for route in self._routes:
            if route.keeps_velocity and route.heard and self._velocities[route.which].all():
                try:
                    self._send(route, np.zeros(self._spec.action_dim, np.float32), self._node.now_ns())
                except RobotError as error:
                    log.error("%s: it was not told to stop: %s", self._who, error)

    def stop(self, values: np.ndarray, stamp_ns: int) -> None:
        """Publish what holds the robot to whoever listens; an effort stays as it is. Raises `FleetError` of one that
        failed, after the others.
        """
        failed: list[FleetError] = []
        self.forget()
        for route in self._routes:
            if route.heard and not route.is_effort:
                try:
                    self._send(route, self._fit(route, values), stamp_ns)
                except FleetError as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def stop_velocities(self, values: np.ndarray, stamp_ns: int) -> None:
        """Publish `values`, float32[da], to whatever takes velocities, also if this process has told it none. Raises as
        `send`.
        """
        for route in self._routes:
            if self._velocities[route.which].any():
                self._send(route, values, stamp_ns)

    def forget(self) -> None:
        """Nobody knows where the robot went meanwhile: the next targets begin from where it is."""
        self._before = None
        for route in self._routes:
            route.forget()
            if route.stall is not None:
                route.stall.restart()

    def _send(self, route: _Route, values: np.ndarray, stamp_ns: int) -> None:
        assert route.publisher is not None, "open() comes first"
        route.publisher.send(route.make(values[route.which].astype(np.float64), stamp_ns))
        route.keeps_velocity = bool(values[route.which][self._velocities[route.which]].any())

    def _unheard(self) -> str:
        """Of each output that nobody hears: which, and why."""
        assert self._node is not None, "open() comes first"
        faults = []
        for route in self._routes:
            if route.heard:
                continue
            topic = self._full(route)
            reasons = self._node.mismatches(topic, route.type, self._config.qos.command)
            faults.append(
                f"{'; '.join(reasons)}."
                if reasons
                else f"nobody listens on '{topic}'. Is the robot's node running, its controller loaded, in this "
                "namespace and ROS_DOMAIN_ID?"
            )
        return " ".join(faults)

    def _full(self, route: _Route) -> str:
        assert self._node is not None, "open() comes first"
        return self._node.topic(route.topic)
