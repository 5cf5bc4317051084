"""How one kind of lerobot policy is divided into a slow and a fast path.

A new kind needs a subclass of `PolicyPartition` and a line in `PARTITIONS`. Any other kind runs undivided, with the
pictures themselves as its latent (`whole.py`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from lerobot.policies.pretrained import PreTrainedPolicy

Tensors = dict[str, Any]
"""a batch by lerobot's names: tensors, and the list of strings `task`"""


@dataclass(frozen=True)
class Guide:
    """Actions that a chunk is steered towards (real-time chunking, arXiv 2506.07339)."""

    actions: torch.Tensor
    """float32[n, da], normalised, n <= H"""
    committed: int
    """the first so many will have been executed; the rest is leaned on less and less"""


class PolicyPartition(ABC):
    """One kind of lerobot policy, divided. Has no state of its own but what can be made again."""

    guided = False
    """whether `act` understands a guide"""
    draws = False
    """whether `act` draws random numbers beside `noise`: then it is not compiled"""
    think_reads_state = False
    """whether the state is among what the latent is made of"""
    lora_targets: tuple[str, ...] = ()
    """patterns of the Linear modules that get adapters unless the user names others"""

    def horizon(self, policy: PreTrainedPolicy) -> int:
        """H, the actions that `act` returns."""
        return int(policy.config.chunk_size)

    @abstractmethod
    def think(self, policy: PreTrainedPolicy, batch: Tensors) -> list[torch.Tensor]:
        """The latent: what only images and words decide.

        `batch` is preprocessed: one observation, images [1, 3, h, w] and `observation.state` [1, ds]. Called under
        `torch.no_grad`, as is `act`.
        """

    @abstractmethod
    def act(
        self,
        policy: PreTrainedPolicy,
        latent: list[torch.Tensor],
        batch: Tensors,
        noise: torch.Tensor | None,
        guide: Guide | None,
    ) -> torch.Tensor:
        """float32[1, H, da], normalised actions.

        `batch` is preprocessed and has the fresh `observation.state` [1, ds], no image and no words. A policy with
        n_obs_steps > 1 gets it as [1, n_obs_steps, ds], oldest first, and each tensor of the latent with such an axis
        after its first.
        `noise` has the shape that `noise_shape` says; any other randomness comes from torch's global generator,
        which the caller has seeded and puts back.
        """

    def noise_shape(self, policy: PreTrainedPolicy) -> tuple[int, ...] | None:
        """Of the normal noise that `act` begins with, None when it needs none."""
        return None

    def arrange(self, policy: PreTrainedPolicy, batch: Tensors) -> Tensors:
        """Last changes to a preprocessed training batch before `loss`."""
        return batch

    @abstractmethod
    def loss(self, policy: PreTrainedPolicy, batch: Tensors) -> torch.Tensor:
        """Scalar: lerobot's own loss of an arranged batch, as a mean over the actions that are kept."""

    def unreached(self, policy: PreTrainedPolicy) -> frozenset[str]:
        """Names of parameters that no loss reaches, whatever `requires_grad` says."""
        return frozenset()


PARTITIONS: dict[str, str] = {
    "act": "policies.lerobot.partitions.vision:ActPartition",
    "diffusion": "policies.lerobot.partitions.vision:DiffusionPartition",
    "smolvla": "policies.lerobot.partitions.smolvla:SmolVLAPartition",
    "pi0": "policies.lerobot.partitions.pi0:PI0Partition",
    "pi05": "policies.lerobot.partitions.pi0:PI05Partition",
}
"""by `type` in a checkpoint's config.json"""


def partition_of(kind: str) -> PolicyPartition:
    """The partition of a lerobot policy type."""
    module, _, name = PARTITIONS.get(kind, "policies.lerobot.partitions.whole:WholePartition").partition(":")
    partition: PolicyPartition = getattr(importlib.import_module(module), name)()
    return partition
