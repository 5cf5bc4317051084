"""Where the hand of the simulated Sawyer will be: what an asynchronous policy starts from.

Actions move a set-point, exactly; the hand is drawn after it, up to 4 cm behind at full speed. The robot feels the
hand: where the set-point is follows from the actions executed before.
"""

from __future__ import annotations

import numpy as np

from hal.drivers.metaworld.simulation import CONTROL_HZ
from hal.interfaces.dynamics import ActionStateMapping
from hal.safety.limits import SafetyLimits
from wire.types import RobotSpec

STEP_M = 0.01
"""of the set-point, for an action of 1"""
HAND_LOW = (-0.5, 0.40, 0.05)
HAND_HIGH = (0.5, 1.0, 0.5)
"""metres; where the simulator keeps the set-point"""
_FOLLOW = 0.26
_SMOOTH = 0.5
"""shares per tick, fitted to the scripted experts' episodes of all shipped tasks, with and without noise"""
_WALL_M = 0.02
"""the hand may swing so far beyond where its set-point is kept"""
_MEMORY_TICKS = 40
"""after which nothing is left of an action but its step"""


def metaworld_limits() -> SafetyLimits:
    """Full speed at most, full reversal in two ticks, the simulator's own walls.

    Loose: the scripted experts go from rest to full speed at once, which these limits let them do.
    """
    speed = CONTROL_HZ
    return SafetyLimits(
        # The gripper's effort may turn in less than a tick: a limit only so that the arm can be slowed.
        velocity={f"move_{axis}": speed for axis in "xyz"} | {"gripper_effort": 4 * speed},
        acceleration={f"move_{axis}": speed * CONTROL_HZ for axis in "xyz"},
        workspace={
            f"hand_{axis}": (low - _WALL_M, high + _WALL_M)
            for axis, low, high in zip("xyz", HAND_LOW, HAND_HIGH, strict=True)
        },
        moves=tuple(ActionStateMapping(f"move_{axis}", f"hand_{axis}", STEP_M) for axis in "xyz"),
        rest={"gripper_effort": 0.0},
    )


class HandMotion:
    """The measured hand behind its set-point, in each axis, within the limits that the simulator keeps it to:

        s' = s + 0.01 a,  f' = f + 0.5 (s' - f),  h' = h + 0.26 (f' - h)

    Contacts are not foreseen: a hand that is pressed against something is thought to move on. If the state also has the
    hand one tick ago, that is foretold too. Mean error on the six shipped tasks, 36 episodes of the scripted experts,
    half of them with noise, in mm:

    | ticks ahead | 1 | 2 | 4 | 8 | 12 |
    | --- | --- | --- | --- | --- | --- |
    | the hand stays | 7.9 | 15.9 | 32.0 | 62.9 | 90.8 |
    | actions added up | 4.7 | 9.0 | 16.6 | 28.0 | 35.9 |
    | this | 1.6 | 3.1 | 5.8 | 10.2 | 13.3 |
    """

    def __init__(self, spec: RobotSpec) -> None:
        """`spec`: one of MetaWorld's."""
        names = [d.name for d in spec.state]
        self._hand = np.array([names.index(f"hand_{axis}") for axis in "xyz"])
        before = [f"hand_{axis}_before" for axis in "xyz"]
        self._before = np.array([names.index(name) for name in before if name in names], int)
        self.rolled = np.zeros(len(names), bool)
        self.rolled[self._hand] = self.rolled[self._before] = True

    def rollout(self, state: np.ndarray, past: np.ndarray, coming: np.ndarray) -> np.ndarray:
        """See `DynamicsModel.rollout`. Without `past` the hand is taken to be where its set-point is."""
        rolled = np.array(state, np.float32)
        if not len(coming):
            return rolled
        recent = past[-_MEMORY_TICKS:, :3].astype(np.float64)
        ahead, smoothed = (_AHEAD[:, len(_AHEAD[0]) - len(recent) :] @ recent).tolist()
        seen, actions = rolled[self._hand].tolist(), coming[:, :3].tolist()
        hands, hands_before = [], []
        # One axis after the other as plain numbers: a few steps of three numbers take several times as long as arrays.
        for axis, (low, high) in enumerate(zip(HAND_LOW, HAND_HIGH, strict=True)):
            hand = before = seen[axis]
            point, smooth = min(max(hand + ahead[axis], low), high), hand + smoothed[axis]
            for action in actions:
                before = hand
                point = min(max(point + STEP_M * action[axis], low), high)
                smooth, hand = _follow(point, smooth, hand)
            hands.append(hand)
            hands_before.append(before)
        rolled[self._hand] = hands
        if len(self._before):
            rolled[self._before] = hands_before
        return rolled


def _follow(point: float, smooth: float, hand: float) -> tuple[float, float]:
    smooth = smooth + _SMOOTH * (point - smooth)
    return smooth, hand + _FOLLOW * (smooth - hand)


def _kernels() -> np.ndarray:
    """float64[2, memory], oldest first: how far set-point and smoothed set-point are before the hand after an action.

    The motion is linear, so what all past actions come to is a sum; stepping through them would cost a control tick.
    """
    point, smooth, hand = STEP_M, 0.0, 0.0
    found = []
    for _ in range(_MEMORY_TICKS):
        smooth, hand = _follow(point, smooth, hand)
        found.append([point - hand, smooth - hand])
    return np.array(found[::-1]).T


_AHEAD = _kernels()
