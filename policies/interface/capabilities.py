"""What an algorithm may ask of a policy beyond its imitation loss. Found by `isinstance`, which looks for the methods.

b images, k steps behind each, H actions of da numbers. Batches are those of `TrainablePolicy.loss`, grouped or flat.
`module`: another network of the same kind to ask, such as a frozen reference; None: the policy's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from policies.interface.policy import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn


@runtime_checkable
class Imitates(Protocol):
    """says its imitation loss sample by sample"""

    def sample_losses(self, batch: Batch) -> torch.Tensor:
        """float[b, k], differentiable: what `loss` is the mean of, where each sample counts by its kept actions.

        What a loss has beside them for the whole batch is in each. 0 and those for a sample that keeps none.
        """
        ...


@runtime_checkable
class Flows(Protocol):
    """makes actions by a flow, whose velocity can be asked for"""

    def conditioning(self, batch: Batch, module: nn.Module | None = None) -> Any:
        """What the flow is given of a batch: for `velocity` alone."""
        ...

    def velocity(
        self, given: Any, actions: torch.Tensor, time: torch.Tensor, module: nn.Module | None = None
    ) -> torch.Tensor:
        """float[b, k, H * da]: d actions / d time at flow time [b, k, 1] in [0, 1), from noise at 0 to actions at 1;
        actions [b, k, H * da], normalised to [-1, 1]. Differentiable in the actions and the weights."""
        ...


@runtime_checkable
class Scores(Protocol):
    """says how probable actions are"""

    def log_probability(self, batch: Batch) -> torch.Tensor:
        """float[b, k]: of the batch's actions as the policy would choose them, differentiable."""
        ...


@runtime_checkable
class Encodes(Protocol):
    """has features of what it sees and feels"""

    def features(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """float[b, k, w]: of images, instruction and state, as a critic may read them. Differentiable."""
        ...


def require(policy: object, capability: type, who: str) -> None:
    """Raises `ConfigError` for a policy that does not offer `capability`: `who` needs it."""
    from wire.errors import ConfigError

    if not isinstance(policy, capability):
        raise ConfigError(
            f"{who} needs a policy that {capability.__doc__}; {type(policy).__name__} does not. Choose another "
            "--policy or another algorithm: docs/algorithms.md has which go together."
        )
