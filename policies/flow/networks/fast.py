"""The fast path: what every one of them can do, and the small one, a multi-layer perceptron.

Shapes: b images, k steps behind each image, z latent, ds state, H actions of da numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from policies.flow.config import FlowConfig

_AGE_FREQUENCIES = 4
AGE_FEATURES = 1 + 2 * _AGE_FREQUENCIES
"""the age, its sines and cosines"""
AGE_MARGIN = 4
"""ticks: training's ages are its offsets plus the age that the frames had already"""
ADVANTAGES = 3
"""not known, bad, good"""


class Conditioning(NamedTuple):
    """What actions are made from. All but the first two are for networks whose configuration asks for them."""

    latent: torch.Tensor
    """[b, z]"""
    state: torch.Tensor
    """[b, k, ds] in training, [b, ds] in sampling, normalised"""
    age: torch.Tensor | None = None
    """[b, k, 1] or [b, 1], ticks; None: 0"""
    committed: torch.Tensor | None = None
    """[b, k, H] or [b, H], 1 for actions that are committed: they are clean in what is noisy, whatever the time says"""
    advantage: torch.Tensor | None = None
    """int64[b, k] or [b]; None: not known"""
    embodiment: torch.Tensor | None = None
    """int64[]: whose rows of its tables a shared network takes, see `policies.flow.shared.network`"""


class FastPath(Protocol):
    """Conditioning, noisy actions and flow time -> what `FlowConfig.predict` says."""

    def __call__(self, given: Conditioning, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """For training: [b, k, H * da] at [b, k, 1] -> [b, k, H * da]."""
        ...

    def prepare(self, given: Conditioning, steps: int) -> Any:
        """All that does not change between `steps` Euler steps of sampling."""
        ...

    def step(self, prepared: Any, step: int, noisy: torch.Tensor) -> torch.Tensor:
        """[b, H * da] -> [b, H * da] at flow time step / steps."""
        ...


class FastMLP(nn.Module):
    """The perceptron among the fast paths.

    The first layer is split by input, so that in sampling all that does not change is computed once. Three of its
    parts are there only when the configuration asks for them: the age of what the latent was made from (a scalar
    beside the latent, as in TIC-VLA, arXiv 2602.02459), which actions are committed, and the advantage.
    """

    frequency: torch.Tensor

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        flat = config.horizon * config.action_dim
        inputs = [latent_width, config.state_dim, 2 * config.frequencies, flat]
        self.latent = nn.Linear(inputs[0], config.width)
        self.state = nn.Linear(inputs[1], config.width, bias=False)
        self.time = nn.Linear(inputs[2], config.width, bias=False)
        self.noisy = nn.Linear(inputs[3], config.width, bias=False)
        parts = [self.latent, self.state, self.time, self.noisy]
        if config.max_offset:
            self.embed_age = AgeFeatures(config.max_offset)
            self.age = nn.Linear(AGE_FEATURES, config.width, bias=False)
            parts.append(self.age)
        if config.prefix:
            self.committed = nn.Linear(config.horizon, config.width, bias=False)
            parts.append(self.committed)
        # the parts of one layer: each starts as that layer would, by the sum of the inputs
        bound = 1 / math.sqrt(sum(part.in_features for part in parts))
        for part in parts:
            for parameter in part.parameters():
                nn.init.uniform_(parameter, -bound, bound)
        hidden: list[nn.Module] = [nn.SiLU()]
        for _ in range(config.layers - 1):
            hidden += [nn.Linear(config.width, config.width), nn.SiLU()]
        self.head = nn.Sequential(*hidden, nn.Linear(config.width, flat))
        if config.advantage:
            self.advantage = nn.Embedding(ADVANTAGES, config.width)
        self.register_buffer("frequency", frequencies(config.frequencies), persistent=False)
        self._aged, self._prefixed, self._advised = config.max_offset > 0, config.prefix, config.advantage

    def forward(self, given: Conditioning, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """See `FastPath`."""
        fixed = self._with_options(self.latent(given.latent)[:, None] + self.state(given.state), given)
        return self.head(fixed + self.time(fourier_features(time, self.frequency)) + self.noisy(noisy))

    def prepare(self, given: Conditioning, steps: int) -> torch.Tensor:
        """[steps, b, width]: all of the first layer that does not depend on the noisy actions."""
        time = torch.arange(steps, device=given.latent.device, dtype=torch.float32)[:, None, None] / steps
        known = self._with_options(self.latent(given.latent) + self.state(given.state), given)
        return known + self.time(fourier_features(time, self.frequency).to(known.dtype))

    def step(self, prepared: torch.Tensor, step: int, noisy: torch.Tensor) -> torch.Tensor:
        """See `FastPath`."""
        return self.head(prepared[step] + self.noisy(noisy))

    def _with_options(self, fixed: torch.Tensor, given: Conditioning) -> torch.Tensor:
        """`fixed` [..., width] plus what age, committed actions and advantage say."""
        if self._aged:
            aged = self.embed_age(fixed.new_zeros(1) if given.age is None else given.age)
            fixed = fixed + self.age(aged.to(fixed.dtype))
        if self._prefixed and given.committed is not None:
            fixed = fixed + self.committed(given.committed.to(fixed.dtype))
        if self._advised:
            none = torch.zeros((), dtype=torch.long, device=fixed.device)
            fixed = fixed + self.advantage(none if given.advantage is None else given.advantage)
        return fixed


class AgeFeatures(nn.Module):
    """float32[..., 1] ticks -> float32[..., AGE_FEATURES]; ages beyond those of training count as their oldest."""

    frequency: torch.Tensor

    def __init__(self, max_offset: int) -> None:
        super().__init__()
        self._oldest = max_offset + AGE_MARGIN
        self.register_buffer("frequency", frequencies(_AGE_FREQUENCIES), persistent=False)

    def forward(self, age: torch.Tensor) -> torch.Tensor:
        scaled = age.float().clamp(0, self._oldest) / self._oldest
        return torch.cat([scaled, fourier_features(scaled, self.frequency)], -1)


def fourier_features(x: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """float32[..., 1] -> float32[..., 2 * n]: sines and cosines; in float32, since the fastest turn often."""
    angle = x.float() * frequency.float()
    return torch.cat([angle.sin(), angle.cos()], -1)


def frequencies(count: int) -> torch.Tensor:
    """float32[count]: from a quarter turn over [0, 1], each twice as fast as the one before."""
    return 2.0 ** torch.arange(count) * math.pi / 2
