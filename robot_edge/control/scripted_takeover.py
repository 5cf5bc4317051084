"""The scripted operator at a robot's side: takes over when its gate opens, hands back when it closes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from hal.interfaces.robot import Teleoperator
from robot_edge.control.takeover_gate import Takeover
from wire.types import Observation

log = logging.getLogger(__name__)


class ScriptedTakeover:
    """`action` once a tick while nobody else has the robot. Without an operator and a gate it never takes over."""

    def __init__(self, operator: Teleoperator | None, gate: Takeover | None, tell: Callable[[str, str], None]) -> None:
        """`tell(kind, detail)`: for people."""
        self.takeovers = 0
        self._operator = operator
        self._gate = gate
        self._tell = tell
        self._failed = ""

    def reset(self) -> None:
        """An episode begins."""
        if self._gate is not None:
            self._gate.reset()

    def action(self, observation: Observation, policy: np.ndarray | None) -> np.ndarray | None:
        """float32[da]: what the operator does if it is in control. `policy`, float32[da]: what the policy would do.

        An operator that raises is told of once, and the robot goes on without it.
        """
        if self._operator is None or self._gate is None:
            return None
        try:
            expert = self._operator.propose(observation)
            progress = 0.0 if expert is None else self._operator.progress()
        except Exception as error:  # noqa: BLE001 - whatever an operator's code raises
            if not self._failed:
                self._tell("operator_failed", f"the scripted operator: {type(error).__name__}: {error}")
            self._failed = str(error) or type(error).__name__
            return None
        self._failed = ""
        if expert is None:
            return None
        was_active = self._gate.active
        active = self._gate.update(policy, expert, progress)
        self.takeovers += active and not was_active
        return expert if active else None
