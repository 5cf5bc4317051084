"""The job of `outside_robot.py`: its spec, the `ros2` driver, and a policy that sways the joints as it was taught."""

from __future__ import annotations

import math

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from cloud_learner.algorithms.hg_dagger import HGDagger
from cloud_learner.training.config import TrainingConfig
from fleet.config.recipe import Recipe
from hal.drivers.ros2.config import Ros2Config
from hal.safety.limits import SafetyLimits
from robot_edge.control.config import EpisodeRules, LoopConfig
from wire.errors import WeightsError
from wire.types import ActionChunk, CommandType, Dimension, Latent, Observation, PolicyCapabilities, Prefix, RobotSpec

JOINTS = ("shoulder", "elbow", "wrist", "grip")
PERIOD_S = 2.0
SPEC = RobotSpec(
    embodiment="outside-arm",
    state=tuple(Dimension(joint, "rad", -1.5, 1.5) for joint in JOINTS),
    action=tuple(Dimension(joint, "rad", -1.0, 1.0, CommandType.absolute) for joint in JOINTS),
    cameras=(),
    control_hz=50.0,
)
LIMITS = SafetyLimits(
    velocity=dict.fromkeys(JOINTS, 4.0),
    acceleration=dict.fromkeys(JOINTS, 100.0),
)
"""looser than the sway ever is"""


class Sway:
    """All joints follow one sine of the observation's time; its amplitude is all the weights there are."""

    horizon, version = 16, 0
    trained, corrector = PolicyCapabilities(), None

    def __init__(self, spec: RobotSpec, seed: int) -> None:
        self.spec = spec
        self.amplitude = 0.0

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        times_s = observation.time_ns / 1e9 + np.arange(self.horizon) / self.spec.control_hz
        sway = self.amplitude * np.sin(2 * math.pi * times_s / PERIOD_S)
        actions = np.repeat(sway[:, None], self.spec.action_dim, axis=1).astype(np.float32)
        return ActionChunk(actions, tick, self.spec.period_ns, self.version, observation.time_ns, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        try:
            self.amplitude = float(safetensors.numpy.load(weights)["amplitude"][0])
        except (SafetensorError, KeyError, IndexError) as error:
            raise WeightsError(f"version {version} is no amplitude: {error}") from error
        self.version = version


def recipe(seed: int = 0) -> Recipe:
    config = Ros2Config(SPEC, tasks={"sway": "sway"}, reset=True, stop=True)
    return Recipe(
        name="outside",
        tasks=("sway",),
        instructions={"sway": "sway"},
        robot="ros2",
        robot_config=config,
        unpaced_config=config,
        spec=SPEC,
        make_policy=Sway,
        algorithm=HGDagger(),
        training=TrainingConfig(),
        loop=LoopConfig(max_ticks=150, safety=LIMITS, episodes=EpisodeRules(reset_by_person=False)),
    )
