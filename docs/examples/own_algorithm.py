"""An algorithm of one's own: imitate people, and what the policy itself did in episodes that succeeded.

PYTHONPATH=docs/examples vla-fleet up --recipe pixels --algorithm own_algorithm:FilteredImitation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cloud_learner.algorithms.interface import POLICY, Algorithm, AlgorithmConfig, DataNeeds, Metrics, UpdateStep
from cloud_learner.buffer.check import OUTCOMES
from cloud_learner.buffer.sampling.target import Factor, Moment, StepRuns, uniform
from policies.interface.capabilities import Imitates, require
from policies.interface.policy import TrainablePolicy
from wire.messages.gateway import ACTORS
from wire.types import Actor, EpisodeOutcome


@dataclass(frozen=True)
class FilteredImitation(AlgorithmConfig):
    """What is set of it: recipes and the command line see these fields."""

    name: ClassVar[str] = "filtered-imitation"
    own_weight: float = 0.5
    """how often a step of the policy's own successes is drawn, for each step of a person"""

    def needs(self) -> DataNeeds:
        """Everybody's steps; the policy's own count once their episode has succeeded."""
        own, success = ACTORS.index(Actor.policy), OUTCOMES.index(EpisodeOutcome.success)

        def weigh(runs: StepRuns, moment: Moment) -> np.ndarray:
            is_own = (runs.actor == own) & ~runs.demonstration
            return np.where(is_own, self.own_weight * (runs.outcome == success), 1.0)

        return DataNeeds(uniform(factors=(Factor(weigh, by_version=False),)))

    def make(self, policy: TrainablePolicy) -> FilteredImitationUpdates:
        require(policy, Imitates, f"algorithm '{self.name}'")
        return FilteredImitationUpdates(policy)


class FilteredImitationUpdates(Algorithm):
    """The updates of one run. Networks of its own would be named by `networks`."""

    def update(self, step: UpdateStep) -> Metrics:
        """One step down the policy's imitation loss."""
        return {"loss": step.minimize(POLICY, self.policy.loss)}
