"""pi_RL: imitate people, and do more often what of the policy's own random steps led to more than was expected.

pi_RL (2025, arXiv 2510.25889) learns a policy that flows by PPO. The robot makes some steps from noise to actions
random (`policies.flow.networks.exploration`: one of them, Flow-SDE, or all by a learned noise, Flow-Noise), and what it
drew travels with the chunk, so that its probability under other weights can be computed. With r, how much more probable
a chunk's random steps have become, each on average (the geometric mean, as in GSPO, arXiv 2507.18071: a bound on all of
them together stops a chunk of five at a fifth of the way), and A, what it led to beyond what was expected there,

    loss = -min(r A, clip(r, 1 - c, 1 + c) A),   where A < 0 at most -d A   (arXiv 1707.06347, eq. 7; 1912.09729, eq. 5)

A is of a whole chunk: the target of its Q minus the mean of V (`chunk_critic`), normalised in the batch.

A fleet's chunks were made by versions long gone. So, all to be switched off:

- *Decoupled* (Hilton et al. 2021, arXiv 2110.00641, section 3): r compares with the proximal policy, which is the
  running average of the weights, and each loss counts by the proximal over the behaviour policy's probability, the
  recorded one, at most 2 times. Without, r compares with the recorded one.
- *Scaled by what the batch is worth* (VCPO, arXiv 2602.17616): with w the new over the recorded probability, uncut, the
  effective share of the samples is (sum w)^2 / (n sum w^2); a step down this loss is as long as its square root.
- *Bounded*: nothing is drawn of versions more than `max_lag` behind the newest.

It departs from the paper in three things: the advantage looks one chunk ahead instead of along an episode, for what
came later may be a person's doing; rewards are success and how soon, as episodes were judged; and people are imitated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import numpy as np

from cloud_learner.algorithms.critics.critic_updates import CRITIC, select_rows
from cloud_learner.algorithms.critics.judged import NOTICED_STEPS, OutcomeNotices, StepOutcomes, taught_or_judged
from cloud_learner.algorithms.critics.value_updates import ValueConfig, ValueUpdates
from cloud_learner.algorithms.interface import POLICY, DataNeeds, Metrics, TrainedNetwork, UpdateStep
from cloud_learner.buffer.sampling.shares import TaskMix
from policies.interface.capabilities import Explores, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import ChunkCritic

_LARGEST_WEIGHT = 2.0
"""of a sample: the proximal over the behaviour policy's probability"""
_LARGEST_LOG_RATIO = 20.0
"""what is beyond it is cut, by numbers that are finite"""
_LEAST_SPREAD = 0.05
"""of advantages: where they differ by less they are not blown up to differ by 1"""


