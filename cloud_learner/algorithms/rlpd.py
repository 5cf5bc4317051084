"""RLPD: soft actor-critic that begins with demonstrations, for small policies that draw their actions.

Ball, Smith, Kostrikov, Levine 2023, "Efficient Online Reinforcement Learning with Offline Data", arXiv 2302.02948,
algorithm 1; with people who correct: HIL-SERL, Luo et al. 2024, arXiv 2410.21845. Several Q of chunks, with layer norm
(`chunk_critic`), each learn

    y = gamma^n min over a random subset of the average Q of (s', a'),   a' drawn from the policy at s' n ticks later,

or what the episode came to where it ended or somebody took over (`td_targets`). Demonstrations and interventions count
as one half of each batch, what the policy did as the other. After several such steps the policy takes one
(`soft_actor`), by actions that it draws now, and the temperature of its entropy follows.

As in HIL-SERL, entropy is worth something to the policy and not to the critics: a Q stays the chance of success,
discounted. Beside that the policy imitates people, at first alone: robots have to act sensibly before a critic has
learned anything, and until then, and whenever a critic says what cannot be, it goes on so.

It departs from the papers in four things: actions are chunks; the policy goes on imitating (`imitation_weight`), which
is also all that teaches it the part of a chunk that is not judged; what it sees by is learned by imitation, not by the
critics; and what comes is taken to be within 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from cloud_learner.algorithms.critics.critic_updates import AVERAGE, CRITIC, CriticConfig, CriticUpdates, JudgedChunks
from cloud_learner.algorithms.critics.judged import OutcomeNotices
from cloud_learner.algorithms.interface import POLICY, Metrics, TrainedNetwork, UpdateStep
from policies.interface.capabilities import Draws
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import CriticEnsemble

_TEMPERATURE = "temperature"


@dataclass(frozen=True)
class Rlpd(CriticConfig):
    """And how the policy and its critics learn."""

    name: ClassVar[str] = "rlpd"
    policy_kind: ClassVar[str] = "gaussian"
    critics: int = 5
    """Q that learn beside each other (RLPD: 10, HIL-SERL: 2)"""
    subset: int = 2
    """of them, drawn for each step of the critics: the least that these say is what comes"""
    critic_updates: int = 2
    """steps of the critics, each of a batch of its own, for one of the policy (RLPD: 20, HIL-SERL: 2)"""
    entropy: float = -1.5
    """nats of each number of a chunk, normalised to [-1, 1], that the policy is held at: a normal of deviation 0.24 has
    0, of 0.09 -1, of 0.03 -2 (HIL-SERL: -0.5; what imitates full speed has less than what its deviation says)"""
    temperature: float = 0.01
    """what a nat is worth to begin with; it follows"""
    imitation_weight: float = 0.1
    """of the policy's imitation loss on people's steps, once it minds the critics; 0: none is left of it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("critics", "subset", "critic_updates", "temperature")
        if self.subset > self.critics:
            raise ConfigError(f"Rlpd: subset is {self.subset}; there are {self.critics} critics.")
        if self.temperature > 1:
            raise ConfigError(f"Rlpd: temperature is {self.temperature}; a success is worth 1: give at most that.")
        if not 0 <= self.imitation_weight < math.inf:
            raise ConfigError(f"Rlpd: imitation_weight is {self.imitation_weight}; give 0 or more.")
        if not math.isfinite(self.entropy):
            raise ConfigError(f"Rlpd: entropy is {self.entropy}; it must be finite.")

    def make(self, policy: TrainablePolicy) -> RlpdUpdates:
        numbers = self.require_judged(policy, Draws)
        from cloud_learner.algorithms.critics.chunk_critic import CriticEnsemble

        width = policy.feature_width  # type: ignore[attr-defined]
        return RlpdUpdates(policy, CriticEnsemble(width, numbers, self.critic_width, self.critics), self)


