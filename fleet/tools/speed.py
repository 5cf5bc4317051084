"""Slows a robot of this computer by its host's stop line: past gateway, uplink and control."""

from __future__ import annotations

from fleet.tools.stop import WHO, LocalRobot
from hal.driver_host.stop_line import StopOrder
from hal.safety.stop_latch import StopLatch, check_speed_limit
from robot_edge.runtime.robot_host import STOP_FILE
from wire.errors import RobotError
from wire.stop_state import StopState


def limit_speed(robot: LocalRobot, share: float) -> str:
    """Limit it to `share` of its velocity limits, in `WHO`'s name; what to say of it.

    One whose edge does not run starts so. Raises `InvalidDataError` for what is no share, `RejectedError` for a robot
    that cannot be slowed, `RobotError` when it could not be told or noted.
    """
    check_speed_limit(WHO, share)
    if robot.hosts:
        return _text(robot, robot.give_order(StopOrder("slow", who=WHO, share=share)))
    file = robot.home / STOP_FILE
    latch = StopLatch(file)
    latch.limit_speed(WHO, share)
    latch.save()
    noted = StopLatch(file).state
    if noted.speed_limits != latch.state.speed_limits:
        raise RobotError(f"the speed limit of robot '{robot.name}' could not be noted in {file}.")
    return f"{_text(robot, noted)} when it starts"


def speed_of(robot: LocalRobot) -> str:
    """What slows it. Raises `RobotError` when its host does not answer."""
    state = robot.give_order(StopOrder("ask")) if robot.hosts else StopLatch(robot.home / STOP_FILE).state
    return _text(robot, state)


def _text(robot: LocalRobot, state: StopState) -> str:
    by = ", ".join(f"{share:g} by {who}" for who, share in state.speed_limits.items())
    return f"{robot.name}: {state.speed_limit:g} of its velocity limits{f' ({by})' if by else ''}"
