"""The Gaussian policy around one `GaussianNetwork`: `Policy` for a robot and `TrainablePolicy` for a learner."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import nn

from policies.common.batches import StepBatch, hold_masked
from policies.common.noise import seeded
from policies.common.runtime import Runtime, compiled
from policies.flow.network_policy import NetworkPolicy
from policies.gaussian.config import GaussianConfig
from policies.gaussian.network import GaussianNetwork
from policies.interface.policy import Batch
from policies.interface.trainable import FinetuneConfig
from wire.errors import PolicyError
from wire.types import Latent, Observation, Prefix, ResidualPolicy, RobotSpec

_PLAIN, _ALL = Runtime(), FinetuneConfig()


class GaussianPolicy(NetworkPolicy):
    """Chunks drawn from a distribution that one pass of a network gives, from images, an instruction and the state.

    It takes no committed prefix: it says all actions of a chunk at once and each by itself.
    """

    kind = "gaussian"
    config: GaussianConfig
    module: GaussianNetwork
    corrector: ResidualPolicy | None = None

    def __init__(
        self,
        spec: RobotSpec,
        config: GaussianConfig,
        seed: int = 0,
        runtime: Runtime = _PLAIN,
        training: FinetuneConfig = _ALL,
    ) -> None:
        """See `NetworkPolicy`."""
        super().__init__(spec, config, lambda: GaussianNetwork(config), ("fast.*",), seed, runtime, training)
        self.ticks_ahead = config.ahead
        self._distribution = compiled(GaussianNetwork.distribution, runtime)

    @property
    def think_reads_state(self) -> bool:
        """As of `FlowPolicy`."""
        return self.config.ego_motion

    def _require_usable_prefix(self, prefix: Prefix) -> None:
        if prefix.committed or prefix.guided:
            raise PolicyError(
                f"version {self.version} says all actions of a chunk at once and cannot begin one with what is "
                "committed; ask without a prefix, or use the flow policy."
            )

    def _actions(self, observation: Observation, latent: Latent, prefix: Prefix | None, seed: int) -> np.ndarray:
        network: GaussianNetwork = self._acting
        state, age = self._state(observation), self._age(observation, latent)
        with self.runtime.autocast():
            found = self._distribution(network, network.features(self._latent(latent), state, age))
        actions, _ = found.draw(torch.randn(found.mean.shape, generator=seeded(seed)).to(self.device))
        return self._own_actions(actions.view(self.horizon, -1)).cpu().numpy()

    def _read_batch(self, batch: Batch) -> StepBatch:
        read = super()._read_batch(batch)
        read.arrays["actions"] = self._normalized(read.arrays["actions"])
        return read

    def loss(self, batch: Batch) -> torch.Tensor:
        """`GaussianNetwork.loss` of a batch, a scalar; the batch as for `FlowPolicy.loss`. Nothing in it is random."""
        return self._loss(batch, by_sample=False)

    def sample_losses(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Imitates`."""
        return self._loss(batch, by_sample=True, module=module)

    def log_probability(self, batch: Batch) -> torch.Tensor:
        """As `Scores`: a density, of the actions normalised to [-1, 1] that the mask keeps."""
        arrays = self._read_batch(batch).arrays
        kept = arrays["mask"][..., None].expand_as(arrays["actions"]).flatten(2)
        density = self.module.distribution(self.features(batch)).log_density(arrays["actions"].flatten(2))
        return density.where(kept, 0.0).sum(-1)

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """As `Chunks`."""
        return self.horizon, self.config.action_dim

    def chunk_actions(self, batch: Batch) -> torch.Tensor:
        """As `Chunks`."""
        arrays = self._read_batch(batch).arrays
        return hold_masked(arrays["actions"], arrays["mask"]).flatten(2)

    @property
    def feature_width(self) -> int:
        """As `Encodes`."""
        return self.module.feature_width

    def features(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """As `Encodes`: the latent, the normalised state, and with `max_offset` the latent's age."""
        return self._features(self._read_batch(batch), self.module if module is None else cast(GaussianNetwork, module))

    def draw(
        self, features: torch.Tensor, noise: torch.Tensor, module: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Draws`."""
        network = self.module if module is None else cast(GaussianNetwork, module)
        return network.distribution(features).draw(noise)

    def _features(self, read: StepBatch, network: GaussianNetwork) -> torch.Tensor:
        arrays, words = read.arrays, self._instruction_ids(read.instructions)
        state = arrays["state"]
        latent = network.encode(list(read.images.values()), words, arrays.get("seen_state", state[:, 0]))
        return network.features(latent[:, None].expand(-1, state.shape[1], -1), state, arrays.get("frame_age"))

    def _loss(self, batch: Batch, *, by_sample: bool, module: nn.Module | None = None) -> torch.Tensor:
        network, read = self.module if module is None else cast(GaussianNetwork, module), self._read_batch(batch)
        loss = network.loss(self._features(read, network), read.arrays, by_sample=by_sample)
        if network.normalizer.online and network.training and torch.is_grad_enabled():
            # afterwards: a sample must not be normalised by what the others of its batch bring
            network.normalizer.update(read.arrays["state"])
        return loss
