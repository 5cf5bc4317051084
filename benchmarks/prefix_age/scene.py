"""Something to look at for `prefix_age`: a green square that stands still or circles, and a point that goes to it.

It is the fake robot with another goal: where the goal is, only the camera knows, and which of the two it does, only the
instruction says. The robot feels where it is itself. A goal that circles moves 0.5 cm a tick, half of what the robot
can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hal.drivers.fake import FakeConfig, FakeRobot, fake_spec
from hal.interfaces.robot import Feedback
from wire.clock import ManualClock
from wire.types import Observation

STILL, MOVING = "go-right", "go-away"
INSTRUCTIONS = {STILL: "go to the green square", MOVING: "follow the green square"}
NEAR_M = 0.03
CONTROL_HZ = 20.0
_REACH_M = 0.18
_HEIGHT_M = 0.25
"""what is higher looks larger"""
_RADIUS_M = 0.12
_PERIOD_TICKS = 160
_STEP_M = 0.01
_GAIN = 0.06
"""share of the way to the goal that the operator goes in a tick"""
CONFIG = FakeConfig((STILL, MOVING), CONTROL_HZ, camera_every_ticks=1)
SPEC = fake_spec(CONFIG)


class Square(FakeRobot):
    """The fake robot before a goal that is anywhere; in `MOVING` it turns about the middle, the same way round."""

    def __init__(self) -> None:
        self.clock = ManualClock(10**9)
        super().__init__(CONFIG, self.clock)
        self.connect()
        self._angle = 0.0
        self._centre: np.ndarray = np.zeros(2)

    def reset(self, task: str, seed: int) -> None:
        super().reset(task, seed)
        rng = np.random.default_rng((seed, 1))
        self._angle = rng.uniform(0, 2 * np.pi)
        self._centre = rng.uniform(-0.02, 0.02, 2)
        self._place(rng.uniform(-_REACH_M, _REACH_M, 2))
        begin = rng.uniform(-_REACH_M, _REACH_M, 2)
        self._state = np.array([*begin, _HEIGHT_M, 0.0], np.float32)
        self._frame = self._film()

    def read(self) -> Observation:
        observation = super().read()
        return Observation(observation.time_ns, observation.state, observation.images, INSTRUCTIONS[self.task])

    def write(self, action: np.ndarray) -> Feedback:
        self.clock.advance(self.spec.period_ns)
        if self.task == MOVING:
            self._angle += 2 * np.pi / _PERIOD_TICKS
            self._place(np.zeros(2))
        return super().write(action)

    def wanted(self) -> np.ndarray:
        """float32[4], the action of an operator who sees goal and robot exactly."""
        speed = np.zeros(3)
        if self.task == MOVING:
            turn = 2 * np.pi / _PERIOD_TICKS
            speed[:2] = turn * _RADIUS_M * np.array([-np.sin(self._angle), np.cos(self._angle)])
        move = (speed + _GAIN * (self.goal - self._state[:3])) / _STEP_M
        return np.append(np.clip(move, -1, 1), 0.0).astype(np.float32)

    def _draw(self, size: int) -> np.ndarray:
        """On middle grey, 0 to the network: darker, the many pixels that never change drown the few that do."""
        image = super()._draw(size)
        image[image == image.min()] = 128
        return image

    def _place(self, still: np.ndarray) -> None:
        circle = self._centre + _RADIUS_M * np.array([np.cos(self._angle), np.sin(self._angle)])
        self.goal = np.array([*(circle if self.task == MOVING else still), _HEIGHT_M], np.float32)


@dataclass(frozen=True)
class Demonstrations:
    """Episodes of T ticks each."""

    images: np.ndarray
    """uint8[n, T, h, w, 3]"""
    states: np.ndarray
    """float32[n, T, ds]"""
    actions: np.ndarray
    """float32[n, T, da]"""
    instructions: tuple[str, ...]
    """n of them"""

    def windows(
        self, rng: np.random.Generator, count: int, horizon: int, ages: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[str]]:
        """Images, states when they were taken, states `ages` int[count] ticks later, chunks from then on, and words."""
        episode = rng.integers(len(self.states), size=count)
        last = self.states.shape[1] - horizon - ages.max(initial=0)
        tick = rng.integers(last + 1, size=count)
        later = tick + ages
        chunks = self.actions[episode[:, None], later[:, None] + np.arange(horizon)]
        return (
            self.images[episode, tick],
            self.states[episode, tick],
            self.states[episode, later],
            chunks,
            [self.instructions[one] for one in episode],
        )


def demonstrate(episodes: int, ticks: int, seed: int) -> Demonstrations:
    """`episodes` of each task in the scenes of `seed` and after, each from anywhere to the square."""
    robot = Square()
    images, states, actions, words = [], [], [], []
    for task in (STILL, MOVING):
        for number in range(episodes):
            robot.reset(task, seed + number)
            seen, felt, wanted = [], [], []
            for _ in range(ticks):
                observation = robot.read()
                seen.append(observation.images["front"].image)
                felt.append(observation.state)
                wanted.append(robot.wanted())
                robot.write(wanted[-1])
            images.append(seen)
            states.append(felt)
            actions.append(wanted)
            words.append(INSTRUCTIONS[task])
    return Demonstrations(np.array(images), np.array(states), np.array(actions), tuple(words))
