"""From one who drives to the next without a jump.

A person's device (a leader arm, a slider) is rarely where the robot is. What lies between the two when the person
engages is an offset that fades:

    command ── what the person wants ──►  + offset, which goes to 0 in `takeover_blend_s`  ──► the robot

and when the person hands back, the policy comes in over `hand_back_blend_s`: absolute targets go from what the
robot did last to the plan, deltas and velocities grow from nothing to what is planned.
"""

from __future__ import annotations

import numpy as np

from wire.types import CommandType, Mode, RobotSpec


class TakeoverBlend:
    """The offset of each absolute dimension, counted in control ticks."""

    def __init__(self, action_dim: int, ticks: int) -> None:
        self._ticks = ticks
        self._offset: np.ndarray = np.zeros(action_dim, np.float32)
        self._left: np.ndarray = np.zeros(action_dim, np.int64)
        self.forget()

    def forget(self) -> None:
        """Whoever commands next engages anew."""
        self._left[:] = 0
        self._followed: np.ndarray = np.zeros(len(self._left), bool)
        self._before: np.ndarray | None = None

    def on_wait(self) -> None:
        """What was commanded last was not done: from where the robot is now the person is approached anew."""
        self._followed[:] = False

    @property
    def fading(self) -> bool:
        """Whether the robot is still on its way to what the person commands."""
        return bool(np.any(self._followed & (self._left > 0) & (self._offset != 0)))

    def on_command(self, command: np.ndarray) -> None:
        """float32[da]: a command came. The first of somebody who engages says where their device is."""
        if self._before is None:
            self._before = command.copy()

    def offset(self, command: np.ndarray | None, driven: np.ndarray, acts: bool, executed: np.ndarray) -> np.ndarray:
        """float32[da] to add to the command in this tick. Ask once a tick while a person has taken over.

        `command`, float32[da]: the newest that is fresh; `driven`, bool[da]: the absolute dimensions that the person
        has set; `acts`: the robot follows now; `executed`, float32[da]: what it did last.
        """
        if command is None:
            self.forget()
            return np.zeros_like(executed)
        if acts:
            # A dimension moves at once by as much as the person has just moved it; what was between the two before
            # that fades. So a gripper that is told to close does, and an arm that is elsewhere is approached.
            engaged = driven & ~self._followed
            assert self._before is not None
            self._offset = np.where(engaged, executed - self._before, self._offset).astype(np.float32)
            self._left = np.where(engaged, self._ticks, self._left)
            self._left = np.maximum(self._left - 1, 0)
        self._followed = driven.copy() if acts else np.zeros_like(driven)
        self._before = command.copy()
        return np.where(driven, self._offset * self._left / max(self._ticks, 1), 0).astype(np.float32)


class HandBackBlend:
    """The policy, or the script in its place, comes in after a person.

    What lies between an absolute plan and what the robot did last fades; deltas and velocities are scaled up.
    """

    def __init__(self, spec: RobotSpec, ticks: int) -> None:
        self._absolute = np.array([d.meaning is CommandType.absolute for d in spec.action])
        self._ticks = ticks
        self.forget()

    def forget(self) -> None:
        self._left = 0
        self._mode = Mode.policy
        self._offset: np.ndarray | None = None

    def on_person(self) -> None:
        """A person has the robot: whoever comes after comes in gently."""
        self._left, self._offset = self._ticks, None

    def on_wait(self) -> None:
        """What was commanded last was not done: it begins again from where the robot is."""
        self._offset = None

    def action(self, mode: Mode, planned: np.ndarray | None, executed: np.ndarray) -> np.ndarray | None:
        """float32[da] to command instead of `planned`, whose `mode` it is, after `executed`. Ask once a tick."""
        if self._left == 0:
            return planned
        if planned is None or mode not in (Mode.policy, Mode.script):
            # Interrupted: it begins again from where the robot is then.
            self.on_person()
            return planned
        if self._offset is None or mode is not self._mode:
            self._left, self._offset, self._mode = self._ticks, executed - planned, mode
        self._left -= 1
        rest = self._left / self._ticks
        return np.where(self._absolute, planned + self._offset * rest, planned * (1 - rest)).astype(np.float32)
