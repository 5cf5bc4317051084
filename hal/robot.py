"""What a robot must offer: five methods and its spec. Everything else wraps it.

A driver's constructor only stores its configuration; `connect` is what touches hardware.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

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


class Teleoperator(Protocol):
    """Somebody or something that can control a robot in the policy's place."""

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[da]: the action wanted now, or None when the operator wants none."""
        ...

    def progress(self) -> float:
        """How far the running episode is from done, in any unit that shrinks as the task advances."""
        ...
