"""MetaWorld's scripted experts as an operator: a stand-in for a person that may be asked at any state.

Each expert is a pure function of the simulator's whole observation, which a robot that sees pixels does not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hal.drivers.metaworld import MetaWorldRobot
from hal.drivers.metaworld_sim import import_simulator
from hal.drivers.metaworld_tasks import simulator_name
from wire.types import Observation


class MetaWorldExpert:
    """Keeps the `Teleoperator` protocol; it looks into `robot`'s simulator."""

    def __init__(self, robot: MetaWorldRobot) -> None:
        self._robot = robot
        self._experts: dict[str, Any] = {}

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[4], what MetaWorld's expert for the running task does now; None before the first reset."""
        task = self._robot.task
        if not task:
            return None
        expert = self._experts.get(task)
        if expert is None:
            import_simulator()
            from metaworld.policies import ENV_POLICY_MAP

            made: Any = ENV_POLICY_MAP[simulator_name(task)]
            expert = self._experts[task] = made()
        return np.clip(expert.get_action(self._robot.privileged()), -1.0, 1.0).astype(np.float32)

    def progress(self) -> float:
        """Metres left: hand to object, and twice the way of the object to its goal. Infinite before the first reset.

        The object's way counts twice so that it outweighs a hand that has to step back to push.
        """
        if not self._robot.task:
            return float("inf")
        seen = self._robot.privileged()
        hand, thing, goal = seen[:3], seen[4:7], seen[36:39]
        return float(np.linalg.norm(hand - thing) + 2.0 * np.linalg.norm(thing - goal))
