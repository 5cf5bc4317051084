"""Your own policy in a fleet: what acts (`think`, `act`, `load`) and what learns (`module`, `loss`, `save`, `fit`).

PYTHONPATH=docs/examples vla-fleet up --recipe own_policy:regression --robots 2 --minutes 2
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import safetensors.torch
import torch
from torch import nn

from fleet.config import Recipe
from fleet.recipes import state
from policies.base import Batch, Examples
from wire.errors import PolicyError, WeightsError
from wire.types import ActionChunk, Latent, Observation, Prefix, RobotSpec, Trained


class Regression:
    """A small network that maps the state straight to a chunk of actions, by squared error."""

    horizon, version, ticks_ahead, max_offset, history = 16, 0, (), 0, 0
    # trained for no delay, no prefix, and without a corrector of single actions; begins with random weights
    trained, corrector, pretrained = Trained(), None, False

    def __init__(self, spec: RobotSpec, seed: int) -> None:
        torch.manual_seed(seed)
        self.spec = spec
        out = self.horizon * spec.action_dim
        self.module = nn.Sequential(
            nn.LazyBatchNorm1d(affine=False),
            nn.LazyLinear(256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, out),
        )
        self.module.eval()(torch.zeros(1, spec.state_dim))

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        if prefix is not None:
            raise PolicyError("this policy was not trained to continue a prefix.")
        if latent.version != self.version:
            raise PolicyError(f"a latent of version {latent.version} does not go with version {self.version}.")
        with torch.inference_mode():
            actions = self._chunks(torch.from_numpy(observation.state.copy())[None])[0].clamp(-1, 1).numpy()
        return ActionChunk(actions, tick, self.spec.period_ns, self.version, observation.time_ns, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        try:
            self.module.load_state_dict(safetensors.torch.load(weights))
        except Exception as error:
            raise WeightsError(f"version {version} does not fit: {error}") from error
        self.version = version

    def fit(self, examples: Examples) -> None:
        states = examples.states
        norm = self.module[0]
        norm.running_mean.copy_(torch.from_numpy(states.mean(0)))
        norm.running_var.copy_(torch.from_numpy(states.var(0)).clamp_min(1e-3))

    def loss(self, batch: Batch) -> torch.Tensor:
        states = torch.from_numpy(batch["state"]).flatten(0, -2)
        error = self._chunks(states) - torch.from_numpy(batch["actions"]).view(len(states), self.horizon, -1)
        mask = torch.from_numpy(batch["mask"]).view(len(states), self.horizon, 1)
        return (error.square() * mask).sum() / (mask.sum() * self.spec.action_dim).clamp_min(1)

    def save(self, module: nn.Module | None = None) -> bytes:
        return safetensors.torch.save((module or self.module).state_dict())

    def _chunks(self, states: torch.Tensor) -> torch.Tensor:
        return self.module(states).view(-1, self.horizon, self.spec.action_dim)


def regression(seed: int = 0) -> Recipe:
    """The `state` recipe with another policy."""
    return replace(state(seed), summary="push and pick-place by plain regression", make_policy=Regression)
