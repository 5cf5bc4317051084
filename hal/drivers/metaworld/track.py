"""A target that does not wait: MetaWorld's reach scene with a goal on a circle, for measuring late actions.

A policy that plans from an old moment is behind the target by what the target has moved since. The robot feels its own
*commanded set-point*, which its actions move exactly, and sees where the goal is and how it moves.
"""

from __future__ import annotations

import numpy as np

from hal.drivers.metaworld.simulation import CONTROL_HZ, Simulation
from hal.drivers.metaworld.tasks import TRACK

PERIOD_TICKS = 90
RADIUS_M = 0.09
SPREAD_M = 0.05
"""the circle's centre lies within so much of the middle, in x"""
TOLERANCE_M = 0.02
SETTLE_TICKS = 50
"""time to get there, which does not count"""
EPISODE_TICKS = 150
HAND_LOW = (-0.5, 0.40, 0.05)
HAND_HIGH = (0.5, 1.0, 0.5)
"""metres; where the simulator keeps the set-point"""
_MIDDLE = (0.0, 0.7, 0.2)
_STEP_M = 0.01
# The hand follows its set-point late and cuts the corner. The operator knows that: it aims at where the goal will be, a
# little outside the circle and above it, and so keeps the hand within 13 mm of the goal.
_LEAD_TICKS = 5
_OUTSIDE = 0.08
_ABOVE = (0.0, 0.0, 0.0035)
_GAIN = 0.7
"""share of the set-point's distance to the aim that the operator closes in a tick"""


class TrackSimulation(Simulation):
    """`observation` is float64[13]: set-point (m), gripper opening, goal (m), its speed in the last tick (m/s),
    and, which no policy sees, where the operator aims (m).

    The reward is 1 while the hand is within `TOLERANCE_M` of the goal, once `SETTLE_TICKS` have passed, otherwise 0;
    an episode never succeeds before its time is up.
    """

    def __init__(self) -> None:
        super().__init__(TRACK)
        self._tick = 0
        self._phase, self._turn = 0.0, 1.0
        self._centre = np.array(_MIDDLE)

    def reset(self, seed: int) -> None:
        super().reset(seed)
        rng = np.random.default_rng(seed)
        self._phase = rng.uniform(0.0, 2 * np.pi)
        self._turn = rng.choice((-1.0, 1.0))
        self._centre = np.array(_MIDDLE)
        self._centre[0] += rng.uniform(-SPREAD_M, SPREAD_M)
        self._tick = 0
        self._look()

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        super().step(action)
        self._tick += 1
        self._look()
        near = float(np.linalg.norm(self._env.get_endeff_pos() - self.goal(self._tick))) < TOLERANCE_M
        return float(near and self._tick > SETTLE_TICKS), False

    def goal(self, tick: int) -> np.ndarray:
        """float64[3], metres"""
        angle = self._phase + self._turn * 2 * np.pi * tick / PERIOD_TICKS
        return self._centre + RADIUS_M * np.array([np.cos(angle), np.sin(angle), 0.0])

    def _look(self) -> None:
        goal = self.goal
        opening = self.observation[3:4]
        speed = (goal(self._tick) - goal(self._tick - 1)) * CONTROL_HZ
        # the camera and the eye of a person see it too
        self._env._target_pos = goal(self._tick)
        self._env.model.site("goal").pos = goal(self._tick)
        later = goal(self._tick + _LEAD_TICKS)
        aim = later + _OUTSIDE * (later - self._centre) + _ABOVE
        self.observation = np.concatenate([self._env.data.mocap_pos[0], opening, goal(self._tick), speed, aim])


def track_action(seen: np.ndarray) -> np.ndarray:
    """float32[4]: what the operator does, `seen` as in `TrackSimulation.observation`."""
    move = (seen[10:13] - seen[:3]) * (_GAIN / _STEP_M)
    return np.clip(np.append(move, 0.0), -1.0, 1.0).astype(np.float32)


def track_score(rewards: list[float]) -> float:
    """Share of the time after settling that the hand was on the goal, from every reward of an episode."""
    counted = len(rewards) - SETTLE_TICKS
    return float(np.sum(rewards)) / counted if counted > 0 else 0.0