class RlpdUpdates(CriticUpdates):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: CriticEnsemble, config: Rlpd) -> None:
        from cloud_learner.algorithms.critics.soft_actor import Temperature

        notices = OutcomeNotices(
            config.name,
            when_all_fail="what it did counts as worth nothing",
            when_all_succeed="actions differ only by how soon they lead there",
        )
        super().__init__(policy, critic, config, notices)
        self._config = config
        self.temperature = Temperature(config.temperature)
        self._networks = {
            POLICY: TrainedNetwork(policy.module),
            # an average follows once in an update, however many steps that has
            CRITIC: replace(self._critic_training, average=AVERAGE**config.critic_updates),
            _TEMPERATURE: TrainedNetwork(self.temperature),
        }

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """Several steps of the critics, each of its own batch, and one of the policy, of the last of these."""
        for _ in range(self._config.critic_updates):
            batch, warm = step.draw(), self.warm
            steps, metrics = self.read_outcomes(batch)
            features = self.features(step, batch)
            learned = self.learn_values(step, batch, features, steps, metrics)
        guided = learned and warm and self.is_sound(metrics)
        acting = self._act(step, batch, features) if guided else None
        taught = self.taught(batch, steps)
        parts: dict[str, torch.Tensor] = {}

        def loss() -> torch.Tensor:
            if taught is not None:
                parts["loss"] = self.policy.loss(taught)
            if acting is None:
                return parts["loss"]
            parts.update(acting())
            total = parts["actor_loss"]
            return total if taught is None else total + self._config.imitation_weight * parts["loss"]

        metrics["loss"] = 0.0
        if taught is not None or acting is not None:
            step.descend(POLICY, loss)
        # what imitation is at is what others are compared by
        metrics.update({name: one.item() for name, one in parts.items()})
        if acting is not None:
            self._follow_entropy(step, metrics)
        return metrics

    def features(self, step: UpdateStep, batch: Batch) -> torch.Tensor:
        """float32[b, w]: what the critics read, by the policy's average."""
        import torch

        with torch.no_grad():
            return self._able.features(batch, step.average(POLICY)).float().flatten(0, 1)

    def what_comes(self, step: UpdateStep, features: torch.Tensor) -> torch.Tensor:
        """As `CriticUpdates`: the least that some of the average critics say of what robots would do there."""
        critic = cast("CriticEnsemble", step.average(CRITIC))
        actions, _ = self._able.draw(features, self._noise(step, features), step.average(POLICY))
        chosen = step.rng.permutation(self._config.critics)[: self._config.subset]
        return critic.q(features, self.judged_part(actions), chosen.tolist()).amin(0).clamp(0.0, 1.0)

    def critic_loss(self, step: UpdateStep, chunks: JudgedChunks) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `CriticUpdates`: the squared error of each, the policy's chunks and the others as much."""
        from cloud_learner.algorithms.critics.soft_actor import even_halves

        weights = even_halves(chunks.own)
        return lambda q: ((q - chunks.targets).square() * weights).mean(1).sum()

    def _noise(self, step: UpdateStep, features: torch.Tensor) -> torch.Tensor:
        """float32[n, H * da]"""
        import torch

        shape = len(features), math.prod(self._able.chunk_shape)
        return torch.from_numpy(step.rng.standard_normal(shape, np.float32)).to(features.device)

    def _act(self, step: UpdateStep, batch: Batch, features: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
        """The loss of what the policy draws for what a batch shows, and how sure it is."""
        import torch

        from cloud_learner.algorithms.critics.soft_actor import actor_loss

        policy, critic = self._able, cast("CriticEnsemble", step.average(CRITIC))
        with torch.no_grad():
            seen = policy.features(batch).float().flatten(0, 1)
            temperature = self.temperature.value
        noise = self._noise(step, seen)

        def loss() -> dict[str, torch.Tensor]:
            actions, density = policy.draw(seen, noise)
            q, density = critic.q(features, self.judged_part(actions)), self.judged_part(density)
            total = actor_loss(q, density, temperature)
            return {"actor_loss": total, "entropy": -density.mean().detach(), "policy_q": q.mean().detach()}

        return loss

    def _follow_entropy(self, step: UpdateStep, metrics: Metrics) -> None:
        step.descend(_TEMPERATURE, lambda: self.temperature.loss(metrics["entropy"], self._config.entropy))
        self.temperature.bound()
        metrics["temperature"] = self.temperature.value.item()
