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

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from cloud_learner.algorithms.interface import (
    POLICY,
    Algorithm,
    AlgorithmConfig,
    DataNeeds,
    Metrics,
    TrainedNetwork,
    UpdateStep,
)
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.control import actor_index, rollout_steps
from cloud_learner.buffer.sampling.target import Factor, Moment, StepRuns, by_recovery, uniform
from policies.interface.capabilities import BAD, GOOD, UNKNOWN, Advised, Encodes, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError
from wire.types import EpisodeOutcome

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.return_distribution import ReturnCritic

log = logging.getLogger(__name__)
_SUCCESS, _FAILURE = (OUTCOMES.index(name) for name in (EpisodeOutcome.success, EpisodeOutcome.failure))
_NOTICED_STEPS = 2000
"""steps drawn after which it is said, once, if they do not tell good from bad"""


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
    own_weight: float = 1.0
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
        if not 0 <= self.recovery_weight < math.inf:
            raise ConfigError(f"Recap: recovery_weight is {self.recovery_weight}; give 0 or more.")

    def needs(self) -> DataNeeds:
        """Everybody's steps; the policy's own count once it is known whether their episode succeeded."""

        def weigh(runs: StepRuns, moment: Moment) -> np.ndarray:
            own = rollout_steps(actor_index(runs.actor), runs.demonstration)
            return np.where(own, self.own_weight * is_judged(runs.outcome), 1.0)

        return DataNeeds(uniform(factors=(Factor(weigh, by_version=False), by_recovery(self.recovery_weight))))

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
        from cloud_learner.algorithms.return_distribution import ReturnCritic

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
        self._counts: Counter[str] = Counter()
        """steps that this process has drawn, for what is said of them"""
        self._said: set[str] = set()

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
        self._notice()
        return metrics

    def judge(self, batch: Batch) -> JudgedSteps:
        """What is thought of a batch, by the value as it is and by advantages that were noted before."""
        import torch

        features = self.policy.features(batch).float()  # type: ignore[attr-defined]
        shape, features = features.shape[:2], features.flatten(0, 1)

        def flat(name: str) -> np.ndarray:
            # what is said of an image holds for all steps behind it
            array = np.asarray(batch[name])
            return np.broadcast_to(array.reshape(len(array), -1), shape).ravel()

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(features.device)

        outcome, ticks = flat("outcome"), flat("ticks_to_end")
        known, succeeded = is_judged(outcome) & (ticks >= 0), outcome == _SUCCESS
        own = rollout_steps(flat("actor"), ~flat("online"))
        returns = np.where(known, empirical_returns(ticks, succeeded, self._config.horizon_ticks), np.float32(np.nan))
        tasks = tensor(flat("task").astype(np.int64))
        advantages = tensor(returns) - self.critic.value.expectation(features)
        thresholds = self.critic.window.thresholds(tasks, self._config.positive_share)
        good = (advantages > thresholds) & tensor(succeeded)
        advice = torch.where(good, GOOD, BAD)
        advice[thresholds.isnan() | ~tensor(known)] = UNKNOWN
        advice[~tensor(own)] = GOOD
        self._counts.update(
            drawn=own.size,
            known=int(known.sum()),
            own=int((own & known).sum()),
            own_succeeded=int((own & known & succeeded).sum()),
            too_long=int((known & succeeded & (ticks >= self._config.horizon_ticks)).sum()),
        )
        return JudgedSteps(features, tensor(returns), advantages, tasks, tensor(own & known), advice)

    def _notice(self) -> None:
        """Say once what keeps good from being told from bad."""
        counts, config = self._counts, self._config
        if counts["drawn"] >= _NOTICED_STEPS and not counts["known"]:
            self._say(
                "no step drawn so far is of an episode that is known to have succeeded or failed: what people did is "
                "imitated, and nothing else is learned until somebody judges episodes."
            )
        if counts["own"] >= _NOTICED_STEPS and not counts["own_succeeded"]:
            self._say(
                "no step of the policy's own drawn so far is of an episode that succeeded: all of them count as bad "
                "until one does."
            )
        if counts["too_long"]:
            self._say(
                f"there are successes that took {config.horizon_ticks} ticks or more from a step on, which counts as "
                "a failure: set algorithm.horizon_ticks to the longest time that a success takes."
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("algorithm 'recap': %s", text)


def empirical_returns(ticks_to_end: np.ndarray, succeeded: np.ndarray, horizon_ticks: int) -> np.ndarray:
    """float32[n] in [-1, 0]: minus the time left over the longest one, -1 in an episode that failed (the paper's
    reward of -1 a step, normalised)."""
    left = np.minimum(ticks_to_end / horizon_ticks, 1.0)
    return np.where(succeeded, -left, -1.0).astype(np.float32)


def is_judged(outcome: np.ndarray) -> np.ndarray:
    """bool[n] of int8[n]: whether the episode is known to have succeeded or failed."""
    return (outcome == _SUCCESS) | (outcome == _FAILURE)
