"""Chunk editing: imitate people, and let a small network change each chunk to what a critic says is worth more.

RL Token (2026, arXiv 2604.23073) leaves a large policy as it is and learns a small actor and critic beside it, in
minutes to hours. With the policy's chunk c for what is seen, a critic Q (`chunk_critic`) that learns from all that was
done, and the editor e (`policies.flow.networks.editor`):

    loss of the editor = -min Q(e(c)) + penalty |e(c) - c|^2

Where the critic sees nothing to gain the chunk stays what imitation makes of it. The editor is part of the policy's
weights, so it travels with them and acts on the robot.

It departs from the paper in three things: the policy itself goes on imitating people, for they go on correcting; what
comes after a chunk is a quantile of what was done there (`chunk_critic`), not what the editor would do; and the editor
stretches and moves a chunk as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from cloud_learner.algorithms.critics.critic_updates import CRITIC, select_rows
from cloud_learner.algorithms.critics.judged import OutcomeNotices
from cloud_learner.algorithms.critics.value_updates import ValueConfig, ValueUpdates
from cloud_learner.algorithms.interface import POLICY, Metrics, TrainedNetwork, UpdateStep
from policies.interface.capabilities import GOOD, Edits, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import ChunkCritic


@dataclass(frozen=True)
class ChunkEdit(ValueConfig):
    """And how much of a chunk is changed for that."""

    name: ClassVar[str] = "chunk-edit"
    policy_options: ClassVar[Mapping[str, object]] = {"editor": 128, "editor_noise": 0.3}
    penalty: float = 0.1
    """what a change of 1, of an action normalised to [-1, 1], must bring in Q to be worth it, as a mean over numbers"""
    flow_steps: int = 5
    """steps from noise to the chunk that is edited; best as many as it acts with"""
    edited: int = 32
    """steps of a batch whose chunks are edited: most of what an update costs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("penalty", "flow_steps", "edited")

    def make(self, policy: TrainablePolicy) -> ChunkEditUpdates:
        critic = self.make_critic(policy)
        require(policy, Edits, f"algorithm '{self.name}'")
        assert isinstance(policy, Edits)
        if not policy.edits:
            raise ConfigError(
                f"algorithm '{self.name}' needs a policy with an editor, and this {type(policy).__name__} was made "
                'without: say "editor": 128 in --policy-config where its kind has that, or choose another --policy or '
                "algorithm: docs/algorithms.md has which go together."
            )
        return ChunkEditUpdates(policy, critic, self)


class ChunkEditUpdates(ValueUpdates):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: ChunkCritic, config: ChunkEdit) -> None:
        notices = OutcomeNotices(
            config.name,
            when_all_fail="what it did counts as worth nothing",
            when_all_succeed="actions differ only by how soon they lead there",
        )
        super().__init__(policy, critic, config, notices)
        self._config = config
        self._networks = {POLICY: TrainedNetwork(policy.module), CRITIC: self._critic_training}

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the critic and one of the policy, its editor included, of the same batch."""
        batch, warm = step.draw(), self.warm
        steps, metrics = self.read_outcomes(batch)
        features = self.features(step, batch)
        guided = self.learn_values(step, batch, features, steps, metrics) and warm and self.is_sound(metrics)
        editing = self._edit(step, batch, features) if guided else None
        taught = self.taught(batch, steps)
        parts: dict[str, torch.Tensor] = {}

        def loss() -> torch.Tensor:
            if taught is not None:
                parts["loss"] = self.policy.loss(taught)
            if editing is not None:
                parts.update(editing())
            total = [parts[name] for name in ("loss", "edit_loss") if name in parts]
            return sum(total[1:], total[0])

        metrics["loss"] = 0.0
        if taught is not None or editing is not None:
            step.descend(POLICY, loss)
        metrics.update({name: one.item() for name, one in parts.items()})
        return metrics

    def features(self, step: UpdateStep, batch: Batch) -> torch.Tensor:
        """float32[b, w]: what the critic reads, by the policy's average."""
        import torch

        with torch.no_grad():
            return self._able.features(batch, step.average(POLICY)).float().flatten(0, 1)

    def _edit(self, step: UpdateStep, batch: Batch, features: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
        """The loss of the editor on some steps of a batch, and what it gains by the critic."""
        import torch

        flow, config, critic = self._able, self._config, cast("ChunkCritic", step.average(CRITIC))
        chosen = step.rng.permutation(len(features))[: config.edited]
        seen = features[torch.from_numpy(chosen).to(features.device)][:, None]
        # a policy that is told acts as if told so
        some = select_rows(batch, chosen) | {"advantage": np.full(len(chosen), GOOD)}
        # not torch's own, so that what imitates takes the same steps as without an editor
        drawn = step.rng.standard_normal((len(chosen), 1, math.prod(flow.chunk_shape)), np.float32)
        with torch.no_grad():
            given, noise = flow.conditioning(some), torch.from_numpy(drawn).to(features.device)
            chunk = follow_flow(partial(flow.velocity, given), noise, config.flow_steps)

        def worth(actions: torch.Tensor) -> torch.Tensor:
            return critic.q(seen, self.judged_part(actions)).amin(0).mean()

        def loss() -> dict[str, torch.Tensor]:
            edited = flow.edit(given, chunk)
            q, change = worth(edited), (edited - chunk).square().mean()
            with torch.no_grad():
                gain = q - worth(chunk)
            return {"edit_loss": config.penalty * change - q, "edit_size": change.sqrt().detach(), "edit_gain": gain}

        return loss


def follow_flow(
    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], noise: torch.Tensor, steps: int
) -> torch.Tensor:
    """float[..., d] within [-1, 1]: where `steps` Euler steps lead from the `noise` float[..., d]."""
    actions = noise
    for i in range(steps):
        actions = actions + velocity(actions, actions.new_full((*actions.shape[:-1], 1), i / steps)) / steps
    return actions.clamp(-1, 1)
