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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np

from cloud_learner.algorithms.hg_dagger import repeat_steps
from cloud_learner.algorithms.interface import (
    POLICY,
    Algorithm,
    AlgorithmConfig,
    DataNeeds,
    Metrics,
    TrainedNetwork,
    UpdateStep,
)
from cloud_learner.algorithms.judged import OutcomeNotices, StepOutcomes, read_outcomes, taught_or_judged
from cloud_learner.buffer.sampling.shares import TaskMix
from policies.interface.capabilities import GOOD, Encodes, Flows, Imitates, Joinable, require
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError, InvalidDataError

if TYPE_CHECKING:
    import torch

    from cloud_learner.algorithms.chunk_critic import ChunkCritic

_REFERENCE, _CRITIC = "reference", "critic"
_AVERAGE = 0.995
"""decay of the averages of both"""
_FARTHEST = 1.0
"""a Q so far from all that can be is of a critic that has diverged"""


@dataclass(frozen=True)
class Lwd(AlgorithmConfig):
    """What is drawn, what actions are worth, and how far the policy goes after that."""

    name: ClassVar[str] = "lwd"
    on_ranks: ClassVar[bool] = False
    n_step: int = 8
    """ticks of a chunk that are judged, at most its H: as many as are executed before the next one"""
    gamma: float = 0.99
    """what success is worth a tick later"""
    level: float = 0.9
    """which quantile of V stands for what comes after a chunk (the paper: 0.9 while robots run, 0.6 before)"""
    temperature: float = 0.1
    """a chunk whose Q is higher by so much becomes e times as likely. The paper has 2, with which a sure success would
    become 1.6 times as likely as a sure failure"""
    largest_pull: float = 1.0
    """root mean square that dQ/da over the temperature is cut to: what a critic that is wrong can do at most"""
    warmup: int = 2000
    """updates in which the critic has learned from the policy's own steps, before the policy minds it: what is worth
    something comes back from an episode's end by `n_step` ticks in the few hundred that an average takes to follow"""
    imitation_weight: float = 0.5
    """of the loss on people's steps, beside the one that follows the critic"""
    online_share: float = 0.5
    """of a batch, in a task that has demonstrations: what the fleet records outgrows them soon, and with them what
    people did"""
    own_weight: float = 1.0
    """how often a step of the policy's own is drawn, for each step of a person"""
    recovery_weight: float = 1.0
    """how often a step by which a person brought the robot back is drawn; 0: no window begins there"""
    flow_steps: int = 5
    """flow times at which the policy is moved; best as many as it acts with, or a multiple"""
    matched: int = 16
    """steps of a batch from which it is moved: most of what an update costs"""
    critic_width: int = 128
    """hidden units of the critic's networks"""
    critic_rate: float = 1.0
    """its learning rate, times the training's"""

    def __post_init__(self) -> None:
        positive = ("n_step", "temperature", "largest_pull", "imitation_weight", "own_weight", "flow_steps", "matched")
        for name in (*positive, "critic_width", "critic_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"Lwd: {name} is {getattr(self, name)}; it must be positive.")
        for name in ("gamma", "level", "online_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"Lwd: {name} is {getattr(self, name)}; it must be above 0 and at most 1.")
        for name in ("warmup", "recovery_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"Lwd: {name} is {getattr(self, name)}; give 0 or more.")

    def needs(self) -> DataNeeds:
        """Everybody's steps, and what was seen after them; the policy's own count once their episode is judged."""
        target = taught_or_judged(self.own_weight, self.recovery_weight, TaskMix(online=self.online_share))
        return DataNeeds(target, self.n_step, self.gamma)

    def make(self, policy: TrainablePolicy) -> LwdUpdates:
        who = f"algorithm '{self.name}'"
        for capability in (Flows, Encodes, Imitates):
            require(policy, capability, who)
        assert isinstance(policy, Flows)
        assert isinstance(policy, Encodes)
        if isinstance(policy, Joinable):
            raise ConfigError(
                f"{who} trains a policy for robots of one shape, and {type(policy).__name__} is for several: choose "
                "another --policy, or --algorithm hg-dagger."
            )
        horizon, numbers = policy.flow_shape
        if self.n_step > horizon:
            raise ConfigError(
                f"{who} judges {self.n_step} ticks of a chunk, and this policy's have {horizon}: set algorithm.n_step "
                f"to {horizon} or less."
            )
        from cloud_learner.algorithms.chunk_critic import ChunkCritic

        critic = ChunkCritic(policy.feature_width, self.n_step * numbers, self.critic_width)
        return LwdUpdates(policy, critic.to(next(policy.module.parameters()).device), self)


class JudgedChunks(NamedTuple):
    """What a critic learns of n chunks, as tensors."""

    features: torch.Tensor
    """float32[n, w]"""
    actions: torch.Tensor
    """float32[n, n_step * da]"""
    targets: torch.Tensor
    """float32[n] of Q"""
    lowest: torch.Tensor
    """float32[n]: what V learns, the lower of the two average Q"""


class LwdUpdates(Algorithm):
    """The updates of one run."""

    def __init__(self, policy: TrainablePolicy, critic: ChunkCritic, config: Lwd) -> None:
        super().__init__(policy)
        self.critic = critic
        # what is frozen is there once
        frozen = {id(one): one for one in policy.module.parameters() if not one.requires_grad}
        self.reference = copy.deepcopy(policy.module, frozen)
        self._config = config
        self._networks = {
            POLICY: TrainedNetwork(policy.module),
            _REFERENCE: TrainedNetwork(self.reference, average=_AVERAGE),
            _CRITIC: TrainedNetwork(critic, rate_scale=config.critic_rate, average=_AVERAGE),
        }
        self._flow: Any = policy
        """the policy, as what `Lwd.make` has found it to be"""
        self.notices = OutcomeNotices(
            config.name,
            when_all_fail="what it did counts as worth nothing",
            when_all_succeed="actions differ only by how soon they lead there",
        )

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        return self._networks

    def update(self, step: UpdateStep) -> Metrics:
        """One step of the critic, one of the policy and one of the reference, of the same batch."""
        batch = step.draw()
        warm = int(self.critic.learned) >= self._config.warmup
        self._align_reference(step, warm)
        steps = read_outcomes(batch, (len(batch["outcome"]), 1))
        self.notices.note(steps)
        metrics = {"own_share": float((steps.own & steps.known).mean())}
        features = self.features(step, batch)
        guided = self._learn_values(step, batch, features, steps, metrics) and warm and self._sound(metrics)
        matching = self._match(step, batch, features, metrics) if guided else None
        people = np.flatnonzero(~steps.own)
        taught = select_rows(batch, people) if len(people) else None
        self._improve(step, taught, matching, metrics)
        if taught is not None and warm:
            metrics["reference_loss"] = step.descend(
                _REFERENCE, lambda: self._flow.sample_losses(taught, self.reference).mean()
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
            return self._flow.features(batch, step.average(_REFERENCE)).float().flatten(0, 1)

    def _learn_values(
        self, step: UpdateStep, batch: Batch, features: torch.Tensor, steps: StepOutcomes, metrics: Metrics
    ) -> bool:
        """One step of the critic; whether it could be made."""
        import torch

        with torch.no_grad():
            usable, chunks = self.judge(step, batch, features, steps)
        if not len(chunks.targets):
            return True
        said: list[torch.Tensor] = []

        def loss() -> torch.Tensor:
            q = self.critic.q(chunks.features, chunks.actions)
            said.append(q.detach())
            return self.critic.value.loss(chunks.features, chunks.lowest) + (q - chunks.targets).square().mean(1).sum()

        try:
            if not bool((chunks.targets + chunks.lowest).isfinite().all()):
                raise InvalidDataError("what a chunk led to is no number: look for bad values in the newest data.")
            metrics["critic_loss"] = step.descend(_CRITIC, loss)
        except InvalidDataError as error:
            self.notices.say("the critic could not learn; the policy imitates without it until it can.", error)
            return False
        if (steps.own & usable).any():
            self.critic.learned += 1
        q = said[-1]
        metrics["q_error"] = (q - chunks.targets).abs().mean().item()
        metrics["q_least"], metrics["q_most"] = q.min().item(), q.max().item()
        return True

    def _sound(self, metrics: Metrics) -> bool:
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

        from cloud_learner.algorithms.chunk_critic import td_targets

        config, critic = self._config, cast("ChunkCritic", step.average(_CRITIC))
        ends = (steps.ticks_to_end >= 0) & (steps.ticks_to_end < config.n_step)
        next_ticks = np.asarray(batch["next_ticks"]).reshape(ends.shape)
        usable = np.where(ends, steps.known, next_ticks > 0)
        own_state = np.asarray(batch["next_state"])
        later = batch | {"state": own_state, "images": batch["next_images"], "seen_state": own_state}
        next_features = self.features(step, later)
        actions = self._judged(self._flow.flow_actions(batch)).flatten(0, 1)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[usable]).to(features.device)

        rows = torch.from_numpy(usable).to(features.device)
        features, next_features, actions = features[rows], next_features[rows], actions[rows]
        ticks_to_end = tensor(np.where(ends, steps.ticks_to_end, config.n_step))
        # V follows average Q already: with an average of its own, values would take twice as long to come back
        what_comes = self.critic.what_comes(next_features, config.level)
        targets = td_targets(
            ticks_to_end, tensor(steps.succeeded), tensor(next_ticks), what_comes, config.n_step, config.gamma
        )
        return usable, JudgedChunks(features, actions, targets, critic.q(features, actions).amin(0))

    def _judged(self, actions: torch.Tensor) -> torch.Tensor:
        """[..., n_step * da] of float[..., H * da]"""
        return actions[..., : self._config.n_step * self._flow.flow_shape[1]].float()

    # --- the policy -----------------------------------------------------------------------------------------------

    def _match(
        self, step: UpdateStep, batch: Batch, features: torch.Tensor, metrics: Metrics
    ) -> Callable[[], torch.Tensor] | None:
        """The loss that moves the policy towards what the critic values; None where that has no gradient."""
        import torch

        from cloud_learner.algorithms.adjoint_matching import lean_adjoints, matching_loss, sample_paths

        flow, config, reference = self._flow, self._config, step.average(_REFERENCE)
        chosen = step.rng.permutation(len(features))[: config.matched]
        # a policy that is told acts as if told so
        some = select_rows(batch, chosen) | {"advantage": np.full(len(chosen), GOOD)}
        with torch.no_grad():
            given, given_reference = flow.conditioning(some), flow.conditioning(some, reference)
            at_once = flow.conditioning(repeat_steps(some, config.flow_steps))
        with step.random():
            noise = torch.randn(len(chosen), 1, math.prod(flow.flow_shape), device=features.device)
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

        critic, config = cast("ChunkCritic", step.average(_CRITIC)), self._config
        with torch.enable_grad():
            actions = end.clamp(-1.0, 1.0).requires_grad_()
            q = critic.q(features, self._judged(actions))
            (gradient,) = torch.autograd.grad(q.mean(0).sum(), actions)
        gradient = torch.where((end.abs() >= 1.0) & (gradient * end > 0), 0.0, gradient)
        pull = -gradient / config.temperature
        size = pull.square().mean(-1, keepdim=True).sqrt()
        return pull * (config.largest_pull / size.clamp_min(config.largest_pull))


def select_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """The images int64[n] of a batch, and the steps behind them."""

    def select(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: select(one) for name, one in values.items()}
        if isinstance(values, list):
            return [values[row] for row in rows]
        return values[rows] if isinstance(values, np.ndarray) and values.ndim else values

    return {name: select(values) for name, values in batch.items()}
