"""ThriftyDAgger: imitate what people did, and learn when it is worth asking them.

Hoque et al. 2021, "ThriftyDAgger: Budget-Aware Novelty and Risk Gating for Interactive Imitation Learning", arXiv
2109.08273. Beside the policy, which imitates as by `hg_dagger`, a chance p is learned that it succeeds by itself from
what is seen, from the policy's own steps alone (the paper's Q of goals, section 4.2):

    p = 0 where somebody takes over within n ticks, 1 or 0 where the episode ends within them in success or failure,
    else p n ticks later, by a running average

Its members (`policies.flow.networks.outlook`) learn from other halves of a batch each, so that where they have seen
nothing alike they do not agree; the lowest counts, which is at once the paper's risk and its novelty. A robot's gate
minds it (`GateConfig.trust`).

It departs from the paper in that the chance is of what is seen and not of the action, for a chunk is not known before
it is made, and in that whoever helps is asked by thresholds that are set, not by a budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cloud_learner.algorithms.critics.critic_updates import select_rows
from cloud_learner.algorithms.critics.judged import OutcomeNotices, read_outcomes, taught_or_judged
from cloud_learner.algorithms.interface import (
    POLICY,
    Algorithm,
    AlgorithmConfig,
    DataNeeds,
    Metrics,
    TrainedNetwork,
    UpdateStep,
)
from cloud_learner.buffer.sampling.shares import TaskMix
from policies.interface.capabilities import Foretells, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ThriftyDagger(AlgorithmConfig):
    """What is drawn, and how far ahead is looked."""

    name: ClassVar[str] = "thrifty-dagger"
    policy_options: ClassVar[Mapping[str, object]] = {"outlook": 64}
    settings: ClassVar[tuple[str, ...]] = ("loop.gate.trust=0.8", "loop.gate.most_share=0.1")
    on_ranks: ClassVar[bool] = False
    n_step: int = 8
    """ticks between what is seen and what its chance is learned from"""
    own_weight: float = 0.5
    """how often a step of the policy's own is drawn, for each step of a person"""
    own_chance: float = 0.8
    """the policy's own steps are imitated as well where what they led to has a better chance; 1: none"""
    recovery_weight: float = 1.0
    """how often a step by which a person brought the robot back is drawn; 0: no window begins there"""

    def __post_init__(self) -> None:
        for name in ("n_step", "own_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"ThriftyDagger: {name} is {getattr(self, name)}; it must be positive.")
        if not 0 < self.own_chance <= 1:
            raise ConfigError(f"ThriftyDagger: own_chance is {self.own_chance}; it must be above 0 and at most 1.")
        if not 0 <= self.recovery_weight < math.inf:
            raise ConfigError(f"ThriftyDagger: recovery_weight is {self.recovery_weight}; give 0 or more.")

    def needs(self) -> DataNeeds:
        """Everybody's steps, and what was seen after them; the policy's own count once their episode is judged."""
        return DataNeeds(taught_or_judged(self.own_weight, self.recovery_weight, TaskMix()), self.n_step)

    def make(self, policy: TrainablePolicy) -> ThriftyDaggerUpdates:
        who = f"algorithm '{self.name}'"
        require(policy, Foretells, who)
        assert isinstance(policy, Foretells)
        if not policy.foretells:
            raise ConfigError(
                f"{who} needs a policy that says how likely it succeeds, and this {type(policy).__name__} was made "
                'without: say "outlook": 64 in --policy-config where its kind has that, or choose another --policy or '
                "algorithm: docs/algorithms.md has which go together."
            )
        return ThriftyDaggerUpdates(policy, self)


class ThriftyDaggerUpdates(Algorithm):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, config: ThriftyDagger) -> None:
        super().__init__(policy)
        self._config = config
        self._networks = {POLICY: TrainedNetwork(policy.module)}
        self.notices = OutcomeNotices(config.name, when_all_fail="its chance is said to be none")

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the policy, what foretells included."""
        batch = step.draw()
        steps = read_outcomes(batch, (len(batch["outcome"]), 1))
        self.notices.note(steps)
        known, chances = self.chances(step, batch)
        good = np.zeros(len(known), bool)
        good[known] = chances.cpu().numpy() > self._config.own_chance
        rows = np.flatnonzero(~steps.own | good)
        mask = np.where(good[:, None], batch["mask"], batch["imitable"])
        taught = select_rows(batch | {"mask": mask}, rows) if len(rows) else None
        own = select_rows(batch, np.flatnonzero(known)) if known.any() else None
        # of each member another half
        mine = step.rng.random((64, int(known.sum()))) < 0.5
        parts: dict[str, torch.Tensor] = {}

        def loss() -> torch.Tensor:
            import torch.nn.functional as F

            if taught is not None:
                parts["loss"] = self.policy.loss(taught)
            if own is not None:
                logits = self.policy.foretell(own)[..., 0]  # type: ignore[attr-defined]
                chosen = chances.new_tensor(mine[: len(logits)])
                errors = F.binary_cross_entropy_with_logits(logits, chances.expand_as(logits), reduction="none")
                parts["outlook_loss"] = (errors * chosen).sum() / chosen.sum().clamp_min(1)
            return sum(list(parts.values())[1:], next(iter(parts.values())))

        own_share = float((steps.own & steps.known).mean())
        metrics = {"loss": 0.0, "own_share": own_share, "imitated_share": float(good.mean())}
        if taught is not None or own is not None:
            step.descend(POLICY, loss)
        if own is not None:
            metrics["chance"] = chances.mean().item()
        metrics.update({name: one.item() for name, one in parts.items()})
        return metrics

    def chances(self, step: UpdateStep, batch: Batch) -> tuple[np.ndarray, torch.Tensor]:
        """(bool[b]: steps of the policy's own of which it is known what came next, float32[n]: what is learned of
        these)"""
        import torch

        n = self._config.n_step
        steps = read_outcomes(batch, (len(batch["outcome"]), 1))
        next_ticks, taken = (np.asarray(batch[name]).reshape(-1) for name in ("next_ticks", "taken_over"))
        ends = (steps.ticks_to_end >= 0) & (steps.ticks_to_end < n)
        known = steps.own & (taken | np.where(ends, steps.known, next_ticks > 0))
        state = np.asarray(batch["next_state"])
        later = select_rows(
            batch | {"state": state, "images": batch["next_images"], "seen_state": state}, np.flatnonzero(known)
        )
        device = next(self.policy.module.parameters()).device
        if not known.any():
            return known, torch.zeros(0, device=device)
        with torch.no_grad():
            logits = self.policy.foretell(later, step.average(POLICY))  # type: ignore[attr-defined]
            bootstrapped = logits[..., 0].sigmoid().mean(0)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[known]).to(device)

        ended = torch.where(tensor(ends), tensor(steps.succeeded).float(), bootstrapped)
        return known, torch.where(tensor(taken), 0.0, ended)
