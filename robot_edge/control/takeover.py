"""The scripted operator at a robot's side: its gate opens and it takes over, its gate closes and it hands back.

The gate watches what the policy is about to do, as a person would: it opens when policy and expert disagree for a while
or when nothing has advanced for a while (a policy that stalls agrees with nobody and disturbs nobody).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hal.interfaces.robot import Teleoperator
from robot_edge.control.config import GateConfig
from wire.types import Observation


class Gate:
    """Decides tick by tick; `reset` at the start of an episode."""

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._saved = config.most_share * config.saved_ticks
        """ticks that the operator may drive"""
        self.reset()

    def reset(self) -> None:
        self.active = False
        self._bad = 0
        self._left = 0
        self._best = float("inf")
        self._since_best = 0

    def update(self, policy: np.ndarray | None, expert: np.ndarray, progress: float, outlook: float = math.nan) -> bool:
        """Whether the operator is in control of this tick.

        `policy` and `expert` are float32[da] in the robot's units scaled to about [-1, 1]; `policy` is None while it
        has no action to offer, which never counts as disagreement (the robot holds by itself). `outlook`: what the
        policy says of its chance, nan if it does not. One that is trusted may disagree, but not stand still for ever.
        """
        share = self._config.most_share
        self._saved = min(self._saved + share, share * self._config.saved_ticks)
        self._decide(policy, expert, progress, outlook)
        self._saved -= self.active
        return self.active

    def _decide(self, policy: np.ndarray | None, expert: np.ndarray, progress: float, outlook: float) -> None:
        config = self._config
        if progress < self._best - config.stall_progress:
            self._best, self._since_best = progress, 0
        else:
            self._since_best += 1
        if self.active:
            self._left -= 1
            if self._left <= 0 and policy is not None:
                self.active, self._bad, self._since_best = False, 0, 0
            return
        if policy is not None:
            *motion, gripper = [abs(a - b) for a, b in zip(policy.tolist(), expert.tolist(), strict=True)]
            apart = sum(motion) / max(1, len(motion)) + config.gripper_weight * gripper
            trusted = 0 < config.trust <= outlook
            self._bad = self._bad + 1 if apart > config.disagreement and not trusted else 0
        wanted = self._bad >= config.disagreement_ticks or self._since_best >= config.stall_ticks
        if wanted and (config.most_share >= 1 or self._saved >= config.min_ticks):
            self.active, self._left = True, config.min_ticks


class ScriptedTakeover:
    """`action` once a tick while nobody else has the robot. Without an operator it never takes over."""

    def __init__(self, operator: Teleoperator | None, gate: GateConfig, notify: Callable[[str, str], None]) -> None:
        """`notify(kind, detail)`: for people."""
        self.takeovers = 0
        self._operator = operator
        self._gate = Gate(gate)
        self._notify = notify
        self._failed = ""

    def reset(self) -> None:
        """An episode begins."""
        self._gate.reset()

    def action(
        self, observation: Observation, policy: np.ndarray | None, outlook: float = math.nan
    ) -> np.ndarray | None:
        """float32[da]: what the operator does if it is in control. `policy`, float32[da]: what the policy would do, and
        `outlook` what it says of its chance.

        People hear of an operator that raises once, and the robot goes on without it.
        """
        if self._operator is None:
            return None
        try:
            expert = self._operator.propose(observation)
            progress = 0.0 if expert is None else self._operator.progress()
        except Exception as error:  # noqa: BLE001 - whatever an operator's code raises
            if not self._failed:
                self._notify("operator_failed", f"the scripted operator: {type(error).__name__}: {error}")
            self._failed = str(error) or type(error).__name__
            return None
        self._failed = ""
        if expert is None:
            return None
        was_active = self._gate.active
        active = self._gate.update(policy, expert, progress, outlook)
        self.takeovers += active and not was_active
        return expert if active else None
