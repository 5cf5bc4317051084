"""What an algorithm is: what it wants of the data, and one update. Everything else is the learner's.

An algorithm's file has a frozen config that is an `AlgorithmConfig`, and the class that its `make` gives. It says which
networks it trains; optimisers, precision, averages, checkpoints and versions are the learner's
(`cloud_learner.training`), as recipes set them for all algorithms alike (`TrainingConfig`). Configs are read without
torch, for recipes are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from cloud_learner.buffer.sampling.target import SamplingDistribution
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

POLICY = "policy"
"""name of the network that robots act by"""
Metrics = dict[str, float]
"""What an update says of itself, by name; `loss`, a finite number, is shown everywhere and has to be there."""


@dataclass(frozen=True, slots=True)
class DataNeeds:
    """What an algorithm wants to see, as `DatasetConfig` has it."""

    target: SamplingDistribution
    """which steps, how often"""
    n_step: int = 0
    """batches bring the observation so many ticks later, and what was rewarded until then; 0: they do not"""
    gamma: float = 0.99
    """discount of a tick, with `n_step`"""
    labels: tuple[str, ...] = ()
    """names of step labels (`Ledger.put_step_labels`) that batches bring"""
    traces: bool = False
    """batches bring what a policy that explores (`Explores`) left of how its chunks came about"""
    samples_per_insert: float = 0.0
    """online, at most so many steps are drawn for each one that is recorded, unless the recipe has a number of its own;
    0: as many as the trainer manages"""


@dataclass(frozen=True, slots=True)
class TrainedNetwork:
    """A network that an algorithm trains."""

    module: nn.Module
    rate_scale: float = 1.0
    """of the learning rate"""
    average: float | None = None
    """decay of its running average, such as 0.995 for a critic's target; None: it has none. The policy's is a setting
    of the training"""


class UpdateStep(Protocol):
    """What the learner gives to an update. What is random in it follows from the seed and the number of the update."""

    rng: np.random.Generator

    def draw(self) -> Batch:
        """The next batch, as `cloud_learner.buffer.loading.windows` documents, its images shifted if the training does
        so; its arrays hold until the next draw."""
        ...

    def minimize(self, network: str, loss: Callable[[Batch], torch.Tensor]) -> float:
        """One step of `network`'s optimiser down the mean of `loss` over as many batches as the training accumulates;
        that mean.

        `loss` runs in the training's precision and gives a scalar. Raises `NotFiniteError`, the network unchanged,
        where it or its gradient is not finite, and `ConfigError` where it is no scalar.
        """
        ...

    def descend(self, network: str, loss: Callable[[], torch.Tensor], rate: float = 1.0) -> float:
        """The same with a loss of batches that were drawn before, at `rate` times the learning rate."""
        ...

    def random(self) -> AbstractContextManager[None]:
        """Inside, as in every loss, torch's global random numbers are those of the update: for what is sampled outside
        of a loss. Not inside a loss."""
        ...

    def average(self, network: str) -> nn.Module:
        """The running average of a network that has one; it is updated after the update."""
        ...

    def note_losses(self, batch: Batch, losses: np.ndarray) -> None:
        """Tell the sampler how well each image of a batch is learned, float[b], for a `TaskMix` that follows it."""
        ...


class Algorithm(ABC):
    """The updates of one training run."""

    def __init__(self, policy: TrainablePolicy) -> None:
        self.policy = policy

    @property
    def networks(self) -> Mapping[str, TrainedNetwork]:
        """All that is trained, by name. The one called `POLICY` is what versions are made of; the same objects at each
        call."""
        return {POLICY: TrainedNetwork(self.policy.module)}

    @abstractmethod
    def update(self, step: UpdateStep) -> Metrics:
        """Learn from one draw or several. Raises `InvalidDataError` for a batch that cannot be learned from."""


@dataclass(frozen=True)
class AlgorithmConfig(ABC):
    """What is set of an algorithm. Subclasses are frozen dataclasses that need no torch."""

    name: ClassVar[str]
    """as recipes and commands call it"""
    policy_options: ClassVar[Mapping[str, object]] = {}
    """of --policy-config: what a recipe's own policy is made with for it, where that has a name"""
    policy_kind: ClassVar[str] = ""
    """which kind of policy a recipe's own becomes for it, of the same name, where that has one; '': it stays"""
    settings: ClassVar[tuple[str, ...]] = ()
    """of --set: what a recipe is set to for it, where nothing else is said"""
    on_ranks: ClassVar[bool] = True
    """whether several ranks can share its updates: all that it remembers is in the networks' weights"""

    @abstractmethod
    def needs(self) -> DataNeeds:
        """What it wants of the data."""

    def require_ranks(self, ranks: int) -> None:
        """Raise `ConfigError` where so many ranks cannot share its updates."""
        if ranks > 1 and not self.on_ranks:
            raise ConfigError(f"algorithm '{self.name}' trains on one rank: leave --ranks out.")

    @abstractmethod
    def make(self, policy: TrainablePolicy) -> Algorithm:
        """The algorithm for that policy. Raises `ConfigError` for a policy that has not what it takes."""
