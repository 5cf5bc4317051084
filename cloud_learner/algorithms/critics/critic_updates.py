"""What algorithms have in common that ask a critic what a chunk of actions is worth (`chunk_critic`).

The critic learns from people's steps and the policy's own, successes and failures. Until it has learned from the
policy's own steps, and whenever it says what cannot be, nobody minds it, and the policy imitates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from cloud_learner.algorithms.critics.judged import OutcomeNotices, StepOutcomes, read_outcomes, taught_or_judged
from cloud_learner.algorithms.interface import (
    Algorithm,
    AlgorithmConfig,
    DataNeeds,
    Metrics,
    TrainedNetwork,
    UpdateStep,
)
from cloud_learner.buffer.sampling.shares import TaskMix
from policies.interface.capabilities import Chunks, Encodes, Joinable, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError, InvalidDataError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import CriticEnsemble

CRITIC = "critic"
"""name of the network"""
AVERAGE = 0.995
"""decay of the critic's average, and of what it is compared with"""
_FARTHEST = 1.0
"""a Q so far from all that can be is of a critic that has diverged"""


@dataclass(frozen=True)
class CriticConfig(AlgorithmConfig):
    """What is drawn, and what actions are worth."""

    on_ranks: ClassVar[bool] = False
    n_step: int = 8
    """ticks of a chunk that are judged, at most its H: as many as are executed before the next one"""
    gamma: float = 0.99
    """what success is worth a tick later"""
    warmup: int = 2000
    """updates in which the critic has learned from the policy's own steps, before the policy minds it: what is worth
    something comes back from an episode's end by `n_step` ticks in the few hundred that an average takes to follow"""
    online_share: float = 0.5
    """of a batch, in a task that has demonstrations: what the fleet records outgrows them soon, and with them what
    people did"""
    own_weight: float = 1.0
    """how often a step of the policy's own is drawn, for each step of a person"""
    recovery_weight: float = 1.0
    """how often a step by which a person brought the robot back is drawn; 0: no window begins there"""
    taken_over_worth: float = 0.0
    """what a chunk of the policy's own is worth in which somebody takes over (RLIF, arXiv 2311.12996): with what it
    came to in the end, by their help, it would be as good to be helped as to need none"""
    critic_width: int = 128
    """hidden units of the critic's networks"""
    critic_rate: float = 1.0
    """its learning rate, times the training's"""

    def __post_init__(self) -> None:
        self._require_positive("n_step", "own_weight", "critic_width", "critic_rate")
        if not 0 <= self.taken_over_worth <= 1:
            raise ConfigError(f"{self._who}: taken_over_worth is {self.taken_over_worth}; it must be from 0 to 1.")
        self._require_share("gamma", "online_share")
        for name in ("warmup", "recovery_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{self._who}: {name} is {getattr(self, name)}; give 0 or more.")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{self._who}: {name} is {getattr(self, name)}; it must be positive.")

    def _require_share(self, *names: str) -> None:
        for name in names:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{self._who}: {name} is {getattr(self, name)}; it must be above 0 and at most 1.")

    @property
    def _who(self) -> str:
        return type(self).__name__

    def needs(self) -> DataNeeds:
        """Everybody's steps, and what was seen after them; the policy's own count once their episode is judged."""
        target = taught_or_judged(self.own_weight, self.recovery_weight, TaskMix(online=self.online_share))
        return DataNeeds(target, self.n_step, self.gamma)

    def require_judged(self, policy: TrainablePolicy, *capabilities: type) -> int:
        """How many numbers of a chunk of `policy` are judged. Raises `ConfigError` for one that has not what it takes,
        the `capabilities` included."""
        who = f"algorithm '{self.name}'"
        for capability in (*capabilities, Chunks, Encodes):
            require(policy, capability, who)
        assert isinstance(policy, Chunks)
        if isinstance(policy, Joinable):
            raise ConfigError(
                f"{who} trains a policy for robots of one shape, and {type(policy).__name__} is for several: choose "
                "another --policy, or --algorithm hg-dagger."
            )
        horizon, numbers = policy.chunk_shape
        if self.n_step > horizon:
            raise ConfigError(
                f"{who} judges {self.n_step} ticks of a chunk, and this policy's have {horizon}: set algorithm.n_step "
                f"to {horizon} or less."
            )
        return self.n_step * numbers


class JudgedChunks(NamedTuple):
    """What a critic learns of n chunks, as tensors."""

    features: torch.Tensor
    """float32[n, w]"""
    actions: torch.Tensor
    """float32[n, n_step * da]"""
    targets: torch.Tensor
    """float32[n] of Q"""
    own: torch.Tensor
    """bool[n]: the policy's"""


