"""The head that foretells how the state moves, so that the slow path learns to look for what matters."""

from __future__ import annotations

import torch
from torch import nn

_WIDTH = 128


class FutureStateHead(nn.Sequential):
    """Latent and state -> how far the state moves until so many ticks later, in its standard deviations.

    Shapes: b images, k steps behind each image, z latent, ds state, W ticks.
    """

    def __init__(self, latent_width: int, state_dim: int, ticks: int) -> None:
        """`ticks`: W"""
        outputs = ticks * state_dim
        super().__init__(nn.Linear(latent_width + state_dim, _WIDTH), nn.SiLU(), nn.Linear(_WIDTH, outputs))

    def errors(self, latent: torch.Tensor, state: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """float32[b, k, W, ds], squared: of [b, z], normalised [b, k, ds] and what it was, [b, k, W, ds]"""
        seen = torch.cat([latent[:, None].expand(-1, state.shape[1], -1), state], -1)
        return (self(seen).float().unflatten(-1, moved.shape[-2:]) - moved).square()
