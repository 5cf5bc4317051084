"""The fake recipe with a policy that steers to where a task's goal usually is, unless its weights are `still`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fleet.config.recipe import Recipe
from fleet.config.recipes import fake
from hal.drivers.fake import _GOALS, FAKE_INSTRUCTIONS
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, RobotSpec


class Steering:
    """Gets near enough about every second time, and learns nothing."""

    horizon = 16
    trained = PolicyCapabilities()
    corrector = None
    pretrained = True

    def __init__(self, spec: RobotSpec) -> None:
        self.spec, self.version, self.still = spec, 0, False
        tasks = {sentence: task for task, sentence in FAKE_INSTRUCTIONS.items()}
        self._goals = {sentence: _GOALS[task] for sentence, task in tasks.items()}

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        actions = np.zeros((self.horizon, 4), np.float32)
        way = self._goals[observation.task] - observation.state[:3]
        for action in actions if not self.still else ():
            action[:3] = np.clip(100 * way, -1, 1)
            way = way - 0.01 * action[:3]
        return ActionChunk(actions, tick, 1, self.version, observation.time_ns, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        self.still, self.version = weights == b"still", version


def steering(seed: int = 0) -> Recipe:
    recipe = fake(seed)
    return replace(recipe, make_policy=lambda spec, _seed: Steering(spec))
