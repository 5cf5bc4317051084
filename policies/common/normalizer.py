"""Mean and deviation of the state, so that metres and radians reach the network at the same size.

Online statistics follow the data while a policy learns. They are buffers of the network: the learner copies them into
the average that robots run, and they travel with its weights, so both sides always normalise alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from policies.common.residual_policy import STATE_LIMIT
from wire.errors import InvalidDataError, PolicyError

MIN_STD = 0.02
"""A dimension that hardly moved in the data must not blow up when it moves later."""
WINDOW = 1_000_000
"""states that online statistics remember: two thousand batches of 512, slow enough for the weights to keep up"""


class Normalizer(nn.Module):
    """x -> clamp((x - mean) / std, ±STATE_LIMIT). Both are buffers: they are saved and loaded with the weights.

    With `online`, three more are: `count` (of states, at most WINDOW), `mean64` and `spread` (sum of squared
    deviations), all float64. Without, the tensors are those of older weights.
    """

    mean: torch.Tensor
    std: torch.Tensor
    count: torch.Tensor
    mean64: torch.Tensor
    spread: torch.Tensor

    def __init__(self, dimensions: int, online: bool = False) -> None:
        super().__init__()
        self.online = online
        self.register_buffer("mean", torch.zeros(dimensions))
        self.register_buffer("std", torch.ones(dimensions))
        if online:
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
            self.register_buffer("mean64", torch.zeros(dimensions, dtype=torch.float64))
            self.register_buffer("spread", torch.zeros(dimensions, dtype=torch.float64))

    def fit(self, states: np.ndarray) -> None:
        """Take the statistics of float[N, ds]; online ones go on from there.

        Raises `InvalidDataError` for another shape, no rows or NaN.
        """
        states = np.asarray(states, np.float64)
        expected = self.mean.shape[0]
        if states.ndim != 2 or states.shape[1] != expected or not len(states):
            raise InvalidDataError(f"state statistics need [N, {expected}] with N > 0, got {list(states.shape)}.")
        if not np.isfinite(states).all():
            rows = int((~np.isfinite(states).all(1)).sum())
            raise InvalidDataError(f"state statistics: {rows} of {len(states)} rows are not finite.")
        self.mean.copy_(torch.from_numpy(states.mean(0)))
        self.std.copy_(torch.from_numpy(np.maximum(states.std(0), MIN_STD)))
        if self.online:
            for known in (self.count, self.mean64, self.spread):
                known.zero_()
            self._merge(torch.from_numpy(states).to(self.mean64.device))

    @torch.no_grad()
    def update(self, states: torch.Tensor) -> None:
        """Let online statistics follow float[..., ds]: what a batch of training brought, once its loss is known.

        Not before: the samples of a batch must not see each other through the statistics they are normalised by. Mean
        and deviation are merged by Chan, Golub and LeVeque 1983 ("Algorithms for Computing the Sample Variance",
        equations 2.1), where what was known counts at most WINDOW states, so that they keep following.

        Raises `PolicyError` without `online`, `InvalidDataError` for another shape or NaN; nothing is changed then.
        """
        if not self.online:
            raise PolicyError("these statistics do not follow the data; make the network with online ones.")
        if not states.ndim or states.shape[-1] != self.mean.shape[0]:
            raise InvalidDataError(f"state statistics need [..., {self.mean.shape[0]}], got {list(states.shape)}.")
        x = states.detach().reshape(-1, states.shape[-1]).to(self.mean64.device, torch.float64)
        if not bool(torch.isfinite(x).all()):
            raise InvalidDataError("state statistics: the states of a batch are not finite.")
        if not len(x):
            return
        self._merge(x)
        self.mean.copy_(self.mean64)
        self.std.copy_((self.spread / self.count).sqrt().clamp_min(MIN_STD))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """float32[..., ds] of the same shape as `state`."""
        return ((state - self.mean) / self.std).clamp(-STATE_LIMIT, STATE_LIMIT)

    def _merge(self, x: torch.Tensor) -> None:
        """Take float64[n, ds] in; of what is then known, at most WINDOW states with the same mean and deviation."""
        n, known = len(x), self.count.clone()
        total = known + n
        mean = x.mean(0)
        delta = mean - self.mean64
        self.spread += (x - mean).square().sum(0) + delta.square() * (known * n / total)
        self.mean64 += delta * (n / total)
        kept = total.clamp_max(WINDOW)
        self.spread *= kept / total
        self.count.copy_(kept)
