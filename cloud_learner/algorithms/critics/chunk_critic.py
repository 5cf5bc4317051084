"""What a chunk of actions is worth, and how its worth is distributed over what was done where it began.

DIVL of LWD (arXiv 2605.00416): two Q say how likely a chunk leads to success, and how soon, in [0, 1]; V is the
distribution of that over the data's actions, and its upper quantile, not a maximum over actions that nobody tried,
stands for what comes after the chunk. Where V is unsure the quantile is a lower one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from cloud_learner.algorithms.critics.return_distribution import BINS, ReturnDistribution

LEAST, MOST = -0.1, 1.1
"""of V's bins"""
CAUTION = 0.3
"""how much lower the quantile is where V says nothing"""


class CriticEnsemble(nn.Module):
    """Several Q of features, float[n, w], and the actions of a chunk, float[n, a]."""

    learned: torch.Tensor

    def __init__(self, features: int, actions: int, width: int, members: int = 2) -> None:
        """`features`: w; `actions`: a, numbers of a chunk; `width`: hidden units; `members`: e, how many."""
        super().__init__()
        self.members = nn.ModuleList(_mlp(features + actions, width) for _ in range(members))
        self.register_buffer("learned", torch.zeros((), dtype=torch.long))
        """int64[]: updates in which there was something of the policy's own to learn from; part of a checkpoint"""

    def q(self, features: torch.Tensor, actions: torch.Tensor, chosen: Iterable[int] | None = None) -> torch.Tensor:
        """float32[e, n], or of the `chosen` members alone"""
        known = torch.cat([features, actions], -1)
        which = range(len(self.members)) if chosen is None else chosen
        return torch.stack([self.members[i](known) for i in which])[..., 0].float()


class ChunkCritic(CriticEnsemble):
    """Two Q, and V of features, float32[n, w]."""

    def __init__(self, features: int, actions: int, width: int) -> None:
        """As `CriticEnsemble`."""
        super().__init__(features, actions, width)
        self.value = ReturnDistribution(features, width, LEAST, MOST)

    def what_comes(self, features: torch.Tensor, level: float) -> torch.Tensor:
        """float32[n]: the quantile of V that stands for what comes after."""
        shares = self.value(features).softmax(-1)
        return quantile(shares, self.value.centres, cautious_level(shares, level))


def _mlp(inputs: int, width: int) -> nn.Sequential:
    # layer norm bounds what a Q says of actions that nobody tried (Ball et al. 2023, arXiv 2302.02948, section 4.2)
    layers: list[nn.Module] = []
    for count in (inputs, width):
        layers += [nn.Linear(count, width), nn.LayerNorm(width), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def cautious_level(shares: torch.Tensor, level: float) -> torch.Tensor:
    """float32[n] of distributions float32[n, BINS]: `level` minus 0.3 times the entropy in that of an even
    distribution, within 0 and 1."""
    entropy = torch.special.entr(shares).sum(-1) / math.log(BINS)
    return (level - CAUTION * entropy).clamp(0.0, 1.0)


def quantile(shares: torch.Tensor, centres: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """float32[n]: the first of the `centres` float32[BINS] up to which at least `level` float32[n] of float32[n, BINS]
    lies."""
    below = (shares.cumsum(-1) < level[..., None]).sum(-1)
    return centres[below.clamp(max=len(centres) - 1)]


def td_targets(
    ticks_to_end: torch.Tensor,
    succeeded: torch.Tensor,
    next_ticks: torch.Tensor,
    what_comes: torch.Tensor,
    n_step: int,
    gamma: float,
) -> torch.Tensor:
    """float32[n]: what a chunk of `n_step` ticks led to.

    Success is worth 1 at an episode's last step and nothing else is worth anything, so

        gamma^ticks_to_end * succeeded          where the episode ends within the chunk,
        gamma^next_ticks * what_comes           elsewhere.

    `ticks_to_end` int64[n]: n_step or more where that is not known; the others as a batch has them.
    """
    ends = ticks_to_end < n_step
    return torch.where(ends, gamma**ticks_to_end * succeeded, gamma**next_ticks * what_comes).float()