@dataclass(frozen=True)
class PiRl(ValueConfig):
    """And how far the policy goes after advantages, of samples how late."""

    name: ClassVar[str] = "pi-rl"
    policy_options: ClassVar[Mapping[str, object]] = {"explore": "sde"}
    level: float = 0.5
    """which quantile of V stands for what comes after a chunk: what the policy does, not the best of it"""
    clip: float = 0.2
    """c: how much more or less probable a random step may become before that is not worth anything more"""
    dual_clip: float = 3.0
    """d: how many times its advantage a bad chunk that has become far more probable may count"""
    imitation_weight: float = 0.5
    """of the loss on people's steps, beside that of the policy's own"""
    decoupled: bool = True
    """compare with the running average, and weigh by what the robot's version did; False: compare with that"""
    scaled: bool = True
    """go as far as the effective share of the samples allows"""
    max_lag: int = 128
    """S: versions that a step of the policy's own may be behind the newest; 0: any number"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("clip", "imitation_weight")
        if not 1 < self.dual_clip < math.inf:
            raise ConfigError(f"PiRl: dual_clip is {self.dual_clip}; it must be above 1.")
        if self.max_lag < 0:
            raise ConfigError(f"PiRl: max_lag is {self.max_lag}; give 0 or more.")

    def needs(self) -> DataNeeds:
        """Everybody's steps; the policy's own once they are judged, and how they came about, until they are old."""
        mix = TaskMix(online=self.online_share)
        target = taught_or_judged(self.own_weight, self.recovery_weight, mix, self.max_lag)
        return DataNeeds(target, self.n_step, self.gamma, traces=True)

    def make(self, policy: TrainablePolicy) -> PiRlUpdates:
        critic, who = self.make_critic(policy), f"algorithm '{self.name}'"
        require(policy, Explores, who)
        assert isinstance(policy, Explores)
        if not policy.explores:
            raise ConfigError(
                f"{who} needs a policy that makes chunks by random steps, and this {type(policy).__name__} was made "
                'without: say "explore": "sde" or "noise" in --policy-config where its kind has that, or choose '
                "another --policy or algorithm: docs/algorithms.md has which go together."
            )
        return PiRlUpdates(policy, critic, self)


class ExploredChunks(NamedTuple):
    """n chunks of the policy's own whose probability is known, and what came of them."""

    batch: Batch
    behaviour: torch.Tensor
    """float32[n]: log-probability by the version that acted"""
    proximal: torch.Tensor
    """float32[n]: by the policy that changes are compared with"""
    now: torch.Tensor
    """float32[n]: by the policy as it is"""
    advantages: torch.Tensor
    """float32[n], normalised"""


