"""Soft actor-critic's losses of the policy and of its temperature, and how the halves of a batch count.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905. The density of a chunk is the
product of its numbers', and all is said per number, so that no setting depends on how many there are.
"""

from __future__ import annotations

import math

import torch
from torch import nn

HOTTEST = 1.0
"""a success is worth 1: above it the policy would do anything"""
_MOST_WEIGHT = 4.0


class Temperature(nn.Module):
    """What a nat of entropy is worth, as much as makes the policy's what is wanted."""

    logarithm: torch.Tensor

    def __init__(self, value: float) -> None:
        """`value`: to begin with."""
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor(math.log(value)))

    @property
    def value(self) -> torch.Tensor:
        """float32[], at most `HOTTEST`."""
        return self.logarithm.exp()

    def loss(self, entropy: float, wanted: float) -> torch.Tensor:
        """Equation 18: temperature * (entropy - wanted), so that it falls while the policy is less sure than that."""
        return self.value * (entropy - wanted)

    @torch.no_grad()
    def bound(self) -> None:
        """Where entropy cannot be had, as while people show the same again and again, it would rise for ever."""
        self.logarithm.clamp_(max=math.log(HOTTEST))


def actor_loss(q: torch.Tensor, density: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """A scalar, equation 7 with RLPD's mean over critics (arXiv 2302.02948, algorithm 1): of drawn chunks

        mean over n of temperature * (mean over numbers of log density) - (mean over critics of Q)

    `q`: float32[e, n] of e critics; `density`: float32[n, a], its logarithm of each number.
    """
    return temperature * density.mean() - q.mean()


def even_halves(own: torch.Tensor) -> torch.Tensor:
    """float32[n]: weights by which the policy's `own` samples, bool[n], and the others count as much, whatever was
    drawn; at most 4 each, lest few samples stand for half of a batch. All 1 where there is but one kind."""
    share = own.float().mean()
    if not 0 < share.item() < 1:
        return torch.ones_like(own, dtype=torch.float32)
    return torch.where(own, 0.5 / share, 0.5 / (1 - share)).clamp(max=_MOST_WEIGHT)
