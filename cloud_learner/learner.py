"""One gradient step after another: loss, clipped AdamW, a running average of the weights.

A learner is deterministic: the same policy, settings, seed and batches give the same bytes, also when it was saved and
restored in between. It knows nothing of files, buffers or the network.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cloud_learner.algorithms import hg_dagger
from cloud_learner.algorithms.hg_dagger import HGDagger
from policies.base import Batch, TrainablePolicy
from wire.errors import InvalidData, PolicyError


@dataclass(frozen=True)
class LearnerState:
    """All that a learner needs to go on as if it had never stopped."""

    tensors: dict[str, torch.Tensor]
    """weights, average, moments and random state by name, on the CPU"""
    meta: dict[str, Any]
    """JSON: gradient steps and the random state of the augmentation"""


class Learner:
    """Trains `policy.module` in place and keeps the average that robots run."""

    def __init__(self, policy: TrainablePolicy, config: HGDagger, seed: int = 0) -> None:
        self.policy = policy
        self.config = config
        self.gradient_steps = 0
        self._average = copy.deepcopy(policy.module).requires_grad_(False)
        self._parameters = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
        self._pairs = _Pairs(self._average, policy.module)
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._device = next(iter(self._parameters.values())).device
        self._bfloat16 = config.bfloat16 and _has_bfloat16(self._device)
        self._rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=self._cuda()):
            torch.manual_seed(seed)
            self._random = self._random_state()

    def step(self, batch: Batch) -> float:
        """One gradient step; its loss. Raises `InvalidData`, the weights unchanged, for one not finite."""
        self._optimizer.zero_grad()
        with self._own_random():
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
                loss = hg_dagger.loss(self.policy, batch, self.config, self._rng)
            value = loss.item()
            if not math.isfinite(value):
                raise InvalidData(self._refusal(f"the loss is {value}"))
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self.config.gradient_clip, foreach=True)
        if not math.isfinite(float(norm)):
            raise InvalidData(self._refusal(f"the gradient's norm is {float(norm)} at a loss of {value}"))
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate(self.gradient_steps)
        self._optimizer.step()
        self.gradient_steps += 1
        self._pairs.follow(self.config.decay(self.gradient_steps))
        return value

    def weights(self) -> bytes:
        """The averaged weights as a file that `Policy.load` accepts."""
        return self.policy.save(self._average)

    def state(self) -> LearnerState:
        """A copy of everything that changes; training may go on while it is written."""
        tensors = {f"module/{name}": t for name, t in self.policy.module.state_dict().items()}
        tensors |= {f"average/{name}": t for name, t in self._average.state_dict().items()}
        for name, parameter in self._parameters.items():
            for key, moment in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = moment
        tensors |= {f"random/{name}": t for name, t in self._random.items()}
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        meta = {"gradient_steps": self.gradient_steps, "augmentation": json.dumps(self._rng.bit_generator.state)}
        return LearnerState(copies, meta)

    def restore(self, state: LearnerState) -> None:
        """Go on from `state`. Raises `PolicyError`, with nothing changed, if it was taken from another network."""
        own = {f"module/{name}": t for name, t in self.policy.module.state_dict().items()}
        own |= {f"average/{name}": t for name, t in self._average.state_dict().items()}
        for name, mine in own.items():
            theirs = state.tensors.get(name)
            if theirs is None or theirs.shape != mine.shape:
                found = "is missing" if theirs is None else f"has shape {list(theirs.shape)}"
                raise PolicyError(
                    f"the checkpoint is of another network: '{name}' {found}, expected {list(mine.shape)}. "
                    "Train with the recipe that made it, or start a fresh --data directory."
                )
        extra = [n for n in state.tensors if n.startswith(("module/", "average/")) and n not in own]
        if extra:
            raise PolicyError(
                f"the checkpoint is of another network: it also has '{extra[0]}'. "
                "Train with the recipe that made it, or start a fresh --data directory."
            )
        try:
            gradient_steps = int(state.meta["gradient_steps"])
            augmentation = json.loads(state.meta["augmentation"])
            random = {name: state.tensors[f"random/{name}"] for name in self._random}
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"the checkpoint cannot be restored: {error} is missing or not valid.") from error
        _assign(self.policy.module, state.tensors, "module/")
        _assign(self._average, state.tensors, "average/")
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            suffix = f"/{name}"
            self._optimizer.state[parameter] = {
                key.removeprefix("optimizer/").removesuffix(suffix): _like(parameter, tensor)
                for key, tensor in state.tensors.items()
                if key.startswith("optimizer/") and key.endswith(suffix)
            }
        self._rng.bit_generator.state = augmentation
        self._random = random
        self.gradient_steps = gradient_steps

    def _refusal(self, reason: str) -> str:
        self._optimizer.zero_grad()
        return (
            f"gradient step {self.gradient_steps} was not applied: {reason}. Look for bad values in the newest data, "
            "or train with a smaller learning rate."
        )

    def _cuda(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else []

    def _random_state(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        for device in self._cuda():
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """The loss draws from torch's global generators; here they are this learner's, and given back after."""
        with torch.random.fork_rng(devices=self._cuda()):
            torch.set_rng_state(self._random["cpu"])
            for device in self._cuda():
                torch.cuda.set_rng_state(self._random["cuda"], device)
            try:
                yield
            finally:
                self._random = self._random_state()


def _has_bfloat16(device: torch.device) -> bool:
    """Without these instructions bfloat16 is emulated, and several times slower than float32."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return True


class _Pairs:
    """The tensors of the average and those they follow, listed once."""

    def __init__(self, average: nn.Module, module: nn.Module) -> None:
        self._average: list[torch.Tensor] = list(average.parameters())
        self._module: list[torch.Tensor] = list(module.parameters())
        self._buffers = list(zip(average.buffers(), module.buffers(), strict=True))

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        torch._foreach_lerp_(self._average, self._module, 1 - decay)
        for mine, theirs in self._buffers:
            mine.copy_(theirs)


def _assign(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str) -> None:
    module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an optimiser's tensor where and laid out as the fused optimiser made it."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    moment = torch.empty_like(parameter, requires_grad=False, dtype=tensor.dtype)
    return moment.copy_(tensor)
