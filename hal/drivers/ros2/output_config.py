"""Which controller takes which dimensions of an action, and in which message: `Ros2Config.outputs`.

The controllers are those of ros2_control (control.ros.org, ros2_controllers) and MoveIt Servo (moveit.picknik.ai);
docs/ros2.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from hal.interfaces.dynamics import require_dimension
from wire.errors import ConfigError
from wire.types import CommandType, RobotSpec

Field = Literal["position", "velocity", "effort"]

POSITION_AXES = ("position.x", "position.y", "position.z")
ORIENTATION_AXES = ("orientation.x", "orientation.y", "orientation.z", "orientation.w")
_TWIST_AXES = ("linear.x", "linear.y", "linear.z", "angular.x", "angular.y", "angular.z")


class OutputKind(StrEnum):
    """The message that a controller takes."""

    trajectory = "trajectory"
    """joint_trajectory_controller"""
    forward = "forward"
    """forward_command_controller, and the position, velocity and effort controllers made of it"""
    twist = "twist"
    """what takes velocities without a stamp"""
    twist_stamped = "twist_stamped"
    """diff_drive_controller, MoveIt Servo"""
    pose_stamped = "pose_stamped"
    """MoveIt Servo"""

    @property
    def type(self) -> str:
        """The type of its messages."""
        return _TYPES[self]


_TYPES = {
    OutputKind.trajectory: "trajectory_msgs/msg/JointTrajectory",
    OutputKind.forward: "std_msgs/msg/Float64MultiArray",
    OutputKind.twist: "geometry_msgs/msg/Twist",
    OutputKind.twist_stamped: "geometry_msgs/msg/TwistStamped",
    OutputKind.pose_stamped: "geometry_msgs/msg/PoseStamped",
}
_AXES = {
    OutputKind.twist: _TWIST_AXES,
    OutputKind.twist_stamped: _TWIST_AXES,
    OutputKind.pose_stamped: POSITION_AXES + ORIENTATION_AXES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The dimensions that one controller takes."""

    kind: OutputKind
    topic: str
    """relative to the namespace"""
    dimensions: tuple[str, ...]
    """action dimensions; `forward`: in the order of the controller's joints"""
    interface: Field = "position"
    """`forward`: what the controller's numbers are"""
    axes: tuple[str, ...] = ()
    """twists and poses: where each dimension goes, such as linear.x or position.z; the rest of a twist is 0"""
    orientation: tuple[float, float, float, float] | None = None
    """a pose whose orientation is no dimension: the quaternion x, y, z, w that it keeps"""
    frame_id: str = ""
    """stamped twists and poses: the frame that their numbers are in"""
    stamped: bool = True
    """`trajectory`: a late one is refused by the controller. False: stamp 0, which means start when it comes, for a
    controller whose clock is not ours"""
    timeout_s: float = 0.0
    """after how long without a command the controller stops, which must be longer than a control period; 0: unknown"""
    stall_s: float = 2.0
    """nothing of it moves for so long although the command is elsewhere: an error; 0: not watched, as for a gripper,
    which may close on something"""
    measured: dict[str, str] = field(default_factory=dict)
    """the state dimension that shows a dimension's motion, where it has another name"""

    @property
    def moves(self) -> Field:
        """What its numbers are."""
        if self.kind in (OutputKind.twist, OutputKind.twist_stamped):
            return "velocity"
        return self.interface


def check_outputs(
    spec: RobotSpec, outputs: Sequence[Output], integrated: Collection[str], fields: Mapping[str, Field]
) -> None:
    """Raise `ConfigError` naming the output and the dimension that cannot be sent so.

    `integrated`: delta dimensions that are sent as targets; `fields`: what state dimensions read.
    """
    topics: dict[str, int] = {}
    owners: dict[str, str] = {}
    for index, output in enumerate(outputs):
        who = f"Ros2Config of '{spec.embodiment}': outputs[{index}] ({output.kind} on '{output.topic}')"
        if not output.topic or topics.setdefault(output.topic, index) != index:
            raise ConfigError(f"{who}: give each output a topic of its own.")
        if not output.dimensions:
            raise ConfigError(f"{who}: `dimensions` is empty; name the action dimensions that it takes.")
        for name in output.dimensions:
            require_dimension(f"{who}: `dimensions`", name, [d.name for d in spec.action])
            if owners.setdefault(name, who) != who or output.dimensions.count(name) > 1:
                raise ConfigError(f"{who}: '{name}' is sent twice.")
        for name, state in output.measured.items():
            require_dimension(f"{who}: `measured`", name, output.dimensions)
            require_dimension(f"{who}: `measured`", state, [d.name for d in spec.state])
        _check_numbers(who, spec, output)
        _check_meanings(who, spec, output, integrated, fields)
        _check_axes(who, output)
        if output.kind is OutputKind.pose_stamped:
            _check_orientation(who, spec, output)
    if outputs and (left := [d.name for d in spec.action if d.name not in owners]):
        raise ConfigError(f"Ros2Config of '{spec.embodiment}': no output takes {', '.join(left)}; name a controller.")


