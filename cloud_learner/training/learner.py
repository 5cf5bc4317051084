"""One gradient step after another: loss, clipped AdamW, a running average of the weights.

A learner is deterministic: the same policy, settings, seed and batches give the same bytes, also when it was saved and
restored in between. It knows nothing of files, buffers or the network.

What is frozen is in memory once, shared by the weights and their average, and never in a checkpoint: only its hash is
(`policies.common.weights`). What a policy's `loss` needs of the module, such as training mode for dropout, it sets
itself; its random numbers are torch's, which follow from the seed and the number of the gradient step.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from cloud_learner.algorithms import hg_dagger
from cloud_learner.algorithms.hg_dagger import HGDagger
from policies.common.weights import base_sha256, trainable_state_dict
from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import InvalidDataError, PolicyError

_RESUME = (
    "Train with the recipe, --policy and --policy-config (its `training` options included) that made it, or start a "
    "fresh --data directory."
)


@dataclass(frozen=True)
class LearnerState:
    """All that a learner needs to go on as if it had never stopped."""

    tensors: dict[str, torch.Tensor]
    """weights, average and moments by name, on the CPU; of the weights those that training changes"""
    meta: dict[str, Any]
    """JSON: gradient steps, the seed and, if something is frozen, the hash of that"""


class Learner:
    """Trains `policy.module` in place and keeps the average that robots run."""

    def __init__(self, policy: TrainablePolicy, config: HGDagger, seed: int = 0) -> None:
        """Raises `PolicyError` for a network in which nothing can be trained."""
        self.policy = policy
        self.config = config
        self.gradient_steps = 0
        self.random_lock = threading.Lock()
        """held while torch's global random numbers are a step's: whoever draws of them in another thread holds it"""
        self._parameters = {n: p for n, p in policy.module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise PolicyError("every parameter of the network is frozen: choose what to train with `training`.")
        self._average = _ema_copy(policy.module)
        pairs = zip(self._average.parameters(), policy.module.parameters(), strict=True)
        # what is frozen is shared, not averaged
        apart = [(average, weight) for average, weight in pairs if average is not weight]
        self._averages: list[torch.Tensor] = [average for average, _ in apart]
        self._averaged: list[torch.Tensor] = [weight for _, weight in apart]
        self._buffers = list(zip(self._average.buffers(), policy.module.buffers(), strict=True))
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._device = next(iter(self._parameters.values())).device
        self._bfloat16 = config.bfloat16 and _has_bfloat16(self._device)
        self._seed = seed

    def step(self, batch: Batch) -> float:
        """One gradient step; its loss. Raises `InvalidDataError`, the weights unchanged, for one not finite."""
        self._optimizer.zero_grad()
        with self._step_random() as rng:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
                loss = hg_dagger.loss(self.policy, batch, self.config, rng)
            value = loss.item()
            if not math.isfinite(value):
                raise InvalidDataError(self._not_applied(f"the loss is {value}"))
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self.config.gradient_clip, foreach=True)
        if not math.isfinite(float(norm)):
            raise InvalidDataError(self._not_applied(f"the gradient's norm is {float(norm)} at a loss of {value}"))
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate(self.gradient_steps)
        self._optimizer.step()
        self.gradient_steps += 1
        self._update_average(self.config.decay(self.gradient_steps))
        return value

    def weights(self) -> bytes:
        """The averaged weights as a file that `Policy.load` accepts."""
        return self.policy.save(self._average)

    def snapshot(self) -> nn.Module:
        """A copy of the average, for `policy.save` in whatever thread; what is frozen is shared, not copied."""
        return _copy(self._average, [weight for weight in self.policy.module.parameters() if not weight.requires_grad])

    def state(self) -> LearnerState:
        """A copy of everything that changes; training may go on while it is written."""
        tensors = self._changing()
        for name, parameter in self._parameters.items():
            for key, moment in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = moment
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        meta: dict[str, Any] = {"gradient_steps": self.gradient_steps, "seed": self._seed}
        if base := base_sha256(self.policy.module):
            meta["base"] = base
        return LearnerState(copies, meta)

    def restore(self, state: LearnerState) -> None:
        """Go on from `state`.

        Raises `PolicyError`, with nothing changed, if it was taken from another network or on top of another base.
        """
        own = self._changing()
        for name, mine in own.items():
            theirs = state.tensors.get(name)
            if theirs is None or theirs.shape != mine.shape:
                found = "is missing" if theirs is None else f"has shape {list(theirs.shape)}"
                raise PolicyError(
                    f"the checkpoint is of another network: '{name}' {found}, expected {list(mine.shape)}. {_RESUME}"
                )
        extra = [n for n in state.tensors if n.startswith(("module/", "average/")) and n not in own]
        theirs_base, base = str(state.meta.get("base", "")), base_sha256(self.policy.module)
        if theirs_base != base:
            raise PolicyError(
                f"the checkpoint was trained on top of {_frozen(theirs_base)}, this policy has {_frozen(base)}: other "
                f"frozen weights, or adapters with another alpha / rank. {_RESUME}"
            )
        if extra:
            raise PolicyError(f"the checkpoint is of another network: it also has '{extra[0]}'. {_RESUME}")
        try:
            gradient_steps, seed = int(state.meta["gradient_steps"]), int(state.meta["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise PolicyError(f"the checkpoint cannot be restored: {error} is missing or not valid.") from error
        with torch.no_grad():
            for name, mine in own.items():
                mine.copy_(state.tensors[name])
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            suffix = f"/{name}"
            self._optimizer.state[parameter] = {
                key.removeprefix("optimizer/").removesuffix(suffix): _like(parameter, tensor)
                for key, tensor in state.tensors.items()
                if key.startswith("optimizer/") and key.endswith(suffix)
            }
        self.gradient_steps, self._seed = gradient_steps, seed

    def _changing(self) -> dict[str, torch.Tensor]:
        """All that training changes in the weights and in their average, by the names of a checkpoint."""
        tensors = {f"module/{name}": t for name, t in trainable_state_dict(self.policy.module).items()}
        return tensors | {f"average/{name}": t for name, t in trainable_state_dict(self._average).items()}

    @torch.no_grad()
    def _update_average(self, decay: float) -> None:
        torch._foreach_lerp_(self._averages, self._averaged, 1 - decay)
        for average, buffer in self._buffers:
            average.copy_(buffer)

    def _not_applied(self, reason: str) -> str:
        self._optimizer.zero_grad()
        return (
            f"gradient step {self.gradient_steps} was not applied: {reason}. Look for bad values in the newest data, "
            "or train with a smaller learning rate."
        )

    @contextmanager
    def _step_random(self) -> Iterator[np.random.Generator]:
        """This step's random numbers: the generator, and torch's global ones, which are given back after."""
        rng = np.random.default_rng((self._seed, self.gradient_steps))
        devices = [self._device] if self._device.type == "cuda" else []
        with self.random_lock, torch.random.fork_rng(devices=devices):
            torch.manual_seed(int(rng.integers(2**63)))
            yield rng


def _has_bfloat16(device: torch.device) -> bool:
    """Without its instructions bfloat16 is emulated, at a seventh of float32's speed.

    The processor must have them and oneDNN must use them: ONEDNN_MAX_CPU_ISA may forbid it to.
    """
    if device.type != "cpu":
        return True
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _ema_copy(module: nn.Module) -> nn.Module:
    """A copy to average into; what is frozen is the module's own, not a copy."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    return _copy(module, frozen).requires_grad_(False).eval()


def _copy(module: nn.Module, shared: list[nn.Parameter]) -> nn.Module:
    # deepcopy takes what its memo has for what was copied already
    return copy.deepcopy(module, {id(parameter): parameter for parameter in shared})


def _frozen(base: str) -> str:
    return f"a frozen base of sha256 {base[:12]}" if base else "nothing frozen"


def _like(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an optimiser's tensor where and laid out as the fused optimiser made it."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    moment = torch.empty_like(parameter, requires_grad=False, dtype=tensor.dtype)
    return moment.copy_(tensor)
