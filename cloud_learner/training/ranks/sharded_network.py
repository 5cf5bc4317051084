"""An `OptimizedNetwork` whose weights, average and moments lie on several ranks, a shard of each tensor on each.

By FSDP2 (`torch.distributed.fsdp.fully_shard`, after Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277): a loss
gathers the weights, and each rank gets the mean over all ranks of its shard's gradient. One group for the whole
network, for a policy's loss may call any part of it: while a loss is computed its weights are on each rank. What is
frozen is there all the time, as it is alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from cloud_learner.algorithms.interface import TrainedNetwork
from cloud_learner.training.config import TrainingConfig
from cloud_learner.training.optimized_network import OptimizedNetwork, copy_sharing
from cloud_learner.training.ranks.group import ProcessRanks, RankGroup
from wire.errors import ConfigError


def make_network(name: str, network: TrainedNetwork, training: TrainingConfig, group: RankGroup) -> OptimizedNetwork:
    """On the ranks of `group`. Raises as the classes do."""
    if isinstance(group, ProcessRanks):
        return ShardedNetwork(name, network, training, group)
    return OptimizedNetwork(name, network, training)


class ShardedNetwork(OptimizedNetwork):
    """All ranks call the same methods at the same time; what they return is alike but for shards."""

    def __init__(self, name: str, network: TrainedNetwork, training: TrainingConfig, group: ProcessRanks) -> None:
        """Every rank begins with the same weights.

        Raises `PolicyError` for a network in which nothing can be trained, and `ConfigError` for one whose trained
        weights are of several types.
        """
        self._group = group
        super().__init__(name, network, training)

    def _shard(self, frozen: list[nn.Parameter]) -> None:
        kinds = {str(one.dtype) for one in self._module.parameters() if one.requires_grad}
        if len(kinds) > 1:
            raise ConfigError(f"several ranks cannot share weights of {sorted(kinds)}: train with one.")
        for one in (*self._module.parameters(), *(self._average.parameters() if self._average is not None else ())):
            # FSDP shards nothing else, such as channels last
            one.data = one.data.contiguous()
        meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in self._module.parameters()}
        self._template = (
            copy.deepcopy(self._module, meta | {id(one): one for one in frozen}).requires_grad_(False).eval()
        )
        self._computed = self._sharded(self._module, frozen)
        self._kept = None if self._average is None else self._sharded(self._average, frozen)

    def _sharded(self, module: nn.Module, frozen: list[nn.Parameter]) -> _Computed:
        computed = _Computed(module)
        fully_shard(computed, mesh=self._group.mesh, reshard_after_forward=False, ignored_params=set(frozen))
        return computed

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()

    @property
    def device(self) -> torch.device:
        return self._local(next(iter(self._parameters.values()))).device

    @property
    def average(self) -> nn.Module:
        """Its running average, whole until the update ends."""
        average = super().average
        cast(FSDPModule, self._kept).unshard()
        return average

    def begin(self) -> None:
        # a loss that was given up has left the weights gathered
        cast(FSDPModule, self._computed).reshard()
        super().begin()

    def compute(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        value: torch.Tensor = self._computed(loss)
        return value

    def clipped_norm(self) -> float:
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._training.gradient_clip, foreach=True)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update_average(self, steps: int) -> None:
        if self._kept is not None:
            cast(FSDPModule, self._kept).reshard()
        super().update_average(steps)

    def whole_average(self) -> nn.Module:
        return self.copy_average()

    def copy_average(self) -> nn.Module:
        """Of all ranks' shards, on each rank."""
        average = super().average
        cast(FSDPModule, self._kept).reshard()
        frozen = [one for one in self._module.parameters() if not one.requires_grad]
        whole = copy_sharing(self._template, frozen)
        for name, parameter in average.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                path, _, leaf = name.rpartition(".")
                # under the same name in the copy, which has nothing there yet
                setattr(whole.get_submodule(path), leaf, nn.Parameter(parameter.full_tensor(), requires_grad=False))
        for mine, buffer in zip(whole.buffers(), average.buffers(), strict=True):
            mine.copy_(buffer)
        return whole


class _Computed(nn.Module):
    """What FSDP sees: a loss as its forward pass, whatever parts of the network it calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        return loss()
