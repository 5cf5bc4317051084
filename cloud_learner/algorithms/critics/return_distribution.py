"""How an episode will go on, as a distribution over bins of its return, and which advantages are among the best.

RECAP's returns are in [-1, 0]: minus the share of the longest time that is still to go, -1 for an episode that fails
(Physical Intelligence 2025, arXiv 2511.14759, section IV-A). The distribution is learned by cross entropy (Farebrother
et al. 2024, arXiv 2403.03950, section 3.1: two-hot targets).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import log_softmax

BINS = 201
LEAST_KNOWN = 32
"""advantages of a task that must be known before any can be called one of the best"""
_NO_TASK = -1


class ReturnDistribution(nn.Module):
    """Features of an observation [..., w] -> logits [..., BINS] of the return, from `low` to `high`."""

    centres: torch.Tensor

    def __init__(self, features: int, width: int, low: float = -1.0, high: float = 0.0) -> None:
        """`features`: w; `width`: hidden units."""
        super().__init__()
        self.low, self.high = low, high
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, BINS)
        )
        self.register_buffer("centres", torch.linspace(low, high, BINS), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """float32[..., BINS]"""
        return self.layers(features).float()

    def expectation(self, features: torch.Tensor) -> torch.Tensor:
        """float32[...]: the mean return."""
        return (self(features).softmax(-1) * self.centres).sum(-1)

    def loss(self, features: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of float32[...] `returns`, a scalar."""
        return -(two_hot(returns, self.low, self.high) * log_softmax(self(features), -1)).sum(-1).mean()


def two_hot(returns: torch.Tensor, low: float = -1.0, high: float = 0.0) -> torch.Tensor:
    """float32[..., BINS]: all of the weight on the two bins beside each return, so that their mean is the return; what
    lies outside of [low, high] counts as its border."""
    position = (returns.float().clamp(low, high) - low) * ((BINS - 1) / (high - low))
    lower = position.floor().clamp(max=BINS - 2)
    upper_weight = position - lower
    weights = torch.zeros(*returns.shape, BINS, device=returns.device)
    index = lower.long()[..., None]
    weights.scatter_(-1, index, (1.0 - upper_weight)[..., None])
    return weights.scatter_(-1, index + 1, upper_weight[..., None])


class AdvantageWindow(nn.Module):
    """The newest advantages of the policy's own steps, all tasks together. Its buffers are part of a checkpoint."""

    advantages: torch.Tensor
    tasks: torch.Tensor
    noted: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("advantages", torch.zeros(size))
        self.register_buffer("tasks", torch.full((size,), _NO_TASK, dtype=torch.long))
        self.register_buffer("noted", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def note(self, tasks: torch.Tensor, advantages: torch.Tensor) -> None:
        """Take in float32[n] advantages of steps of the tasks int64[n], in place of the oldest."""
        size = len(self.advantages)
        tasks, advantages = tasks[-size:], advantages[-size:]
        at = (int(self.noted) + torch.arange(len(tasks), device=self.tasks.device)) % size
        self.advantages[at], self.tasks[at] = advantages, tasks
        self.noted += len(tasks)

    @torch.no_grad()
    def thresholds(self, tasks: torch.Tensor, share: float) -> torch.Tensor:
        """float32[n]: what the `share` of the advantages that are largest exceed, in each of the tasks int64[n]; nan
        for a task of which too few are known."""
        found = torch.full(tasks.shape, torch.nan, device=tasks.device)
        for task in tasks.unique().tolist():
            known = self.advantages[self.tasks == task]
            if len(known) >= LEAST_KNOWN:
                found[tasks == task] = known.quantile(1.0 - share)
        return found


class ReturnCritic(nn.Module):
    """What is trained beside the policy, and what is remembered with it."""

    def __init__(self, features: int, width: int, window: int) -> None:
        super().__init__()
        self.value = ReturnDistribution(features, width)
        self.window = AdvantageWindow(window)
