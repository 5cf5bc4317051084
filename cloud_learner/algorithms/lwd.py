"""LWD: imitate people, learn what actions are worth from all that was done, and do more often what is worth more.

"Learning while Deploying", 2026, arXiv 2605.00416. A critic (`chunk_critic`) learns from people's steps and the
policy's own, successes and failures, what a chunk of actions leads to. The policy is moved (`adjoint_matching`) towards

    reference * exp(Q / temperature),

where the reference is what imitation alone makes of people's steps. Which imitation that is, the paper settles once,
offline; here robots work after seconds and people correct them for hours. So the reference is a second network of the
policy's kind that goes on imitating: a correction is learned at once, by it and by the policy, whatever the critic
thinks of it. A running average of the policy would not do, for it would take in what the critic said and move away from
what people do step by step; nor would one frozen early, for it would pull back from every correction. Until the critic
has learned from the policy's own steps, and whenever it says what cannot be, the policy imitates, as by `hg_dagger`,
and the reference is a copy of it. So with nobody who judges episodes this is `hg_dagger`.

What the policy sees by is learned by imitation: adjoint matching moves what makes actions of it.

It departs from the paper in the steps along the flow (`adjoint_matching`), the temperature, and in what is worth
something: success, as episodes were judged, whatever rewards a simulator gave.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from cloud_learner.algorithms.critics.critic_updates import AVERAGE, CRITIC, select_rows
from cloud_learner.algorithms.critics.judged import OutcomeNotices
from cloud_learner.algorithms.critics.value_updates import ValueConfig, ValueUpdates
from cloud_learner.algorithms.hg_dagger import repeat_steps
from cloud_learner.algorithms.interface import POLICY, Metrics, TrainedNetwork, UpdateStep
from policies.interface.capabilities import GOOD, Imitates, require
from policies.interface.policy import Batch, TrainablePolicy

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.critics.chunk_critic import ChunkCritic

_REFERENCE = "reference"


@dataclass(frozen=True)
class Lwd(ValueConfig):
    """And how far the policy goes after what actions are worth."""

    name: ClassVar[str] = "lwd"
    temperature: float = 0.1
    """a chunk whose Q is higher by so much becomes e times as likely. The paper has 2, with which a sure success would
    become 1.6 times as likely as a sure failure"""
    largest_pull: float = 1.0
    """root mean square that dQ/da over the temperature is cut to: what a critic that is wrong can do at most"""
    imitation_weight: float = 0.5
    """of the loss on people's steps, beside the one that follows the critic"""
    flow_steps: int = 5
    """flow times at which the policy is moved; best as many as it acts with, or a multiple"""
    matched: int = 16
    """steps of a batch from which it is moved: most of what an update costs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("temperature", "largest_pull", "imitation_weight", "flow_steps", "matched")

    def make(self, policy: TrainablePolicy) -> LwdUpdates:
        critic = self.make_critic(policy)
        require(policy, Imitates, f"algorithm '{self.name}'")
        return LwdUpdates(policy, critic, self)


class LwdUpdates(ValueUpdates):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: ChunkCritic, config: Lwd) -> None:
        notices = OutcomeNotices(
            config.name,
            when_all_fail="what it did counts as worth nothing",
            when_all_succeed="actions differ only by how soon they lead there",
        )
        super().__init__(policy, critic, config, notices)
        # what is frozen is there once
        frozen = {id(one): one for one in policy.module.parameters() if not one.requires_grad}
        self.reference = copy.deepcopy(policy.module, frozen)
        self._config = config
        self._networks = {
            POLICY: TrainedNetwork(policy.module),
            _REFERENCE: TrainedNetwork(self.reference, average=AVERAGE),
            CRITIC: self._critic_training,
        }

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the critic, one of the policy and one of the reference, of the same batch."""
        batch, warm = step.draw(), self.warm
        self._align_reference(step, warm)
        steps, metrics = self.read_outcomes(batch)
        features = self.features(step, batch)
        guided = self.learn_values(step, batch, features, steps, metrics) and warm and self.is_sound(metrics)
        matching = self._match(step, batch, features, metrics) if guided else None
        taught = self.taught(batch, steps)
        self._improve(step, taught, matching, metrics)
        if taught is not None and warm:
            metrics["reference_loss"] = step.descend(
                _REFERENCE, lambda: self._able.sample_losses(taught, self.reference).mean()
            )
        return metrics

    def _improve(
        self, step: UpdateStep, taught: Batch | None, matching: Callable[[], torch.Tensor] | None, metrics: Metrics
    ) -> None:
        """One step of the policy: imitating `taught`, and down `matching`."""
        parts: dict[str, torch.Tensor] = {}

        def loss() -> torch.Tensor:
            if taught is not None:
                parts["loss"] = self.policy.loss(taught)
            if matching is None:
                return parts["loss"]
            parts["matching_loss"] = total = matching()
            return total + self._config.imitation_weight * parts["loss"] if taught is not None else total

        metrics["loss"] = 0.0
        if taught is not None or matching is not None:
            step.descend(POLICY, loss)
        # what imitation is at is what others are compared by, and what tells a run that has gone astray
        metrics.update({name: one.item() for name, one in parts.items()})

    def _align_reference(self, step: UpdateStep, warm: bool) -> None:
        """Statistics are the policy's; before it is `warm` the weights are, too."""
        import torch

        pairs = ((self.reference, self.policy.module), (step.average(_REFERENCE), step.average(POLICY)))
        with torch.no_grad():
            for mine, theirs in pairs:
                for buffer, of_policy in zip(mine.buffers(), self.policy.module.buffers(), strict=True):
                    buffer.copy_(of_policy)
                for weight, of_policy in () if warm else zip(mine.parameters(), theirs.parameters(), strict=True):
                    if weight is not of_policy:
                        weight.copy_(of_policy)

    # --- the critic -----------------------------------------------------------------------------------------------

    def features(self, step: UpdateStep, batch: Batch) -> torch.Tensor:
        """float32[b, w]: what the critic reads, by the reference's average."""
        import torch

        with torch.no_grad():
            return self._able.features(batch, step.average(_REFERENCE)).float().flatten(0, 1)

    # --- the policy -----------------------------------------------------------------------------------------------

    def _match(
        self, step: UpdateStep, batch: Batch, features: torch.Tensor, metrics: Metrics
    ) -> Callable[[], torch.Tensor] | None:
        """The loss that moves the policy towards what the critic values; None where that has no gradient."""
        import torch

        from cloud_learner.algorithms.adjoint_matching import lean_adjoints, matching_loss, sample_paths

        flow, config, reference = self._able, self._config, step.average(_REFERENCE)
        chosen = step.rng.permutation(len(features))[: config.matched]
        # a policy that is told acts as if told so
        some = select_rows(batch, chosen) | {"advantage": np.full(len(chosen), GOOD)}
        with torch.no_grad():
            given, given_reference = flow.conditioning(some), flow.conditioning(some, reference)
            at_once = flow.conditioning(repeat_steps(some, config.flow_steps))
        with step.random():
            noise = torch.randn(len(chosen), 1, math.prod(flow.chunk_shape), device=features.device)
            points, end = sample_paths(partial(flow.velocity, given), noise, config.flow_steps)
        at_end = self.pull(step, features[torch.from_numpy(chosen).to(features.device)][:, None], end)
        size = at_end.square().mean().sqrt().item()
        if not math.isfinite(size):
            self.notices.say("what the critic says of actions has no gradient; the policy imitates without it.")
            return None
        metrics["pull"] = size
        along = partial(flow.velocity, given_reference, module=reference)
        # one step behind each image, which are all flow times at once for the loss
        path = [one[:, :, 0] for one in (points, *lean_adjoints(along, points, at_end))]
        return lambda: matching_loss(partial(flow.velocity, at_once), *path)

    def pull(self, step: UpdateStep, features: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """float32[..., H * da]: minus the gradient of the average critic's Q over the temperature, at actions `end`.

        Beyond the actions' range Q is that of its border, and nothing is pulled further out.
        """
        import torch

        critic, config = cast("ChunkCritic", step.average(CRITIC)), self._config
        with torch.enable_grad():
            actions = end.clamp(-1.0, 1.0).requires_grad_()
            q = critic.q(features, self.judged_part(actions))
            (gradient,) = torch.autograd.grad(q.mean(0).sum(), actions)
        gradient = torch.where((end.abs() >= 1.0) & (gradient * end > 0), 0.0, gradient)
        pull = -gradient / config.temperature
        size = pull.square().mean(-1, keepdim=True).sqrt()
        return pull * (config.largest_pull / size.clamp_min(config.largest_pull))
