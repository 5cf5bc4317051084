"""Updates in which a quantile of V (`ChunkCritic`) stands for what comes after a chunk: nobody is asked what the policy
would do there, which costs a flow several passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from cloud_learner.algorithms.critics.critic_updates import CRITIC, CriticConfig, CriticUpdates, JudgedChunks
from cloud_learner.algorithms.interface import UpdateStep
from policies.interface.capabilities import Flows
from policies.interface.policy import TrainablePolicy

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import ChunkCritic


@dataclass(frozen=True)
class ValueConfig(CriticConfig):
    """And which of what was done stands for what comes."""

    level: float = 0.9
    """which quantile of V stands for what comes after a chunk (LWD: 0.9 while robots run, 0.6 before)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_share("level")

    def make_critic(self, policy: TrainablePolicy) -> ChunkCritic:
        """For the chunks of `policy`. Raises `ConfigError` for one that has not what it takes."""
        numbers = self.require_judged(policy, Flows)
        from cloud_learner.algorithms.critics.chunk_critic import ChunkCritic

        critic = ChunkCritic(policy.feature_width, numbers, self.critic_width)  # type: ignore[attr-defined]
        return critic.to(next(policy.module.parameters()).device)


class ValueUpdates(CriticUpdates):
    """The updates of one run of such an algorithm."""

    critic: ChunkCritic
    _judging: ValueConfig

    def what_comes(self, step: UpdateStep, features: torch.Tensor) -> torch.Tensor:
        """As `CriticUpdates`."""
        # V follows average Q already: with an average of its own, values would take twice as long to come back
        return self.critic.what_comes(features, self._judging.level)

    def critic_loss(self, step: UpdateStep, chunks: JudgedChunks) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `CriticUpdates`: V learns the lower of the two Q, these what the chunks led to."""
        lowest, value = self.lowest(step, chunks), self.critic.value
        return lambda q: value.loss(chunks.features, lowest) + (q - chunks.targets).square().mean(1).sum()

    def lowest(self, step: UpdateStep, chunks: JudgedChunks) -> torch.Tensor:
        """float32[n]: the lower of the two average Q."""
        import torch

        with torch.no_grad():
            return cast("ChunkCritic", step.average(CRITIC)).q(chunks.features, chunks.actions).amin(0)
