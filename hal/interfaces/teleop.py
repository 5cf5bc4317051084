"""What a device that a person teleoperates with must offer: keyboard, gamepad, leader arm, phone."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from wire.types import OperatorCommandKind, RobotSpec


class TeleopCommand(msgspec.Struct, frozen=True, eq=False):
    """What the person wants now."""

    engaged: bool = False
    """whether the person drives; False hands the robot back"""
    action: np.ndarray | None = None
    """float32[da] within the spec's limits; None while engaged: hold"""
    estop: bool = False
    """stop the robot now"""
    quit: bool = False
    """the person puts the device away"""
    episode: tuple[OperatorCommandKind, ...] = ()
    """what the person says of the episode and its scene, each once: some of `EPISODE_COMMANDS`"""
    time_ns: int = 0
    """when the device said `action`, by this computer's clock, for one that is read by a thread of its own; 0: now"""


@runtime_checkable
class TeleopDevice(Protocol):
    """A device; its constructor only stores its configuration.

    It may have a `hint`: what the person can do, in a few words.
    """

    def connect(self, spec: RobotSpec) -> None:
        """Open the device for a robot of `spec`.

        Raises `RobotError` when it cannot be opened and `ConfigError` when it cannot drive such a robot, with the
        reason and what to do.
        """
        ...

    def read(self, pose: np.ndarray, driving: bool) -> TeleopCommand:
        """What the person wants now, without waiting. Raises `RobotError` when the device is gone.

        `pose`: float32[da], the action that would keep the robot where it is, NaN where nobody can say; `driving`:
        whether the robot follows the device. As long as it does not, it may be anywhere when it does again.
        """
        ...

    def close(self) -> None:
        """Give it back. May be called twice."""
        ...