def _check_numbers(who: str, spec: RobotSpec, output: Output) -> None:
    for name in ("timeout_s", "stall_s"):
        if not 0 <= getattr(output, name) < math.inf:
            raise ConfigError(f"{who}: {name} is {getattr(output, name)}; give 0 or more.")
    if output.timeout_s and not output.timeout_s > 1 / spec.control_hz:
        raise ConfigError(
            f"{who}: the controller stops after {output.timeout_s:g} s without a command, and one comes every "
            f"{1 / spec.control_hz:g} s: it would stop and go. Raise its timeout, or the spec's control_hz."
        )


def _check_meanings(
    who: str, spec: RobotSpec, output: Output, integrated: Collection[str], fields: Mapping[str, Field]
) -> None:
    if output.kind is not OutputKind.forward and output.interface != "position":
        raise ConfigError(f"{who}: `interface` is for kind forward alone.")
    actions, states = {d.name: d for d in spec.action}, {d.name for d in spec.state}
    wanted = CommandType.velocity if output.moves == "velocity" else CommandType.absolute
    for name in output.dimensions:
        means = CommandType.absolute if name in integrated else actions[name].meaning
        if means is not wanted:
            way = "; give it in `targets`, so that its sum is sent" if means is CommandType.delta else ""
            raise ConfigError(
                f"{who}: '{name}' commands {means} values; this controller takes {output.moves}, of {wanted} "
                f"dimensions{way}."
            )
        # Where it is measured is where it is held: a position must never go out as an effort.
        read = fields.get(name, "position")
        if wanted is CommandType.absolute and name in states and name not in integrated and read != output.moves:
            raise ConfigError(
                f"{who}: the state dimension '{name}' reads {read} and its command is {output.moves}; set `fields`, or "
                "give the state dimension another name."
            )


def _check_orientation(who: str, spec: RobotSpec, output: Output) -> None:
    turned = [name for name, axis in zip(output.dimensions, output.axes, strict=True) if axis in ORIENTATION_AXES]
    measured = sorted({d.name for d in spec.state} & set(turned))
    # Held where it is measured, it would otherwise be an orientation that was neither measured nor sent.
    if measured and len(measured) < len(turned):
        raise ConfigError(f"{who}: of {', '.join(turned)} only {', '.join(measured)} are measured; all or none.")


def _check_axes(who: str, output: Output) -> None:
    known = _AXES.get(output.kind, ())
    for axis in output.axes:
        require_dimension(f"{who}: `axes`", axis, known)
    if len(output.axes) != (len(output.dimensions) if known else 0) or len(set(output.axes)) < len(output.axes):
        raise ConfigError(
            f"{who}: {len(output.axes)} axes for {len(output.dimensions)} dimensions; "
            + (f"give each its own of {', '.join(known)}." if known else "this kind takes none.")
        )
    needs_frame = output.kind in (OutputKind.twist_stamped, OutputKind.pose_stamped)
    if bool(output.frame_id.strip()) is not needs_frame:
        raise ConfigError(
            f"{who}: " + ("give the `frame_id` that its numbers are in." if needs_frame else "it takes no `frame_id`.")
        )
    if output.kind is not OutputKind.pose_stamped:
        if output.orientation is not None:
            raise ConfigError(f"{who}: `orientation` is for kind pose_stamped alone.")
        return
    # What is left out would be 0: the origin of the frame, where nobody told it to go.
    needed = POSITION_AXES if output.orientation is not None else POSITION_AXES + ORIENTATION_AXES
    if sorted(output.axes) != sorted(needed):
        raise ConfigError(
            f"{who}: a pose needs {', '.join(needed)}"
            + ("." if output.orientation is not None else ", or the first three and a fixed `orientation`.")
        )
    if output.orientation is not None and not abs(math.hypot(*output.orientation) - 1) < 1e-3:
        raise ConfigError(f"{who}: orientation {output.orientation} is no unit quaternion x, y, z, w.")
