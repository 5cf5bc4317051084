"""MetaWorld's scripted experts as an operator: a stand-in for a person that may be asked at any state.

Each expert is a pure function of the simulator's whole observation, which a robot that sees pixels does not have.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from hal.drivers.metaworld.robot import MetaWorldRobot
from hal.drivers.metaworld.simulation import import_simulator
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

            made: Any = ENV_POLICY_MAP[f"{task}-v3"]
            # The experts ask for more than the limits on purpose; their own `move` warns of it at each call.
            sys.modules[made.__module__].__dict__["move"] = _move
            expert = self._experts[task] = made()
        # A copy: some experts write into what they are shown.
        seen = self._robot.privileged().copy()
        if task == "door-open" and (correction := _round_the_handle(seen)) is not None:
            return correction
        wanted = expert.get_action(seen).tolist()
        return np.array([min(max(number, -1.0), 1.0) for number in wanted], np.float32)

    def progress(self) -> float:
        """Metres left: hand to object, and twice the way of the object to its goal. Infinite before the first reset.

        The object's way counts twice so that it outweighs a hand that has to step back to push.
        """
        if not self._robot.task:
            return float("inf")
        seen = self._robot.privileged()
        hand, thing, goal = seen[:3].tolist(), seen[4:7].tolist(), seen[36:39].tolist()
        return math.dist(hand, thing) + 2.0 * math.dist(thing, goal)


def _move(from_xyz: np.ndarray, to_xyz: np.ndarray, p: float) -> np.ndarray:
    """What MetaWorld's own `move` gives."""
    return p * (to_xyz - from_xyz)


def _round_the_handle(seen: np.ndarray) -> np.ndarray | None:
    """What a person does when the hand comes down on the wrong side of the door's handle; None when it does not.

    MetaWorld's expert lowers the hand there and jams it against the handle for good, in a state from which a policy
    that agrees with it can never be corrected. So: lift over the handle, then come down on its right side.
    `seen` is MetaWorld's observation, float64[39]: hand at 0:3, handle at 4:7, metres.
    """
    hand, handle = seen[:3].tolist(), seen[4:7].tolist()
    offset = [at - there for at, there in zip(hand, handle, strict=True)]
    if math.hypot(offset[0] + 0.05, offset[1]) > 0.12 or offset[0] >= -0.02:
        return None
    beside = (offset[0] - 0.01, 0.03, 0.14) if offset[2] < 0.07 else (0.03, 0.03, 0.12)
    move = [25.0 * (there + more - at) for at, there, more in zip(hand, handle, beside, strict=True)]
    return np.array([*(min(max(number, -1.0), 1.0) for number in move), 1.0], np.float32)
