"""What `sim_robot_node` says about itself: diagnostics for people, and the configuration of the driver for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hal.drivers.ros2.messages import set_stamp
from hal.drivers.ros2.wrapper import RosNode, interface
from hal.interfaces.robot import Robot

Pacing = Literal["real_time", "stepped"]


@dataclass(slots=True)
class Counts:
    """What the node has done so far."""

    steps: int = 0
    holds: int = 0
    """steps for which no command had come"""
    resets: int = 0
    late: int = 0
    """commands older than the one before"""
    replaced: int = 0
    """commands that a newer one overtook before they were executed"""
    refused: int = 0
    """commands that do not fit the robot"""
    unsent: int = 0
    """messages that the transport did not take"""
    trouble: str = ""
    """what was wrong last"""


def diagnostics(node: RosNode, embodiment: str, counts: Counts, pacing: str, task: str, seed: int) -> Any:
    """A DiagnosticArray: warns when commands were refused."""
    pair = interface("diagnostic_msgs/msg/KeyValue")
    status = interface("diagnostic_msgs/msg/DiagnosticStatus")()
    status.level = status.WARN if counts.refused or counts.unsent else status.OK
    status.name, status.hardware_id = f"{node.full_name}: {embodiment}", embodiment
    status.message = counts.trouble or "ok"
    said = {"pacing": pacing, "task": task, "seed": seed}
    said |= {
        name: getattr(counts, name) for name in ("steps", "holds", "resets", "late", "replaced", "refused", "unsent")
    }
    status.values = [pair(key=key, value=str(value)) for key, value in said.items()]
    message = interface("diagnostic_msgs/msg/DiagnosticArray")()
    set_stamp(message, node.now_ns())
    message.status = [status]
    return message


def describe(robot: Robot, node: str = "sim_robot") -> dict[str, Any]:
    """The configuration, as plain values, with which the driver `ros2` drives `robot` behind `sim_robot_node`.

    Connects `robot` to ask it for the instruction of each task. Add `"stepped": true` for that pacing.
    """
    tasks = tuple(getattr(robot, "tasks", ()))
    instructions = {}
    if tasks:
        robot.connect()
        try:
            for task in tasks:
                robot.reset(task, 0)
                instructions[task] = robot.read().task
        finally:
            robot.close()
    return {
        "spec": msgspec.to_builtins(robot.spec),
        "tasks": instructions,
        "executed": True,
        "reset": True,
        "stop": True,
        "parameters_of": node,
    }
