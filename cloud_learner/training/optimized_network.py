"""A network with its optimiser and its running average: what of it changes, and how that is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from cloud_learner.algorithms.interface import POLICY, TrainedNetwork
from cloud_learner.training.compilation import CompiledLoss
from cloud_learner.training.config import TrainingConfig
from policies.common.weights import trainable_state_dict
from wire.errors import PolicyError

_REFERENCE = "reference"
"""in the names of a checkpoint"""


def is_optional(name: str) -> bool:
    """Whether a checkpoint goes on without what it has under that name, and the other way about."""
    return "/optimizer/" in name or f"/{_REFERENCE}/" in name


class OptimizedNetwork:
    """Clipped AdamW on what can be trained of it; what is frozen is shared with the average."""

    def __init__(self, name: str, network: TrainedNetwork, training: TrainingConfig) -> None:
        """Raises `PolicyError` for a network in which nothing can be trained, and `ConfigError` where the training
        compiles and this machine cannot."""
        self._name, self._network, self._training = name, network, training
        module = self._module = network.module
        if any(isinstance(one, nn.UninitializedParameter) for one in module.parameters()):
            raise PolicyError(
                f"network '{name}' has parameters whose shapes are not known yet, such as those of LazyLinear: build "
                "it with its widths (`Encodes.feature_width`)."
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise PolicyError(
                "every parameter of the network is frozen: choose what to train with `training`."
                if name == POLICY
                else f"every parameter of the network '{name}' is frozen."
            )
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._average: nn.Module | None = None
        if name == POLICY or network.average is not None:
            self._average = copy_sharing(module, frozen).requires_grad_(False).eval()
        self._shard(frozen)
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        drawn = name == POLICY and training.reference_pull > 0
        self._reference = {n: p.detach().clone() for n, p in self._parameters.items()} if drawn else {}
        """what the weights are drawn to, by the parameter's name"""
        if self._average is not None:
            pairs = zip(self._average.parameters(), module.parameters(), strict=True)
            # what is frozen is shared, not averaged
            apart = [(average, weight) for average, weight in pairs if average is not weight]
            self._averages = [self._local(average) for average, _ in apart]
            self._averaged = [self._local(weight) for _, weight in apart]
            self._buffers = list(zip(self._average.buffers(), module.buffers(), strict=True))
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=training.learning_rate * network.rate_scale,
            betas=training.betas,
            weight_decay=training.weight_decay,
            fused=True,
        )
        self._compiled = CompiledLoss(name, module) if training.compile else None

    def _shard(self, frozen: list[nn.Parameter]) -> None:
        """Before anything holds on to a parameter."""

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of it is here."""
        return tensor.detach()

    @property
    def device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    @property
    def average(self) -> nn.Module:
        """Its running average."""
        if self._average is None:
            raise PolicyError(f"network '{self._name}' has no running average: its algorithm asks for none.")
        return self._average

    def whole_average(self) -> nn.Module:
        """The average, to be read at once."""
        return self.average

    def copy_average(self) -> nn.Module:
        """A copy of it, on its device; what is frozen is shared."""
        return copy_sharing(self.average, [one for one in self._module.parameters() if not one.requires_grad])

    # --- one step -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget gradients."""
        self._optimizer.zero_grad()

    def compute(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`loss` of the network as it is; a scalar."""
        return loss()

    def compiled(self, loss: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The same, by compiled code if the training says so; then it raises `ConfigError` where that cannot be."""
        return loss if self._compiled is None else partial(self._compiled.compute, loss)

    def backward(self, value: torch.Tensor) -> None:
        """Add the gradient of what `compute` gave. Raises as what `compiled` gives."""
        if self._compiled is None:
            value.backward()
        else:
            self._compiled.backward(value)

    def clipped_norm(self) -> float:
        """The gradient's norm, before it was clipped."""
        most = self._training.gradient_clip
        return float(nn.utils.clip_grad_norm_(self._parameters.values(), most, foreach=True))

    def step(self, number: int, rate: float = 1.0) -> None:
        """Down the gradient, at `rate` times that of gradient step `number`."""
        rate *= self._training.rate(number) * self._network.rate_scale
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        if self._reference:
            self._draw_back(rate, number)

    @torch.no_grad()
    def _draw_back(self, rate: float, number: int) -> None:
        weights = [self._local(one) for one in self._parameters.values()]
        reference = [self._local(one) for one in self._reference.values()]
        torch._foreach_lerp_(weights, reference, min(1.0, rate * self._training.reference_pull))
        if (decay := self._training.decay_of_reference(number)) < 1:
            torch._foreach_lerp_(reference, weights, 1 - decay)

    @torch.no_grad()
    def update_average(self, steps: int) -> None:
        """After `steps` updates."""
        if self._average is None:
            return
        decay = self._training.decay(steps) if self._network.average is None else self._network.average
        torch._foreach_lerp_(self._averages, self._averaged, 1 - decay)
        for average, buffer in self._buffers:
            average.copy_(buffer)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def changing(self) -> dict[str, torch.Tensor]:
        """All that training changes in the weights and in their average, by the names of a checkpoint."""
        modules = {"module": self._module, "average": self._average}
        return {
            f"{self._name}/{kind}/{name}": tensor
            for kind, module in modules.items()
            if module is not None
            for name, tensor in trainable_state_dict(module).items()
        }

    def empty_like(self, sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        """Tensors for those of `sizes`, shape and type by the names of a checkpoint, that are like this network's."""
        own, prefix = self.changing(), f"{self._name}/optimizer/"
        for name in sizes:
            if name.startswith(prefix) and (parameter := self._parameters.get(name.split("/", 3)[-1])) is not None:
                own[name] = parameter.detach()
        own |= {f"{self._name}/{_REFERENCE}/{name}": one for name, one in self._reference.items()}
        return {
            name: torch.empty_like(mine, dtype=sizes[name][1])
            for name, mine in own.items()
            if name in sizes and sizes[name][0] == tuple(mine.shape)
        }

    def state(self) -> dict[str, torch.Tensor]:
        """The same, the optimiser's moments, and what the weights are drawn to."""
        tensors = self.changing()
        tensors |= {f"{self._name}/{_REFERENCE}/{name}": one for name, one in self._reference.items()}
        for name, parameter in self._parameters.items():
            for key, moment in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{self._name}/optimizer/{key}/{name}"] = moment
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What `state` gave, of a network of the same shape."""
        for name, mine in self.changing().items():
            mine.copy_(tensors[name])
        for name, one in self._reference.items():
            # none: this training is drawn back from here on
            one.copy_(tensors.get(f"{self._name}/{_REFERENCE}/{name}", self._parameters[name].detach()))
        self._optimizer.state.clear()
        prefix = f"{self._name}/optimizer/"
        for name, parameter in self._parameters.items():
            suffix = f"/{name}"
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix).removesuffix(suffix): _like(parameter, tensor)
                for key, tensor in tensors.items()
                if key.startswith(prefix) and key.endswith(suffix)
            }


def copy_sharing(module: nn.Module, shared: list[nn.Parameter]) -> nn.Module:
    """A copy that has the parameters `shared` in common with `module`."""
    # deepcopy takes what its memo has for what was copied already
    return copy.deepcopy(module, {id(parameter): parameter for parameter in shared})


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an optimiser's tensor where and laid out as the fused optimiser made it."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    moment = torch.empty_like(parameter, requires_grad=False, dtype=tensor.dtype)
    return moment.copy_(tensor)
