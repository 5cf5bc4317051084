"""When the scripted operator takes over and when it hands back.

It watches what the policy is about to do, as a person would, and steps in when policy and expert disagree for a while
or when nothing has advanced for a while (a policy that stalls agrees with nobody and disturbs nobody).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Takeover(Protocol):
    """Decides tick by tick whether the operator is in control."""

    active: bool

    def reset(self) -> None: ...

    def update(self, policy: np.ndarray | None, expert: np.ndarray, progress: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Thresholds of the gate."""

    disagreement: float = 0.45
    """mean absolute difference of the motion actions plus `gripper_weight` times that of the last action"""
    gripper_weight: float = 0.5
    patience_ticks: int = 3
    """ticks in a row of disagreement before taking over"""
    min_ticks: int = 15
    """ticks a takeover lasts at least"""
    stall_ticks: int = 80
    """ticks without progress before taking over"""
    stall_progress: float = 0.01
    """what counts as progress, in the operator's unit"""


class Gate:
    """Decides tick by tick; `reset` at the start of an episode."""

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self.reset()

    def reset(self) -> None:
        self.active = False
        self._bad = 0
        self._left = 0
        self._best = float("inf")
        self._since_best = 0

    def update(self, policy: np.ndarray | None, expert: np.ndarray, progress: float) -> bool:
        """Whether the operator is in control of this tick.

        `policy` and `expert` are float32[da] in the robot's units scaled to about [-1, 1]; `policy` is None while it
        has no action to offer, which never counts as disagreement (the robot holds by itself).
        """
        config = self._config
        if progress < self._best - config.stall_progress:
            self._best, self._since_best = progress, 0
        else:
            self._since_best += 1
        if self.active:
            self._left -= 1
            if self._left > 0 or policy is None:
                return True
            self.active, self._bad, self._since_best = False, 0, 0
            return False
        if policy is not None:
            *motion, gripper = [abs(a - b) for a, b in zip(policy.tolist(), expert.tolist(), strict=True)]
            apart = sum(motion) / max(1, len(motion)) + config.gripper_weight * gripper
            self._bad = self._bad + 1 if apart > config.disagreement else 0
        if self._bad >= config.patience_ticks or self._since_best >= config.stall_ticks:
            self.active, self._left = True, config.min_ticks
        return self.active
