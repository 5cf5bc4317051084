"""Your own policy in a fleet: what acts (`think`, `act`, `load`) and what learns (`module`, `loss`, `save`).

PYTHONPATH=docs/examples vla-fleet up --recipe own_policy:regression --robots 2 --minutes 2
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fleet.config.recipe import Recipe
from fleet.config.recipes import state
from policies.common.weights import Header, load_into, pack, unpack
from policies.interface.policy import Batch, NormalizationData, check_observation
from wire.errors import InvalidDataError, PolicyError, WeightsError
from wire.types import ActionChunk, Latent, Observation, PolicyCapabilities, Prefix, RobotSpec


class Regression:
    """A small network that maps the state straight to a chunk of actions, by squared error."""

    horizon, version, ticks_ahead, max_offset, history = 16, 0, (), 0, 0
    # trained for no delay, no prefix, and without a corrector of single actions; begins with random weights
    trained, corrector, pretrained = PolicyCapabilities(), None, False

    def __init__(self, spec: RobotSpec, seed: int) -> None:
        self.spec = spec
        self.header = Header("regression", {}, spec, spec.hash)
        out = self.horizon * spec.action_dim
        with torch.random.fork_rng(devices=[]):  # making a policy moves nobody's random numbers
            torch.manual_seed(seed)
            self.module = nn.Sequential(
                nn.BatchNorm1d(spec.state_dim, affine=False),
                nn.Linear(spec.state_dim, 256),
                nn.SiLU(),
                nn.Linear(256, 256),
                nn.SiLU(),
                nn.Linear(256, out),
            ).eval()

    def think(self, observation: Observation) -> Latent:
        return Latent(np.zeros(0, np.float32), observation.time_ns, self.version)

    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        if prefix is not None:
            raise PolicyError("this policy was not trained to continue a prefix.")
        if latent.version != self.version:
            raise PolicyError(f"a latent of version {latent.version} does not go with version {self.version}.")
        check_observation(self.spec, observation, cameras=())
        with torch.inference_mode():
            actions = self._chunks(torch.from_numpy(observation.state.copy())[None])[0].clamp(-1, 1).numpy()
        return ActionChunk(actions, tick, self.spec.period_ns, self.version, observation.time_ns, latent.observed_ns)

    def load(self, weights: bytes, version: int) -> None:
        header, tensors = unpack(weights)
        header.spec.require(self.spec, "weights")
        if header.network != self.header.network:
            raise WeightsError(f"weights of a '{header.network}' network, this is '{self.header.network}'.")
        load_into(self.module, tensors)
        self.version = version

    def save(self, module: nn.Module | None = None) -> bytes:
        return pack((module or self.module).state_dict(), self.header)

    def set_normalization(self, examples: NormalizationData) -> None:
        states = self._fitting(examples.states, "states", self.spec.state_dim)
        norm = self.module[0]
        norm.running_mean.copy_(states.mean(0))
        norm.running_var.copy_(states.var(0)).clamp_(1e-3)

    def loss(self, batch: Batch) -> torch.Tensor:
        states = self._fitting(batch.get("state"), "state", self.spec.state_dim)
        actions = self._fitting(batch.get("actions"), "actions", self.horizon, self.spec.action_dim)
        mask = self._fitting(batch.get("mask"), "mask", self.horizon)
        if not mask.any():
            raise InvalidDataError("training batch: its mask keeps no action.")
        error = (self._chunks(states) - actions).square() * mask[..., None]
        return error.sum() / (mask.sum() * self.spec.action_dim)

    def _fitting(self, array: np.ndarray | None, name: str, *shape: int) -> torch.Tensor:
        if array is None or array.shape[-len(shape) :] != shape:
            raise InvalidDataError(f"'{name}' must end in {shape}, not {None if array is None else array.shape}.")
        return torch.from_numpy(array).reshape(-1, *shape)

    def _chunks(self, states: torch.Tensor) -> torch.Tensor:
        return self.module(states).view(-1, self.horizon, self.spec.action_dim)


def regression(seed: int = 0) -> Recipe:
    """The `state` recipe with another policy."""
    return replace(state(seed), make_policy=Regression)
