"""A scripted operator for the Fetch arm: a stand-in for a person that may be asked at any state."""

from __future__ import annotations

import math

import numpy as np

from hal.drivers.gym.robot import GymRobot
from wire.types import Observation

_STEP_M = 0.05
"""that an action of 1 asks for"""
_BEHIND_M = 0.065
"""the hand's middle from the block's, when it begins to push"""
_CLEAR_M = 0.1
"""over the block, where the hand may go anywhere"""


class FetchExpert:
    """Keeps the `Teleoperator` protocol; it knows no more than the robot reads. Reaches, and pushes a block."""

    def __init__(self, robot: GymRobot) -> None:
        self._robot = robot
        names = [dimension.name for dimension in robot.spec.state]
        self._at = {
            name: [names.index(f"{name}_{axis}") for axis in "xyz"]
            for name in ("hand", "block", "goal")
            if f"{name}_x" in names
        }
        self._seen: np.ndarray | None = None

    def propose(self, observation: Observation) -> np.ndarray | None:
        """float32[4]; None before the first reset."""
        if not self._robot.task:
            return None
        state = self._seen = np.asarray(observation.state, np.float64)
        hand, goal = state[self._at["hand"]], state[self._at["goal"]]
        target = _push_target(hand, state[self._at["block"]], goal) if "block" in self._at else goal
        return np.append(np.clip((target - hand) / _STEP_M, -1, 1), 0.0).astype(np.float32)

    def progress(self) -> float:
        """Metres left: what is moved to its goal, twice, and the hand to it. Infinite before it was asked."""
        if not self._robot.task or self._seen is None:
            return float("inf")
        hand, goal = self._seen[self._at["hand"]], self._seen[self._at["goal"]]
        thing = self._seen[self._at["block"]] if "block" in self._at else hand
        return math.dist(hand, thing) + 2.0 * math.dist(thing, goal)


def _push_target(hand: np.ndarray, block: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """float64[3]: where the hand goes next: over the block's far side, down, and on to the goal with the block."""
    way = (goal - block)[:2]
    left = float(np.linalg.norm(way))
    along = way / max(left, 1e-6)
    offset = (hand - block)[:2]
    behind, beside = -float(offset @ along), abs(float(offset[0] * along[1] - offset[1] * along[0]))
    if left < 0.01:
        return hand
    begin = np.append(block[:2] - along * _BEHIND_M, block[2])
    in_line = behind > 0.03 and beside < 0.02
    if in_line and hand[2] - block[2] < 0.03:
        return np.append(hand[:2] + along * min(left, _STEP_M) - (offset + along * behind) * 0.5, block[2])
    if math.dist(hand[:2], begin[:2]) < 0.02:
        return begin
    return np.append(begin[:2], block[2] + _CLEAR_M)