class CriticUpdates(Algorithm):
    """The updates of one run of such an algorithm."""

    def __init__(
        self, policy: TrainablePolicy, critic: CriticEnsemble, config: CriticConfig, notices: OutcomeNotices
    ) -> None:
        super().__init__(policy)
        self.critic = critic
        self.notices = notices
        self._judging = config
        self._able: Any = policy
        """the policy, as what `CriticConfig.require_judged` has found it to be"""
        self._critic_training = TrainedNetwork(critic, rate_scale=config.critic_rate, average=AVERAGE)

    @abstractmethod
    def features(self, step: UpdateStep, batch: Batch) -> torch.Tensor:
        """float32[b, w]: what the critic reads."""

    @abstractmethod
    def what_comes(self, step: UpdateStep, features: torch.Tensor) -> torch.Tensor:
        """float32[n]: what is thought to come, where float32[n, w] was seen. Without gradients."""

    @abstractmethod
    def critic_loss(self, step: UpdateStep, chunks: JudgedChunks) -> Callable[[torch.Tensor], torch.Tensor]:
        """What the critic goes down, a scalar, for float32[e, n] that its Q say of the chunks."""

    @property
    def warm(self) -> bool:
        """Whether the critic has learned for long enough to be minded."""
        return int(self.critic.learned) >= self._judging.warmup

    def read_outcomes(self, batch: Batch) -> tuple[StepOutcomes, Metrics]:
        """Of a batch, and how much of it is the policy's own."""
        steps = read_outcomes(batch, (len(batch["outcome"]), 1))
        self.notices.note(steps)
        return steps, {"own_share": float((steps.own & steps.known).mean())}

    def taught(self, batch: Batch, steps: StepOutcomes) -> Batch | None:
        """The samples that people's steps begin, masked from where the policy goes on by itself; None without any."""
        people = np.flatnonzero(~steps.own)
        return select_rows(batch | {"mask": batch["imitable"]}, people) if len(people) else None

    def learn_values(
        self,
        step: UpdateStep,
        batch: Batch,
        features: torch.Tensor,
        steps: StepOutcomes,
        metrics: Metrics,
        judged: tuple[np.ndarray, JudgedChunks] | None = None,
    ) -> bool:
        """One step of the critic; whether it could be made. `judged`: what `judge` gave, where it was asked already."""
        import torch

        with torch.no_grad():
            usable, chunks = judged or self.judge(step, batch, features, steps)
        if not len(chunks.targets):
            return True
        said: list[torch.Tensor] = []
        loss_of = self.critic_loss(step, chunks)

        def loss() -> torch.Tensor:
            q = self.critic.q(chunks.features, chunks.actions)
            said.append(q.detach())
            return loss_of(q)

        try:
            if not all(bool(one.isfinite().all()) for one in chunks):
                raise InvalidDataError("what a chunk led to is no number: look for bad values in the newest data.")
            metrics["critic_loss"] = step.descend(CRITIC, loss)
        except InvalidDataError as error:
            self.notices.say("the critic could not learn; the policy imitates without it until it can.", error)
            return False
        if (steps.own & usable).any():
            self.critic.learned += 1
        q = said[-1]
        metrics["q_error"] = (q - chunks.targets).abs().mean().item()
        metrics["q_least"], metrics["q_most"] = q.min().item(), q.max().item()
        return True

    def is_sound(self, metrics: Metrics) -> bool:
        """Whether what the critic says of the batch can be."""
        least, most = metrics.get("q_least", 0.0), metrics.get("q_most", 0.0)
        if max(-least, most - 1.0) < _FARTHEST:
            return True
        self.notices.say(
            "the critic says of actions what cannot be; the policy imitates without it until it says what can. If "
            "that lasts, set algorithm.critic_rate to less.",
            f"{least:.3g} to {most:.3g} instead of 0 to 1",
        )
        return False

    def judge(
        self, step: UpdateStep, batch: Batch, features: torch.Tensor, steps: StepOutcomes
    ) -> tuple[np.ndarray, JudgedChunks]:
        """(bool[b] chunks of which it is known what came next, these chunks)"""
        import torch

        from cloud_learner.algorithms.critics.chunk_critic import td_targets

        config = self._judging
        ends = (steps.ticks_to_end >= 0) & (steps.ticks_to_end < config.n_step)
        next_ticks = np.asarray(batch["next_ticks"]).reshape(ends.shape)
        taken = steps.own & np.asarray(batch["taken_over"]).reshape(ends.shape)
        usable = np.where(ends, steps.known, next_ticks > 0) | taken
        own_state = np.asarray(batch["next_state"])
        later = batch | {"state": own_state, "images": batch["next_images"], "seen_state": own_state}
        next_features = self.features(step, later)
        actions = self.judged_part(self._able.chunk_actions(batch)).flatten(0, 1)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[usable]).to(features.device)

        rows = torch.from_numpy(usable).to(features.device)
        features, next_features, actions = features[rows], next_features[rows], actions[rows]
        ticks_to_end = tensor(np.where(ends, steps.ticks_to_end, config.n_step))
        comes = self.what_comes(step, next_features)
        targets = td_targets(
            ticks_to_end, tensor(steps.succeeded), tensor(next_ticks), comes, config.n_step, config.gamma
        )
        targets = torch.where(tensor(taken), config.taken_over_worth, targets)
        return usable, JudgedChunks(features, actions, targets, tensor(steps.own))

    def judged_part(self, actions: torch.Tensor) -> torch.Tensor:
        """[..., n_step * da] of float[..., H * da]"""
        return actions[..., : self._judging.n_step * self._able.chunk_shape[1]].float()


def select_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """The images int64[n] of a batch, and the steps behind them."""

    def select(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: select(one) for name, one in values.items()}
        if isinstance(values, list):
            return [values[row] for row in rows]
        return values[rows] if isinstance(values, np.ndarray) and values.ndim else values

    return {name: select(values) for name, values in batch.items()}
