"""The network of the Gaussian policy: the flow policy's slow path, and a fast path to a distribution of chunks.

Shapes: b images, k steps behind each image, z latent, ds state, w features, H actions of da numbers, d = H * da.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from policies.common.batches import count_kept
from policies.common.normalizer import Normalizer
from policies.flow.networks.fast import AGE_FEATURES, AgeFeatures
from policies.flow.networks.slow import ConvSlowPath, FutureStateHead
from policies.gaussian.config import GaussianConfig

LEAST_DEVIATION, MOST_DEVIATION = 0.05, 1.0
"""of a number before it is squashed: below, its likelihood would outweigh all that is not sure yet"""
BORDER = 0.99
"""an action nearer to its limit counts as there: at the limit itself the squashed number would be endless"""
SUREST = -math.log(LEAST_DEVIATION * math.sqrt(2 * math.pi) * (1 - BORDER**2))
"""the largest logarithm of a density that there can be"""


class ChunkDistribution(NamedTuple):
    """Independent squashed normals, a = tanh(mean + deviation * e), e ~ N(0, 1): Haarnoja et al. 2018, arXiv
    1812.05905, appendix C."""

    mean: torch.Tensor
    """float32[..., d], before squashing"""
    log_deviation: torch.Tensor
    """float32[..., d], likewise"""

    def draw(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32[..., d] actions in (-1, 1), float32[..., d] the logarithm of each one's density) of float32[..., d]
        `noise`; differentiable."""
        raw = self.mean + self.log_deviation.exp() * noise
        return raw.tanh(), self._log_density(noise, raw)

    def log_density(self, actions: torch.Tensor) -> torch.Tensor:
        """float32[..., d] of actions float32[..., d] in [-1, 1]; see `BORDER`."""
        raw = actions.float().clamp(-BORDER, BORDER).atanh()
        return self._log_density((raw - self.mean) * (-self.log_deviation).exp(), raw)

    def _log_density(self, noise: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        normal = -0.5 * noise.square() - self.log_deviation - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2), exact also where the tanh is 1 in float32 (the same paper's equation 21, rewritten)
        return normal - 2 * (math.log(2) - raw - F.softplus(-2 * raw))


class GaussianNetwork(nn.Module):
    """Both paths and the state's statistics. Actions are normalised to [-1, 1]."""

    image_losses: torch.Tensor | None = None
    """float32[b]: the loss behind each image of the last `loss`"""

    def __init__(self, config: GaussianConfig) -> None:
        super().__init__()
        self.config = config
        self.normalizer = Normalizer(config.state_dim, config.online_statistics)
        self.slow = ConvSlowPath(config)
        self.latent_width = self.slow.width + (config.state_dim if config.ego_motion else 0)
        """z"""
        self.feature_width = self.latent_width + config.state_dim + (AGE_FEATURES if config.max_offset else 0)
        """w"""
        if config.max_offset:
            self.embed_age = AgeFeatures(config.max_offset)
        flat = config.horizon * config.action_dim
        widths = [self.feature_width, *[config.width] * config.layers]
        hidden = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.SiLU())]
        self.fast = nn.Sequential(*hidden, nn.Linear(config.width, 2 * flat))
        if config.ahead:
            self.future_state_head = FutureStateHead(self.latent_width, config.state_dim, len(config.ahead))

    def encode(self, images: Sequence[torch.Tensor], tokens: torch.Tensor, seen_state: torch.Tensor) -> torch.Tensor:
        """As of `FlowNetwork`."""
        latent = self.slow(images, tokens)
        if not self.config.ego_motion:
            return latent
        return torch.cat([latent, self.normalizer(seen_state).to(latent.dtype)], 1)

    def features(self, latent: torch.Tensor, state: torch.Tensor, age: torch.Tensor | None) -> torch.Tensor:
        """float32[..., w]: all that a chunk is made from. [..., z], [..., ds] as it was felt, [..., 1] ticks or None"""
        known = [latent.float(), self.normalizer(state)]
        if self.config.max_offset:
            known.append(self.embed_age(state.new_zeros(*state.shape[:-1], 1) if age is None else age))
        return torch.cat(known, -1)

    def distribution(self, features: torch.Tensor) -> ChunkDistribution:
        """Of chunks, for float32[..., w]."""
        mean, deviation = self.fast(features).float().chunk(2, -1)
        low, high = math.log(LEAST_DEVIATION), math.log(MOST_DEVIATION)
        return ChunkDistribution(mean, low + (high - low) * deviation.sigmoid())

    def loss(
        self, features: torch.Tensor, arrays: Mapping[str, torch.Tensor], *, by_sample: bool = False
    ) -> torch.Tensor:
        """How far the logarithm of the density of what people did is below `SUREST`, the mean over the numbers that
        `mask` keeps; `by_sample`: [b, k], each one's. So it is never below 0: losses are compared by how many times as
        high they are. With `ahead` as of `FlowNetwork.loss`.

        features: float32[b, k, w]; arrays: those that `GaussianPolicy.loss` names, the actions normalised.
        """
        state, actions, mask = arrays["state"], arrays["actions"], arrays["mask"]
        kept = mask[..., None].expand_as(actions).flatten(2)
        # what is masked is no action: its values must not reach the loss
        wanted = actions.flatten(2).where(kept, 0.0)
        errors = (SUREST - self.distribution(features).log_density(wanted)) * kept
        self.image_losses = (errors.detach().sum((1, 2)) / kept.sum((1, 2)).clamp_min(1)).float()
        loss = errors.sum(2) / kept.sum(2).clamp_min(1) if by_sample else errors.sum() / count_kept(kept.sum())
        if self.config.ahead:
            latent, felt = features[:, 0, : self.latent_width], self.normalizer(state)
            moved = (arrays["ahead"] - state[:, :, None]) / self.normalizer.std
            loss = loss + self.config.ahead_weight * self.future_state_head.errors(latent, felt, moved).mean()
        return loss
