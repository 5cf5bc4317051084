"""What a device is told of the robot it drives, and how pushes become actions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hal.interfaces.teleop import TeleopCommand
from wire.clock import Clock
from wire.errors import ConfigError, suggest
from wire.types import CommandType, RobotSpec

_LEASH = 0.2
"""share of a dimension's range by which a target may run ahead of the robot, which may be blocked"""
_NEAR = 0.05
"""share of the range within which a target that was given still stands"""
_SAME = 0.02
"""share of the range that counts as being there"""
_HAIR = 0.001
"""share of the range by which two commands differ at least"""


def pose_of(spec: RobotSpec, state: np.ndarray | None) -> np.ndarray:
    """float32[da]: where the robot is, as an action: measured values of absolute dimensions that are also in the state
    (float32[ds], None: not heard of yet), 0 for deltas and velocities, NaN for what is not measured."""
    measured = {d.name: float(value) for d, value in zip(spec.state, [] if state is None else state, strict=False)}
    nan = float("nan")
    here = [measured.get(d.name, nan) if d.meaning is CommandType.absolute else 0.0 for d in spec.action]
    return np.clip(np.array(here, np.float32), spec.action_low(), spec.action_high())


class Jog:
    """Moves an action by pushes of -1 to 1 on each dimension.

    Deltas and velocities are pushed to a share of their limits. An absolute target moves on from where the robot is
    and stays near it; where that is not measured, as of a gripper's effort, a push sets it to its limit for good.
    """

    def __init__(self, spec: RobotSpec, clock: Clock, range_s: float) -> None:
        """`range_s`: seconds for the whole range of an absolute dimension at full speed."""
        self.spec, self._range_s = spec, range_s
        self._clock = clock
        self._low, self._high = spec.action_low(), spec.action_high()
        self._span = self._high - self._low
        self._absolute = np.array([d.meaning is CommandType.absolute for d in spec.action])
        self._pose = pose_of(spec, None)
        self._target = np.clip(np.zeros(spec.action_dim, np.float32), self._low, self._high)
        self._placed = np.zeros(spec.action_dim, bool)
        self._then_ns = clock.now_ns()

    def follow(self, pose: np.ndarray, driving: bool) -> None:
        """Learn where the robot is; see `TeleopDevice.read`."""
        self._pose = np.asarray(pose, np.float32)
        if not driving:
            self.stop()

    def stop(self) -> None:
        """Begin anew from where the robot is, if it is not where it was told to be."""
        with np.errstate(invalid="ignore"):
            self._placed &= np.abs(self._target - self._pose) <= _NEAR * self._span
        self._then_ns = self._clock.now_ns()

    def command(self, pushes: Iterable[tuple[int, float]], speed: float) -> TeleopCommand:
        """What somebody wants who pushes these dimensions of the action; who pushes none holds."""
        push = np.zeros(self.spec.action_dim)
        for index, share in pushes:
            push[index] += share
        action = self.action(push, speed)
        return TeleopCommand(engaged=True, action=action if push.any() else None)

    def action(self, push: np.ndarray, speed: float) -> np.ndarray:
        """float32[da] within the limits, for `push`, float[da] in [-1, 1], at `speed`, a share of full speed."""
        now_ns = self._clock.now_ns()
        # A pause between two readings is no push that went on for so long.
        elapsed_s = min(0.1, (now_ns - self._then_ns) / 1e9)
        self._then_ns = now_ns
        push = np.clip(push, -1, 1)
        known = self._absolute & np.isfinite(self._pose)
        # A target follows the measured pose once, not its noise and not the arm's sagging.
        here = np.where(known & ~self._placed, self._pose, self._target)
        self._placed |= known
        moved = here + push * speed * self._span * elapsed_s / self._range_s
        with np.errstate(invalid="ignore"):
            leashed = np.clip(moved, self._pose - _LEASH * self._span, self._pose + _LEASH * self._span)
        jogged = np.where(push != 0, leashed, here)
        limit = np.where(push > 0, self._high, np.where(push < 0, self._low, self._target))
        rate = np.where(push > 0, push * self._high, -push * self._low) * speed
        target = np.where(known, jogged, np.where(self._absolute, limit, rate))
        self._target = np.clip(target, self._low, self._high).astype(np.float32)
        return self._target.copy()


def neutral_action(spec: RobotSpec, pose: np.ndarray, action: np.ndarray) -> np.ndarray:
    """float32[da]: what to command before `action` when a robot was just taken over.

    A robot leaves an absolute dimension as it is until a person changes it (`robot_edge.control.operator_override`). So
    the first command is one that `action` differs from, except where the robot is there already; deltas and velocities
    are 0.
    """
    low, high = spec.action_low(), spec.action_high()
    absolute = np.array([d.meaning is CommandType.absolute for d in spec.action])
    with np.errstate(invalid="ignore"):
        there = np.abs(action - pose) <= _SAME * (high - low)
    # Hardly another one: should it ever be executed, nothing comes of it.
    other = action + np.where(action > (low + high) / 2, -_HAIR, _HAIR) * (high - low)
    return np.where(absolute, np.where(there, action, other), 0).astype(np.float32)


def read_binding(spec: RobotSpec, text: str, where: str) -> tuple[int, float]:
    """(index, sign) of the action dimension in "+name" or "-name". Raises `ConfigError` that names `where`."""
    sign, name = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    names = [d.name for d in spec.action]
    if name not in names:
        raise ConfigError(
            f"{where} moves '{name}', which robot '{spec.embodiment}' has not.{suggest(name, names)} "
            f"Its actions: {', '.join(names)}."
        )
    return names.index(name), sign


def check_rest(spec: RobotSpec, device: str) -> None:
    """Raise `ConfigError` for a robot that cannot be told to stand: a delta or velocity whose limits leave 0 out."""
    for d in spec.action:
        if d.meaning is not CommandType.absolute and not d.low <= 0 <= d.high:
            raise ConfigError(
                f"{device} cannot drive robot '{spec.embodiment}': 0 is outside the limits [{d.low:g}, {d.high:g}] of "
                f"'{d.name}', so it has no rest."
            )
