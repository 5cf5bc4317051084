"""HG-DAgger: imitate what people (or scripted experts) did when they took the robot over.

Kelly, Sidrane, Driggs-Campbell, Kochenderfer 2019, "HG-DAgger: Interactive Imitation Learning with Human Experts",
arXiv 1810.02890, algorithm 1: the person decides when to intervene; the demonstrations and the corrections, and only
they, are aggregated and imitated. What the policy itself did is never a target: the batch's `mask` leaves it out. RaC
(arXiv 2509.07953) tells apart what brings the robot back and what it is shown from there; it imitates both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cloud_learner.algorithms.interface import POLICY, Algorithm, AlgorithmConfig, DataNeeds, Metrics, UpdateStep
from cloud_learner.buffer.sampling.shares import OnlineShare, TaskMix
from cloud_learner.buffer.sampling.target import Recent, imitation
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HGDagger(AlgorithmConfig):
    """What is imitated, and how often."""

    name: ClassVar[str] = "hg-dagger"
    draws: int = 1
    """(noise, flow time) pairs per step: more signal for one image encoding"""
    recent_share: float = 0.0
    """share of each batch drawn from a task's newest steps: corrections of the policy that runs now"""
    recent_steps: int = 1200
    """how many imitable steps of a task count as newest"""
    adaptive_share: bool = False
    """more of what is learned less: each task's share of online data follows the losses (SOP, arXiv 2601.03044), for
    policies that say `image_losses`; otherwise every imitable step of a task counts the same"""
    difficulty: float = 0.0
    """more of tasks that are learned less: see `TaskMix`; 0: every task counts the same"""
    task_floor: float = 0.25
    """of an even share, which each task gets all the same"""
    recovery_weight: float = 1.0
    """of a step by which a person brought the robot back, before correcting: 1 learns both alike, as RaC does (arXiv
    2509.07953); 0 leaves recoveries out"""

    def __post_init__(self) -> None:
        for name in ("draws", "recent_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"HGDagger: {name} is {getattr(self, name)}; it must be positive.")
        if not 0 <= self.recent_share < 1:
            raise ConfigError(f"HGDagger: recent_share is {self.recent_share}; it must be in [0, 1).")
        if not 0 <= self.recovery_weight < math.inf:
            raise ConfigError(f"HGDagger: recovery_weight is {self.recovery_weight}; give 0 or more.")

    def needs(self) -> DataNeeds:
        online = OnlineShare() if self.adaptive_share else None
        mix = TaskMix(online=online, difficulty=self.difficulty, floor=self.task_floor)
        recent = Recent(self.recent_share, self.recent_steps)
        return DataNeeds(imitation(recent, mix=mix, recovery_weight=self.recovery_weight))

    def make(self, policy: TrainablePolicy) -> HGDaggerAlgorithm:
        return HGDaggerAlgorithm(policy, self)


class HGDaggerAlgorithm(Algorithm):
    """Its loss is the policy's own imitation loss; equation and paper stand at the policy's `loss`."""

    def __init__(self, policy: TrainablePolicy, config: HGDagger) -> None:
        super().__init__(policy)
        self._config = config
        self._follows_losses = config.needs().target.mix.follows_losses is not None

    def update(self, step: UpdateStep) -> Metrics:
        def loss(batch: Batch) -> torch.Tensor:
            value = self.policy.loss(repeat_steps(batch, self._config.draws))
            if self._follows_losses and (losses := getattr(self.policy, "image_losses", None)) is not None:
                step.note_losses(batch, losses)
            return value

        return {"loss": step.minimize(POLICY, loss)}


_OF_A_STEP = ("state", "actions", "mask", "ahead", "frame_age", "later_index", "later_state", "past_state")
"""what a loss may read of a batch and each step has for itself"""


def repeat_steps(batch: Batch, times: int) -> Batch:
    """`batch` with every step so many times behind its image, in the grouped layout when that is more than once."""
    if times == 1:
        return batch
    batch, grouped = dict(batch), batch["state"].ndim == 3
    for name in _OF_A_STEP:
        # what has no second axis in a grouped batch is the same for all steps behind an image
        if name in batch and (not grouped or batch[name].ndim > 1):
            array = batch[name] if grouped else batch[name][:, None]
            batch[name] = np.repeat(array, times, axis=1)
    return batch
