"""What an algorithm may ask of a policy beyond its imitation loss. Found by `isinstance`, which looks for the methods.

b images, k steps behind each, H actions of da numbers. Batches are those of `TrainablePolicy.loss`, grouped or flat.
`module`: another network of the same kind to ask, such as a frozen reference; None: the policy's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from policies.interface.policy import Batch
from wire.types import RobotSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from policies.common.embodiments import EmbodimentTable


@runtime_checkable
class Imitates(Protocol):
    """says its imitation loss sample by sample"""

    def sample_losses(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """float[b, k], differentiable: what `loss` is the mean of, where each sample counts by its kept actions.

        What a loss has beside them for the whole batch is in each. 0 and those for a sample that keeps none.
        """
        ...


@runtime_checkable
class Chunks(Protocol):
    """has a chunk's actions as numbers from -1 to 1"""

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """(H, da)"""
        ...

    def chunk_actions(self, batch: Batch) -> torch.Tensor:
        """float[b, k, H * da]: the batch's actions, normalised to [-1, 1]; where the mask keeps none, the last that it
        kept goes on."""
        ...


@runtime_checkable
class Flows(Chunks, Protocol):
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

    @property
    def feature_width(self) -> int:
        """w"""
        ...

    def features(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """float[b, k, w]: of images, instruction and state, as a critic may read them. Differentiable."""
        ...


@runtime_checkable
class Draws(Chunks, Protocol):
    """draws its actions from a distribution, and knows how probable each is"""

    def draw(
        self, features: torch.Tensor, noise: torch.Tensor, module: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(float[..., H * da] actions in [-1, 1], float[..., H * da] the logarithm of each number's density) for
        `Encodes.features` [..., w] and standard normal `noise` [..., H * da]; the numbers are independent.
        Differentiable in the features and the weights."""
        ...


@runtime_checkable
class Edits(Protocol):
    """changes the chunks that its flow gives by a network that a critic teaches"""

    @property
    def edits(self) -> bool:
        """Whether this one does, which is settled when it is made."""
        ...

    def edit(self, given: Any, actions: torch.Tensor, module: nn.Module | None = None) -> torch.Tensor:
        """float[b, k, H * da]: what is executed of the flow's actions [b, k, H * da], normalised to [-1, 1].
        `given`: as `Flows.conditioning` gives it. Differentiable in the weights."""
        ...


@runtime_checkable
class Explores(Protocol):
    """makes chunks by a flow with random steps, and says how probable they are"""

    @property
    def explores(self) -> str:
        """How this one does, which is settled when it is made; '' where it does not."""
        ...

    @property
    def trace_points(self) -> int:
        """P of the `FlowTrace` of its chunks"""
        ...

    def trace_log_probability(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """float32[b]: of a flat batch's `traces`, given where they began. Differentiable in the weights.

        What its own weights say is what `ActionChunk.log_prob` said, but for the rounding of float32.
        """
        ...

    def stop_exploring(self) -> None:
        """From now on `act` follows the flow alone and leaves no traces, as for a measurement."""
        ...


@runtime_checkable
class Foretells(Protocol):
    """says how likely it succeeds by itself"""

    @property
    def foretells(self) -> bool:
        """Whether this one does, which is settled when it is made: `ActionChunk.outlook`."""
        ...

    def foretell(self, batch: Batch, module: nn.Module | None = None) -> torch.Tensor:
        """float[m, b, k]: logits of that by each of m members. Differentiable in their weights alone."""
        ...


UNKNOWN, BAD, GOOD = range(3)
"""what a batch's `advantage` says of a sample"""


@runtime_checkable
class Advised(Protocol):
    """is told whether what it imitates was good, and acts as if it were"""

    @property
    def advised(self) -> bool:
        """Whether this one is, which is settled when it is made.

        Its `loss` then reads `advantage` int[b, k] or [b], UNKNOWN, BAD or GOOD, and hides it in a share of the
        samples, so that it can be guided from "not known" to "good".
        """
        ...


@runtime_checkable
class Joinable(Protocol):
    """lets robots of further shapes join while it learns

    Its `loss` takes batches of any of them, each of one alone, which `spec_hash` names; its `set_normalization` minds
    `NormalizationData.spec`. `networks`: others of its kind that are to be told as well, such as its average.
    """

    @property
    def embodiments(self) -> EmbodimentTable:
        """The robots that have joined."""
        ...

    def clear_embodiments(self) -> None:
        """As if no robot had joined, before anything is learned."""
        ...

    def restore_embodiments(self, table: EmbodimentTable, networks: Iterable[nn.Module] = ()) -> None:
        """Take the table that belongs to tensors which are restored by themselves. Raises `WeightsError`."""
        ...

    def add_embodiment(self, spec: RobotSpec, networks: Iterable[nn.Module] = (), *, ready: bool = True) -> None:
        """Let robots of `spec` join; they act by what is saved only once they are `ready`. Raises `ConfigError`."""
        ...

    def mark_ready(self, spec_hash: str, networks: Iterable[nn.Module] = ()) -> None:
        """They have learned enough to act."""
        ...


def require(policy: object, capability: type, who: str) -> None:
    """Raises `ConfigError` for a policy that does not offer `capability`: `who` needs it."""
    from wire.errors import ConfigError

    if not isinstance(policy, capability):
        raise ConfigError(
            f"{who} needs a policy that {capability.__doc__}; {type(policy).__name__} does not. Choose another "
            "--policy or another algorithm: docs/algorithms.md has which go together."
        )
