"""Your own robot in a fleet: five methods, one entry point, one recipe.

    PYTHONPATH=docs/examples vla-fleet up --recipe own_robot:slider --robots 2 --minutes 1

A robot that ships in a package names itself in the package's pyproject.toml instead of calling `register`:

    [project.entry-points."vla_fleet.robots"]
    slider = "own_robot:Slider"
    [project.entry-points."vla_fleet.operators"]
    slider = "own_robot:Coach"
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import state
from hal.interfaces.robot import Feedback
from hal.registry import register
from hal.safety.limiter import limit_action
from robot_edge.control.config import LoopConfig
from wire.clock import Clock, MonotonicClock
from wire.errors import ConfigError, RobotError, suggest
from wire.types import CommandType, Dimension, Observation, RobotSpec

SPEC = RobotSpec(
    embodiment="slider",
    state=(Dimension("position", "m", -1.0, 1.0), Dimension("goal", "m", -1.0, 1.0)),
    action=(Dimension("move", "cm/step", -1.0, 1.0, CommandType.delta), Dimension("brake", "1", 0.0, 1.0)),
    cameras=(),
    control_hz=50.0,
)


class Slider:
    """A carriage on a rail that has to reach a mark."""

    spec, tasks = SPEC, ("reach",)

    def __init__(self, config: object = None, clock: Clock | None = None) -> None:
        # A simulator stamps with the clock it is given: demonstrations and evaluations run faster than real time.
        self.clock = clock or MonotonicClock()
        self.connected = self.ready = False
        self.position = self.goal = 0.0

    def connect(self) -> None:
        """A real driver opens its bus here, and says what to do when it cannot."""
        self.connected = True

    def reset(self, task: str, seed: int) -> None:
        if not self.connected:
            raise RobotError("the slider: reset before connect(); call connect() first.")
        if task not in self.tasks:
            raise ConfigError(f"the slider cannot do '{task}'.{suggest(task, self.tasks)} Known: reach.")
        self.position, self.goal = np.random.default_rng(seed).uniform(-0.5, 0.5, 2)
        self.ready = True

    def read(self) -> Observation:
        self._check("read")
        state = np.array([self.position, self.goal], np.float32)
        return Observation(self.clock.now_ns(), state, {}, "reach the mark")

    def write(self, action: np.ndarray) -> Feedback:
        self._check("write")
        executed = limit_action(self.spec, action)
        self.position += 0.01 * float(executed[0])
        return Feedback(executed, success=abs(self.position - self.goal) < 0.01)

    def close(self) -> None:
        """A real driver brings its robot to rest here."""
        self.connected = self.ready = False

    def _check(self, what: str) -> None:
        if not self.ready:
            raise RobotError(f"the slider: {what} without a scene; call reset() first.")


class Coach:
    """Corrects the slider: what a person, or a controller that knows more than the policy, would do."""

    def __init__(self, robot: Slider) -> None:
        self.robot = robot

    def propose(self, observation: Observation) -> np.ndarray:
        wanted = np.clip(100 * (self.robot.goal - self.robot.position), -1, 1)
        return np.array([wanted, 0.0], np.float32)

    def progress(self) -> float:
        return abs(self.robot.goal - self.robot.position)


register("slider", Slider, Coach)


def slider(seed: int = 0) -> Recipe:
    """The `state` recipe with another robot."""
    return replace(
        state(seed),
        tasks=("reach",),
        instructions={"reach": "reach the mark"},
        robot="slider",
        robot_config=None,
        unpaced_config=None,
        spec=SPEC,
        loop=LoopConfig(max_ticks=150),
    )
