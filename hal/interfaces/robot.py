"""What a robot must offer: five methods and its spec. Everything else wraps it.

A driver's constructor only stores its configuration; `connect` is what touches hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from wire.errors import ConfigError, RobotError, suggest
from wire.types import Observation, RobotSpec

ROBOT = "VLA_FLEET_ROBOT"
"""environment variable with the robot's name in each of its processes, for drivers that tell apart what they open"""


class Feedback(msgspec.Struct, frozen=True, eq=False):
    """What came of an action."""

    executed: np.ndarray
    """float32[da]: what the robot really did with the action it was given"""
    reward: float = 0.0
    success: bool = False
    """the task is done, as far as the robot or its simulator can tell"""


@runtime_checkable
class Robot(Protocol):
    """A robot that can be read and commanded once per control period."""

    spec: RobotSpec

    def connect(self) -> None:
        """Open the hardware or simulator. Raises `RobotError` that says what to do."""
        ...

    def reset(self, task: str, seed: int) -> None:
        """Bring the robot and its scene to the start of `task` (a name from `tasks`). May take seconds.

        Raises `ConfigError` for an unknown task, with the nearest known one.
        """
        ...

    def read(self) -> Observation:
        """The newest observation, without waiting for a camera."""
        ...

    def write(self, action: np.ndarray) -> Feedback:
        """Execute `action`, float32[da] within the spec's limits, for one control period."""
        ...

    def close(self) -> None:
        """Bring the robot to a safe stop and give it back. May be called twice."""
        ...


def check_reset(who: str, task: str, known: Sequence[str], seed: int, connected: bool) -> None:
    """What every `Robot.reset` refuses first. Raises `ConfigError` for a task that is not `known` or a negative seed,
    `RobotError` before `connect`; `who` begins the text.
    """
    if task not in known:
        raise ConfigError(f"{who}: no task '{task}'.{suggest(task, known)} It knows: {', '.join(known)}.")
    if seed < 0:
        raise ConfigError(f"{who}: seed {seed} is negative.")
    if not connected:
        raise RobotError(f"{who}: reset before connect(); call connect() first.")


def request_previews(robot: Robot, wanted: bool) -> None:
    """Somebody wants frames to have a `Frame.preview` now and then, or nobody does any more.

    A robot to which larger pictures cost something has a method of this name; without one it goes on as it is. Nobody
    wants them before the first call.
    """
    request = getattr(robot, "request_previews", None)
    if request is not None:
        request(wanted)


class Teleoperator(Protocol):
    """Somebody or something that can control a robot in the policy's place."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]: the action wanted now, or None when the operator wants none."""
        ...

    def progress(self) -> float:
        """How far the running episode is from done, in any unit that shrinks as the task advances."""
        ...