class PiRlUpdates(ValueUpdates):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: ChunkCritic, config: PiRl) -> None:
        import torch

        notices = OutcomeNotices(
            config.name,
            when_all_fail="people are imitated, and nothing else is learned",
            when_all_succeed="actions differ only by how soon they lead there",
        )
        super().__init__(policy, critic, config, notices)
        self._config = config
        # part of a checkpoint, like what the critic has learned
        critic.register_buffer("succeeded", torch.zeros_like(critic.learned))
        self._networks = {POLICY: TrainedNetwork(policy.module), CRITIC: self._critic_training}

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the critic and one of the policy, of the same batch."""
        import torch

        batch, warm = step.draw(), self.warm
        steps, metrics = self.read_outcomes(batch)
        features = self.features(step, batch)
        with torch.no_grad():
            usable, chunks = self.judge(step, batch, features, steps)
        learned = self.learn_values(step, batch, features, steps, metrics, (usable, chunks))
        minded = learned and warm and self.is_sound(metrics)
        succeeded = cast("torch.Tensor", self.critic.succeeded)
        succeeded += int((steps.own & steps.known & steps.succeeded).sum())
        rows = self._explored(batch, steps, metrics)
        explored = None
        # where nothing ever succeeded, what differs is the critic's error
        if minded and int(succeeded) and (rows & usable).any():
            explored = self._weigh(step, batch, rows & usable, chunks.targets[torch.from_numpy(rows[usable])], features)
        self._improve(step, self.taught(batch, steps), explored, metrics)
        return metrics

    def features(self, step: UpdateStep, batch: Batch) -> torch.Tensor:
        """float32[b, w]: what the critic reads, by the policy's average."""
        import torch

        with torch.no_grad():
            return self._able.features(batch, step.average(POLICY)).float().flatten(0, 1)

    def _explored(self, batch: Batch, steps: StepOutcomes, metrics: Metrics) -> np.ndarray:
        """bool[b]: chunks of the policy's own of which it is known how they came about, and that are not too old."""
        own, bound = steps.own & steps.known, self._config.max_lag
        traced = own & (np.asarray(batch["traces"]["step"]) >= 0) & np.isfinite(batch["traces"]["log_prob"])
        lag = np.asarray(batch["lag"])
        metrics["traced_share"] = float(traced.sum() / max(1, own.sum()))
        counts = self.notices.counts
        counts["traced"] += int(traced.sum())
        if counts["own"] >= NOTICED_STEPS and not counts["traced"]:
            self.notices.say(
                "no step of the policy's own drawn so far says how probable it was: people are imitated, and nothing "
                "else is learned, until robots act by a policy that explores and say so."
            )
        found = traced & (lag <= bound) if bound else traced
        if found.any():
            metrics["behind"] = float(lag[found].mean())
        return found

    def _weigh(
        self, step: UpdateStep, batch: Batch, rows: np.ndarray, targets: torch.Tensor, features: torch.Tensor
    ) -> ExploredChunks:
        """Of the bool[b] `rows` of a batch; `targets` float32[n]: what they led to."""
        import torch

        chosen, critic = select_rows(batch, np.flatnonzero(rows)), cast("ChunkCritic", step.average(CRITIC))
        behaviour = torch.from_numpy(np.asarray(chosen["traces"]["log_prob"], np.float32)).to(targets.device)
        with torch.no_grad():
            now, proximal = self._able.trace_log_probability(chosen), behaviour
            if self._config.decoupled:
                proximal = self._able.trace_log_probability(chosen, step.average(POLICY))
            beyond = targets - critic.value.expectation(features[torch.from_numpy(rows).to(features.device)])
            spread = beyond.std(unbiased=False).clamp_min(_LEAST_SPREAD)
            return ExploredChunks(chosen, behaviour, proximal, now, (beyond - beyond.mean()) / spread)

    def _improve(
        self, step: UpdateStep, taught: Batch | None, explored: ExploredChunks | None, metrics: Metrics
    ) -> None:
        """One step of the policy: imitating `taught`, and by what came of the `explored` chunks."""
        parts: dict[str, torch.Tensor] = {}
        config, worth = self._config, 1.0
        if explored is not None:
            share = effective_share(explored.now - explored.behaviour)
            worth = math.sqrt(share) if config.scaled else 1.0
            random_steps = explored.batch["traces"]["points"].shape[1] - 1
            changed = ((explored.now - explored.proximal) / random_steps).exp()
            metrics["effective_share"] = share
            metrics["clipped_share"] = ((changed - 1).abs() > config.clip).float().mean().item()

        def loss() -> torch.Tensor:
            if taught is not None:
                parts["loss"] = self.policy.loss(taught)
            if explored is None:
                return parts["loss"]
            _, behaviour, proximal, _, advantages = explored
            now = self._able.trace_log_probability(explored.batch)
            random_steps = explored.batch["traces"]["points"].shape[1] - 1
            losses = clipped_losses(now, proximal, behaviour, advantages, config.clip, config.dual_clip, random_steps)
            parts["surrogate"] = total = losses.mean()
            return worth * total + config.imitation_weight * parts["loss"] if taught is not None else total

        metrics["loss"] = 0.0
        if taught is not None or explored is not None:
            # alone its length does not matter to an optimiser that goes by signs, and beside imitation a short step
            # would hold that up, too
            step.descend(POLICY, loss, 1.0 if taught is not None else worth)
        metrics.update({name: one.item() for name, one in parts.items()})


def clipped_losses(
    now: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip: float,
    dual_clip: float,
    random_steps: int = 1,
) -> torch.Tensor:
    """float32[n] of log-probabilities float32[n], each of so many `random_steps`, and `advantages` float32[n]: see the
    module."""
    import torch

    weight = (proximal - behaviour).clamp(max=_LARGEST_LOG_RATIO).exp().clamp(max=_LARGEST_WEIGHT)
    ratio = ((now - proximal) / random_steps).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -weight * gain


def effective_share(log_weights: torch.Tensor) -> float:
    """Of the samples whose importance weights have the logarithms float32[n]: (sum w)^2 / (n sum w^2), from 1 / n where
    one counts for all to 1 where they count alike (Kong 1992)."""
    weights = (log_weights.double() - log_weights.max()).exp()
    return (weights.sum().square() / (len(weights) * weights.square().sum())).item()
