"""Adjoint matching: moves a flow policy towards what a critic values, with no gradient through its sampling.

Domingo-Enrich et al. 2024, arXiv 2409.08861; for policies QAM, Li and Levine 2026, arXiv 2601.14234. With flow time t
from noise at 0 to actions at 1, v the policy's velocity, u that of a frozen reference and T a temperature:

    path       dx = (2 v - x / t) dt + s dB,  s^2 = 2 (1 - t) / t,  whose ends are those of the flow of v
    adjoint    dg/dt = -(2 du/dx - 1 / t)^T g,  g(1) = -(1 / T) dQ/dx(1)
    loss       the sum over flow times of |2 (v - u) / s + s g|^2

It is least where the policy is the reference times exp(Q / T).

With b = g / t nothing is infinite at the noise: db/dt = -2 (du/dx)^T b, and the loss is the sum of
(4 / s^2) |v - u + (1 - t) b|^2. In 4 / s^2 alone the papers' h, a step of the flow, keeps the first step from weighing
nothing: 4 / s^2 = 2 (t + h) / (1 - t + h).

The papers take Euler steps, which need many: where actions are nearly certain du/dx is about -1 / (1 - t), and with
h = 0.2 the path is two to three times as wide as it should be while the adjoint vanishes or turns its sign. Steps here
are exact where the end a = x + (1 - t) u that the flow is heading for does not change along them, so that five do. From
t to t', with p = ((1 - t') / (1 - t))^2 and noise e:

    x' = t' a + q (x - t a) + sqrt((1 - t')^2 - q^2 (1 - t)^2) e,  q = p t / t'
    b  = p b' + (1 - p) (da/dx)^T b'

The last one is the flow's own step, without noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""float[..., d] actions at flow time float[..., 1] -> their velocity, float[..., d]"""


@torch.no_grad()
def sample_paths(velocity: Velocity, noise: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(float[steps, ..., d] where the path is at flow times 0, 1 / steps, ..., float[..., d] where it ends) from float
    [..., d] `noise`; what is random comes from torch's global generator."""
    x, points = noise, []
    for i in range(steps):
        points.append(x)
        t, later = i / steps, (i + 1) / steps
        end = x + (1 - t) * velocity(x, _time(x, t))
        kept = _kept(t, later) * t / later
        spread = math.sqrt((1 - later) ** 2 - (kept * (1 - t)) ** 2)
        x = later * end + kept * (x - t * end) + spread * torch.randn_like(x)
    return torch.stack(points), x


def lean_adjoints(reference: Velocity, points: torch.Tensor, at_end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(b, u), each float[steps, ..., d] at the `points` of a path, with float[..., d] b `at_end`."""
    steps, b = len(points), at_end
    adjoints, velocities = [], []
    for i in reversed(range(steps)):
        t = i / steps
        with torch.enable_grad():
            x = points[i].detach().requires_grad_()
            u = reference(x, _time(x, t))
            (through,) = torch.autograd.grad(x + (1 - t) * u, x, b)
        kept = _kept(t, (i + 1) / steps)
        b = kept * b + (1 - kept) * through
        adjoints.append(b)
        velocities.append(u.detach())
    return torch.stack(adjoints[::-1]), torch.stack(velocities[::-1])


def matching_loss(
    velocity: Velocity, points: torch.Tensor, adjoints: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """A scalar, the mean over flow times, samples and numbers instead of the sum; float[steps, ..., d] as
    `lean_adjoints` gives them. `velocity` is asked once, for float[..., steps, d]."""
    h = 1 / len(points)
    points, adjoints, reference = (one.movedim(0, -2) for one in (points, adjoints, reference))
    t = torch.arange(points.shape[-2], device=points.device, dtype=points.dtype)[:, None] * h
    missed = velocity(points, t.expand(*points.shape[:-1], 1)) - reference + (1 - t) * adjoints
    return (2 * (t + h) / (1 - t + h) * missed.square()).mean()


def _time(x: torch.Tensor, t: float) -> torch.Tensor:
    return x.new_full((*x.shape[:-1], 1), t)


def _kept(t: float, later: float) -> float:
    """p"""
    return ((1 - later) / (1 - t)) ** 2
