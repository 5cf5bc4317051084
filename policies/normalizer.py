"""Mean and deviation of the state, so that metres and radians reach the network at the same size."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from wire.errors import InvalidData

MIN_STD = 0.02
"""A dimension that hardly moved in the data must not blow up when it moves later."""
LIMIT = 5.0
"""Normalised values are clamped to ±LIMIT: a state never seen before stays a moderate input."""


class Normalizer(nn.Module):
    """x -> clamp((x - mean) / std, ±LIMIT). Both are buffers: they are saved and loaded with the weights."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dimensions))
        self.register_buffer("std", torch.ones(dimensions))

    def fit(self, states: np.ndarray) -> None:
        """Take the statistics of float[N, ds]. Raises `InvalidData` for another shape, no rows or NaN."""
        states = np.asarray(states, np.float64)
        expected = self.mean.shape[0]
        if states.ndim != 2 or states.shape[1] != expected or not len(states):
            raise InvalidData(f"state statistics need [N, {expected}] with N > 0, got {list(states.shape)}.")
        if not np.isfinite(states).all():
            rows = int((~np.isfinite(states).all(1)).sum())
            raise InvalidData(f"state statistics: {rows} of {len(states)} rows are not finite.")
        self.mean.copy_(torch.from_numpy(states.mean(0)))
        self.std.copy_(torch.from_numpy(np.maximum(states.std(0), MIN_STD)))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """float32[..., ds] of the same shape as `state`."""
        return ((state - self.mean) / self.std).clamp(-LIMIT, LIMIT)
