"""A robot of all three meanings and a plant that moves it, counting what its guard lets through."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hal.interfaces.dynamics import ActionStateMapping
from hal.safety.limiter import hold_numbers, limit_action, limit_numbers, limited_numbers, speeds_of
from hal.safety.limits import CompiledLimits, SafetyLimits
from hal.safety.rest import rest_action
from wire.errors import InvalidDataError
from wire.types import CommandType, Dimension, RobotSpec

HZ = 80.0
P = 1 / HZ
SPEC = RobotSpec(
    embodiment="bench",
    state=(
        Dimension("x", "m", -9.0, 9.0),
        Dimension("angle", "rad", -9.0, 9.0),
        Dimension("joint", "rad", -9.0, 9.0),
    ),
    action=(
        Dimension("move", "cm/step", -1.0, 1.0, CommandType.delta),
        Dimension("spin", "rad/s", -2.0, 2.0, CommandType.velocity),
        Dimension("joint", "rad", 0.2, 3.0, CommandType.absolute),
    ),
    cameras=(),
    control_hz=HZ,
)
MIDDLE = np.array([0.0, 0.0, 1.0], np.float32)
STATE = np.array([0.0, 0.0, 1.0], np.float32)
LIMITS = SafetyLimits(
    velocity={"move": 30.0, "spin": 1.0, "joint": 4.0},
    acceleration={"move": 200.0, "spin": 6.0, "joint": 40.0},
    workspace={"x": (-0.25, 0.3), "angle": (-0.5, 0.4), "joint": (0.5, 2.5)},
    moves=(ActionStateMapping("move", "x", 0.01), ActionStateMapping("spin", "angle", -1.0)),
)
ACTIONS = [d.name for d in SPEC.action]


class MotionState(NamedTuple):
    executed: np.ndarray
    """float32[da]"""
    speed: np.ndarray
    """float64[da]"""


def at_rest(executed: np.ndarray) -> MotionState:
    return MotionState(executed, np.zeros(len(executed)))


def speed_of(compiled: CompiledLimits, action: np.ndarray, executed: np.ndarray) -> np.ndarray:
    return np.array(speeds_of(compiled, action.tolist(), executed.tolist()))


def apply_limits(
    compiled: CompiledLimits, moving: MotionState, action: np.ndarray, state: np.ndarray | None = None
) -> np.ndarray:
    return _limited(compiled, moving, limit_numbers(compiled.spec, action), state)


def brake_action(compiled: CompiledLimits, moving: MotionState, state: np.ndarray | None = None) -> np.ndarray:
    return _limited(compiled, moving, hold_numbers(compiled.spec, moving.executed), state)


def _limited(
    compiled: CompiledLimits, moving: MotionState, wanted: list[float], state: np.ndarray | None
) -> np.ndarray:
    measured = state.tolist() if state is not None else None
    chosen = limited_numbers(compiled, wanted, moving.executed.tolist(), moving.speed.tolist(), measured)
    return np.array(chosen, np.float32)


def with_one(index: int, value: float) -> np.ndarray:
    action = MIDDLE.copy()
    action[index] = np.float32(value)
    return action


def near(bound: float) -> list[np.float32]:
    """Just below, at and just above `bound`, in float32 and further away."""
    at = np.float32(bound)
    ways = np.float32(-np.inf), np.float32(np.inf)
    return [
        at,
        *(np.nextafter(at, way) for way in ways),
        *(np.float32(bound + x) for x in np.linspace(-0.05, 0.05, 21)),
    ]


class Plant:
    """A robot that moves as `SpecMotion` says, and counts what its guard let through."""

    def __init__(self, compiled: CompiledLimits, limits: SafetyLimits, spec: RobotSpec = SPEC) -> None:
        self.compiled, self.limits, self.spec = compiled, limits, spec
        self.moving = at_rest(rest_action(spec, STATE))
        self.place = STATE[:2].astype(np.float64)

    @property
    def state(self) -> np.ndarray:
        return np.array([*self.place, self.moving.executed[2]], np.float32)

    def do(self, wanted: np.ndarray) -> np.ndarray:
        """One period of whatever is asked for; every limit is checked."""
        try:
            action = apply_limits(self.compiled, self.moving, wanted, self.state)
        except InvalidDataError:
            action = brake_action(self.compiled, self.moving, self.state)
        before = self.moving
        self.moving = MotionState(action, speed_of(self.compiled, action, before.executed))
        assert action.dtype == np.float32
        assert np.array_equal(limit_action(self.spec, action), action), "within its bounds"
        for index, name in enumerate(ACTIONS):
            speed, tiny = self.moving.speed[index], 1e-9
            fastest = self.limits.velocity.get(name, np.inf)
            assert abs(speed) <= fastest * (1 + tiny), f"velocity of {name}"
            change = abs(speed - before.speed[index]) / P
            assert change <= self.limits.acceleration.get(name, np.inf) * (1 + 1e-6), f"acceleration of {name}"
        self.place += np.array([0.01 * float(action[0]), -float(action[1]) * P])
        for at, name in zip((*self.place, float(action[2])), ("x", "angle", "joint"), strict=True):
            low, high = self.limits.workspace.get(name, (-np.inf, np.inf))
            assert low - 1e-6 <= at <= high + 1e-6, f"workspace of {name}"
        return action
