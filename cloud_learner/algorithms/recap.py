"""RECAP: learn from everything that was done, told which of it was better than expected, and act as if all were.

Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience", arXiv 2511.14759, section IV. A value V says
how episodes go on from what is seen (`return_distribution`). With the return R from a step to its episode's end,

    A = R - V,    good: A > the threshold of the task, which a given share of the policy's own steps exceeds,

what people did is always good. The policy imitates all of it, told good or bad, or, in a share of the samples, nothing;
it acts as told "good" (`policies.interface.capabilities.Advised`).

The paper looks 50 steps ahead and takes V from there on; R here is what came in the end. In an episode that failed it
tells steps apart only by how little was expected of them, so no step of the policy's own there is called good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from cloud_learner.algorithms.critics.judged import OutcomeNotices, of_each_step, read_outcomes, taught_or_judged
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
from policies.interface.capabilities import BAD, GOOD, UNKNOWN, Advised, Encodes, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.return_distribution import ReturnCritic


@dataclass(frozen=True)
class Recap(AlgorithmConfig):
    """What is drawn, what a return is, and how much of what the policy did is good."""

    name: ClassVar[str] = "recap"
    policy_options: ClassVar[Mapping[str, object]] = {"advantage": True}
    on_ranks: ClassVar[bool] = False
    horizon_ticks: int = 200
    """the longest time to a success, in control ticks: what takes as long has the return of a failure"""
    positive_share: float = 0.3
    """of the policy's own steps of a task, how many are good (the paper: about 0.3)"""
    window: int = 4096
    """the newest so many of the policy's own steps drawn say what that share exceeds"""
    online_share: float = 0.5
    """of a batch, in a task that has demonstrations: what the fleet records outgrows them soon, and with them what
    people did"""
    own_weight: float = 0.5
    """how often a step of the policy's own is drawn, for each step of a person"""
    recovery_weight: float = 1.0
    """how often a step by which a person brought the robot back is drawn, which is good as all that people do; 0: no
    window begins there"""
    value_width: int = 256
    """hidden units of the value network"""
    value_rate: float = 1.0
    """its learning rate, times the training's"""

    def __post_init__(self) -> None:
        for name in ("horizon_ticks", "window", "own_weight", "value_width", "value_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"Recap: {name} is {getattr(self, name)}; it must be positive.")
        if not 0 < self.positive_share < 1:
            raise ConfigError(f"Recap: positive_share is {self.positive_share}; it must be above 0 and below 1.")
        if not 0 < self.online_share <= 1:
            raise ConfigError(f"Recap: online_share is {self.online_share}; it must be above 0 and at most 1.")
        if not 0 <= self.recovery_weight < math.inf:
            raise ConfigError(f"Recap: recovery_weight is {self.recovery_weight}; give 0 or more.")

    def needs(self) -> DataNeeds:
        """Everybody's steps; the policy's own count once it is known whether their episode succeeded."""
        return DataNeeds(taught_or_judged(self.own_weight, self.recovery_weight, TaskMix(online=self.online_share)))

    def make(self, policy: TrainablePolicy) -> RecapUpdates:
        who = f"algorithm '{self.name}'"
        require(policy, Encodes, who)
        require(policy, Advised, who)
        assert isinstance(policy, Encodes)
        assert isinstance(policy, Advised)
        if not policy.advised:
            raise ConfigError(
                f"{who} needs a policy that is told whether what it imitates was good, and this "
                f'{type(policy).__name__} was made without: say "advantage": true in --policy-config where its kind '
                "has that, or choose another --policy or algorithm: docs/algorithms.md has which go together."
            )
        from cloud_learner.algorithms.critics.return_distribution import ReturnCritic

        critic = ReturnCritic(policy.feature_width, self.value_width, self.window)
        return RecapUpdates(policy, critic.to(next(policy.module.parameters()).device), self)


class JudgedSteps(NamedTuple):
    """What is thought of the n = b * k steps of a batch, as tensors."""

    features: torch.Tensor
    """float32[n, w]"""
    returns: torch.Tensor
    """float32[n], nan where it is not known how the episode ended"""
    advantages: torch.Tensor
    """float32[n], likewise"""
    tasks: torch.Tensor
    """int64[n]"""
    own: torch.Tensor
    """bool[n]: the policy's own steps of which that is known"""
    advice: torch.Tensor
    """int64[n]: UNKNOWN, BAD or GOOD"""


class RecapUpdates(Algorithm):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: ReturnCritic, config: Recap) -> None:
        super().__init__(policy)
        self.critic = critic
        self._config = config
        value = TrainedNetwork(critic, rate_scale=config.value_rate)
        self._networks = {POLICY: TrainedNetwork(policy.module), "value": value}
        self.notices = OutcomeNotices(config.name, when_all_fail="all of them count as bad")

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the policy, and one of the value on the same samples."""
        import torch

        judged: list[JudgedSteps] = []

        def loss(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                judged.append(self.judge(batch))
            advice = judged[-1].advice.cpu().numpy().reshape(np.shape(batch["actor"]))
            return self.policy.loss({**batch, "advantage": advice})

        metrics = {"loss": step.minimize(POLICY, loss)}
        steps = JudgedSteps(*map(torch.cat, zip(*judged, strict=True)))
        known = ~steps.returns.isnan()
        if bool(known.any()):
            features, returns = steps.features[known], steps.returns[known]
            metrics["value_loss"] = step.descend("value", lambda: self.critic.value.loss(features, returns))
        metrics["own_share"] = steps.own.float().mean().item()
        if bool(steps.own.any()):
            metrics["good_share"] = (steps.advice[steps.own] == GOOD).float().mean().item()
            self.critic.window.note(steps.tasks[steps.own], steps.advantages[steps.own])
        return metrics

    def judge(self, batch: Batch) -> JudgedSteps:
        """What is thought of a batch, by the value as it is and by advantages that were noted before."""
        import torch

        features = self.policy.features(batch).float()  # type: ignore[attr-defined]
        shape, features = features.shape[:2], features.flatten(0, 1)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(features.device)

        steps, horizon = read_outcomes(batch, shape), self._config.horizon_ticks
        own, known, succeeded, ticks = steps
        returns = np.where(known, empirical_returns(ticks, succeeded, horizon), np.float32(np.nan))
        tasks = tensor(of_each_step(batch["task"], shape).astype(np.int64))
        advantages = tensor(returns) - self.critic.value.expectation(features)
        thresholds = self.critic.window.thresholds(tasks, self._config.positive_share)
        good = (advantages > thresholds) & tensor(succeeded)
        advice = torch.where(good, GOOD, BAD)
        advice[thresholds.isnan() | ~tensor(known)] = UNKNOWN
        advice[~tensor(own)] = GOOD
        self.notices.note(steps)
        if (known & succeeded & (ticks >= horizon)).any():
            self.notices.say(
                f"there are successes that took {horizon} ticks or more from a step on, which counts as a failure: "
                "set algorithm.horizon_ticks to the longest time that a success takes."
            )
        return JudgedSteps(features, tensor(returns), advantages, tasks, tensor(own & known), advice)


def empirical_returns(ticks_to_end: np.ndarray, succeeded: np.ndarray, horizon_ticks: int) -> np.ndarray:
    """float32[n] in [-1, 0]: minus the time left over the longest one, -1 in an episode that failed (the paper's
    reward of -1 a step, normalised)."""
    left = np.minimum(ticks_to_end / horizon_ticks, 1.0)
    return np.where(succeeded, -left, -1.0).astype(np.float32)
