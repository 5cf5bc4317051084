"""A target that does not wait: MetaWorld's reach scene with a goal on a circle, for measuring late actions.

A policy that plans from an old moment is behind the target by what the target has moved since. The robot feels its own
*commanded set-point*, which its actions move exactly, and sees where the goal is and how it moves.
"""

from __future__ import annotations

import msgspec
import numpy as np

from hal.drivers.metaworld.dynamics import HAND_HIGH, HAND_LOW, STEP_M
from hal.drivers.metaworld.robot import MetaWorldConfig, metaworld_spec
from hal.drivers.metaworld.simulation import CONTROL_HZ, Simulation
from hal.interfaces.dynamics import ActionStateMapping, SpecMotion
from hal.interfaces.robot import Feedback, check_reset
from hal.safety.limiter import limit_action
from wire.clock import Clock, MonotonicClock
from wire.errors import RobotError
from wire.types import Dimension, Observation, RobotSpec

TRACK = "track"
TRACK_INSTRUCTION = "follow the goal"

PERIOD_TICKS = 90
TURN_TICKS = (30, 80)
"""of a goal that turns round: from one turn to the next, drawn evenly"""
RADIUS_M = 0.09
SPREAD_M = 0.05
"""the circle's centre lies within so much of the middle, in x"""
TOLERANCE_M = 0.02
SETTLE_TICKS = 50
"""time to get there, which does not count"""
EPISODE_TICKS = 150
_MIDDLE = (0.0, 0.7, 0.2)
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

    def __init__(self, turning: bool = False) -> None:
        """`turning`: the goal turns round now and then, which nobody foresees, the operator neither."""
        super().__init__("reach")
        self._turning = turning
        self._tick = 0
        self._phase, self._way, self._gone = 0.0, 1, 0
        self._turns_at = 0
        self._centre = np.array(_MIDDLE)

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self._rng = np.random.default_rng(seed)
        self._phase = self._rng.uniform(0.0, 2 * np.pi)
        self._way = int(self._rng.choice((-1, 1)))
        self._centre = np.array(_MIDDLE)
        self._centre[0] += self._rng.uniform(-SPREAD_M, SPREAD_M)
        self._tick = self._gone = self._turns_at = 0
        self._plan_turn()
        self._look()

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self.advance(action)
        self._tick += 1
        if self._turning and self._tick == self._turns_at:
            self._way = -self._way
            self._plan_turn()
        self._gone += self._way
        self._look()
        near = float(np.linalg.norm(self._env.get_endeff_pos() - self.goal())) < TOLERANCE_M
        return float(near and self._tick > SETTLE_TICKS), False

    def goal(self, ahead: int = 0) -> np.ndarray:
        """float64[3], metres; `ahead`: where it will be in so many ticks if it does not turn round."""
        angle = self._phase + 2 * np.pi * (self._gone + self._way * ahead) / PERIOD_TICKS
        return self._centre + RADIUS_M * np.array([np.cos(angle), np.sin(angle), 0.0])

    def _plan_turn(self) -> None:
        self._turns_at += int(self._rng.integers(*TURN_TICKS, endpoint=True))

    def _look(self) -> None:
        goal = self.goal()
        # the camera and the eye of a person see it too
        self._env._target_pos = goal
        self._env.model.site("goal").pos = goal
        speed, later = (goal - self.goal(-1)) * CONTROL_HZ, self.goal(_LEAD_TICKS)
        aim = later + _OUTSIDE * (later - self._centre) + _ABOVE
        self.observation = np.concatenate([self._env.data.mocap_pos[0], [self.opening], goal, speed, aim])


def track_spec() -> RobotSpec:
    """da = 4 as MetaWorld's, ds = 10, no camera."""
    usual = metaworld_spec(MetaWorldConfig(tasks=("reach",), observation="state"))
    where = [d for d in usual.state if d.name in ("goal_x", "goal_y", "goal_z")]
    limits = zip("xyz", HAND_LOW, HAND_HIGH, strict=True)
    return msgspec.structs.replace(
        usual,
        embodiment="metaworld-sawyer-track",
        state=(
            *(Dimension(f"set_point_{axis}", "m", low, high) for axis, low, high in limits),
            usual.state[3],
            *where,
            *(Dimension(f"goal_v{axis}", "m/s", -2.0, 2.0) for axis in "xyz"),
        ),
    )


def track_motion() -> SpecMotion:
    """The robot feels its set-point: its actions are added up, exactly."""
    moves = [ActionStateMapping(f"move_{axis}", f"set_point_{axis}", STEP_M) for axis in "xyz"]
    return SpecMotion(track_spec(), moves)


class TrackRobot:
    """Keeps the `Robot` protocol."""

    tasks = (TRACK,)

    def __init__(self, clock: Clock | None = None, turning: bool = False) -> None:
        """`turning`: see `TrackSimulation`."""
        self.spec = track_spec()
        self.task = ""
        self._turning = turning
        self._clock = clock or MonotonicClock()
        self._simulation: TrackSimulation | None = None

    def connect(self) -> None:
        self._simulation = self._simulation or TrackSimulation(self._turning)

    def reset(self, task: str, seed: int) -> None:
        check_reset("robot 'track'", task, self.tasks, seed, self._simulation is not None)
        assert self._simulation is not None
        self._simulation.reset(seed)
        self.task = task

    def read(self) -> Observation:
        state = self.privileged()[: self.spec.state_dim].astype(np.float32)
        return Observation(self._clock.now_ns(), state, {}, TRACK_INSTRUCTION)

    def write(self, action: np.ndarray) -> Feedback:
        simulation = self._running()
        executed = limit_action(self.spec, action)
        return Feedback(executed, *simulation.step(executed))

    def privileged(self) -> np.ndarray:
        """float64[13], as `TrackSimulation` says."""
        return self._running().observation

    def close(self) -> None:
        if self._simulation is not None:
            self._simulation.close()
        self._simulation, self.task = None, ""

    def _running(self) -> TrackSimulation:
        if self._simulation is None or not self.task:
            raise RobotError("robot 'track': no scene; call reset() first.")
        return self._simulation


class TrackOperator:
    """Keeps the `Teleoperator` protocol."""

    def __init__(self, robot: TrackRobot) -> None:
        self._robot = robot

    def propose(self, observation: Observation) -> np.ndarray | None:
        return track_action(self._robot.privileged()) if self._robot.task else None

    def progress(self) -> float:
        """Metres from the set-point to where it should be; infinite before the first reset."""
        if not self._robot.task:
            return float("inf")
        seen = self._robot.privileged()
        return float(np.linalg.norm(seen[10:13] - seen[:3]))


def track_action(seen: np.ndarray) -> np.ndarray:
    """float32[4]: what the operator does, `seen` as in `TrackSimulation.observation`."""
    move = (seen[10:13] - seen[:3]) * (_GAIN / STEP_M)
    return np.clip(np.append(move, 0.0), -1.0, 1.0).astype(np.float32)


def track_score(rewards: list[float]) -> float:
    """Share of the time after settling that the hand was on the goal, from every reward of an episode."""
    counted = len(rewards) - SETTLE_TICKS
    return float(np.sum(rewards)) / counted if counted > 0 else 0.0
