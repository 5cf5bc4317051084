"""Random steps on the way from noise to actions, by which a chunk has a probability that the weights decide.

pi_RL (2025, arXiv 2510.25889), sections 4.1 and 4.2, in two ways. With x the actions on their way at flow time t, from
noise at 0 to actions at 1, v the velocity there and d the length of a step:

    sde:    x' ~ N(x + v d - s^2 d / (2 (1 - t)) e, s^2 d),   e = x - t v,   s = a sqrt((1 - t) / t)

for one step, drawn evenly; all others follow the flow. e is the noise that x would have come from, so that the second
term leaves the distribution at each flow time what it was (Liu et al. 2025, arXiv 2505.05470, equations 8 and 9). In s,
t is d at least, for at 0 it would be endless.

    noise:  x' ~ N(x + v d, s(latent, state, t)^2)

for every step; s comes from a small network of its own, within bounds.

Shapes: b chunks or images, k steps behind each image or none, z latent, ds state, H actions of da numbers. Actions are
normalised to [-1, 1] at the end, states as the network's normaliser gives them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning, FastPath, fourier_features, frequencies
from policies.flow.networks.sampling import field

LEAST_NOISE, MOST_NOISE = 0.05, 0.2
"""of the learned noise, for each step of an action normalised to [-1, 1]"""
_WIDTH, _FREQUENCIES = 64, 4


class Walk(NamedTuple):
    """One chunk, and how it came about."""

    actions: torch.Tensor
    """float32[1, H * da] in [-1, 1]"""
    step: int
    """the first random one"""
    points: torch.Tensor
    """float32[P, H * da]: before it, and after it and those that follow it"""
    log_prob: float
    """of all but the first of them"""


class NoiseHead(nn.Module):
    """Latent, state and flow time -> the standard deviation of each number of a step, the middle of its bounds at
    first."""

    frequency: torch.Tensor

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        inputs, last = (
            latent_width + config.state_dim + 2 * _FREQUENCIES,
            nn.Linear(_WIDTH, config.horizon * config.action_dim),
        )
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.zero_()
        self.layers = nn.Sequential(nn.Linear(inputs, _WIDTH), nn.SiLU(), last)
        self.register_buffer("frequency", frequencies(_FREQUENCIES), persistent=False)

    def forward(self, given: Conditioning, time: torch.Tensor) -> torch.Tensor:
        """float32[b, k, H * da] at [b, k, 1], or without k."""
        latent, state = given.latent, given.state
        if state.dim() == 3:
            latent = latent[:, None].expand(-1, state.shape[1], -1)
        known = torch.cat([latent, state, fourier_features(time, self.frequency).to(latent.dtype)], -1)
        return LEAST_NOISE + (MOST_NOISE - LEAST_NOISE) * self.layers(known).float().sigmoid()


def count_points(config: FlowConfig) -> int:
    """P, 0 for a policy that does not explore."""
    return {None: 0, "sde": 2, "noise": config.euler_steps + 1}[config.explore]


def random_step(
    config: FlowConfig,
    head: NoiseHead | None,
    given: Conditioning,
    x: torch.Tensor,
    v: torch.Tensor,
    time: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, standard deviation) float32[..., H * da] of where a step leads from `x` with velocity `v` float32[...,
    H * da] at float32[..., 1] `time`."""
    length = 1 / config.euler_steps
    if head is not None:
        return x + v * length, head(given, time)
    variance = config.explore_noise**2 * (1 - time) / time.clamp(min=length) * length
    mean = x + v * length - variance / (2 * (1 - time)) * (x - time * v)
    return mean, variance.sqrt().expand_as(mean)


def log_density(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """float32[...] of float32[..., n] under normal distributions of each number by itself."""
    return -0.5 * (((x - mean) / std).square() + 2 * std.log() + math.log(2 * math.pi)).sum(-1)


def explore(
    fast: FastPath,
    config: FlowConfig,
    head: NoiseHead | None,
    given: Conditioning,
    noise: torch.Tensor,
    draws: torch.Generator,
) -> Walk:
    """From `noise` float32[1, H * da] to actions; what is random comes from `draws`, of the CPU."""
    steps, answer, x, log_prob = config.euler_steps, field(fast, config, given), noise, 0.0
    first, last = 0, steps
    if head is None:
        first = int(torch.randint(steps, (), generator=draws))
        last = first + 1
    points = []
    for step in range(steps):
        output, left = answer(step, x), 1 - step / steps
        v = (output - x) / left if config.predict == "action" else output
        if not first <= step < last:
            x = x + v / steps
            continue
        points.append(x)
        mean, std = random_step(config, head, given, x, v, x.new_full((1, 1), step / steps))
        x = mean + std * torch.randn(x.shape, generator=draws).to(x.device)
        log_prob += log_density(x, mean, std).item()
        if step == last - 1:
            points.append(x)
    return Walk(x.clamp(-1, 1), first, torch.cat(points), log_prob)
