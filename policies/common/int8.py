"""Linear layers with weights of 8 bits, for acting on a CPU that is short of speed or memory bandwidth.

Weights are rounded symmetrically with one scale per output, w = s q with q in -127..127. On the CPU the inputs are
rounded as well, at run time, so that whole-number instructions (VNNI, or dot products on ARM) do the work: torch's own
dynamic kernels, or, for torch.compile, the same in operations it can fuse. Elsewhere only the weights are small.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

SMALLEST = 64
"""Layers with fewer inputs or outputs stay: they cost little time, and first and last ones much accuracy."""


class Int8Linear(nn.Module):
    """Stands in for a Linear layer. Not for training, and without a state_dict of its own."""

    packed: Any = None
    """weights and bias in the layout of torch's kernels, None where the plain tensors are used"""
    rounded: torch.Tensor
    """int8[in, out]"""
    scale: torch.Tensor
    """float32[out]"""
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, traced: bool = False) -> None:
        """`traced`: for torch.compile, which cannot look into torch's dynamic kernels."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._whole = linear.weight.device.type == "cpu"
        self._packs = self._whole and not traced
        if not self._packs:
            like = linear.weight
            self.register_buffer("rounded", like.new_empty(like.shape[::-1], dtype=torch.int8), persistent=False)
            self.register_buffer("scale", like.new_empty(len(like), dtype=torch.float32), persistent=False)
            bias = None if linear.bias is None else torch.empty_like(self.scale)
            self.register_buffer("bias", bias, persistent=False)
        self.quantize(linear)

    @torch.no_grad()
    def quantize(self, linear: nn.Linear) -> None:
        """Round the present weights of `linear`. In place, so that what was compiled or recorded stays valid."""
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp_min(1e-12)
        # a copy: the packed weights hold on to the tensor they are given
        bias = None if linear.bias is None else linear.bias.detach().float().clone()
        if self._packs:
            zeros = torch.zeros(len(scale), dtype=torch.int64)
            rounded = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(rounded, bias)
            return
        self.rounded.copy_((weight / scale[:, None]).round().t())
        self.scale.copy_(scale)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    @property
    def weight(self) -> torch.Tensor:
        """float32[out, in], for code that reads a layer's weight or its type. Its values are made anew at each use."""
        return _Unpacked(self) if self._packs else self.values()

    def values(self) -> torch.Tensor:
        """float32[out, in]: what the rounded weights stand for."""
        if self._packs:
            unpacked: torch.Tensor = torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
            return unpacked
        return self.rounded.t().float() * self.scale[:, None]

    def stands_for(self, linear: nn.Linear) -> bool:
        """Whether these are the rounded weights of `linear`."""
        other = Int8Linear(linear, traced=not self._packs)
        if self._packs:
            mine, theirs = (torch.ops.quantized.linear_unpack(one.packed)[1] for one in (self, other))
        else:
            mine, theirs = self.bias, other.bias
        same_bias = mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        return torch.equal(self.values(), other.values()) and same_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] of the same type as `x`. Gradients reach `x`, as guided sampling needs them."""
        if x.requires_grad and torch.is_grad_enabled():
            product: torch.Tensor = _Differentiable.apply(x, self)
            return product
        return self.product(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """What `forward` gives, without a gradient."""
        if self._packs:
            product: torch.Tensor = torch.ops.quantized.linear_dynamic(x.float(), self.packed, _narrow())
            return product.to(x.dtype)
        if not self._whole:
            product = F.linear(x, self.rounded.t().to(x.dtype)) * self.scale
        else:
            rows = x.float().reshape(-1, self.in_features)
            step = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            whole = torch._int_mm((rows / step).round().to(torch.int8), self.rounded)
            product = (whole.float() * step * self.scale).view(*x.shape[:-1], self.out_features)
        return (product if self.bias is None else product + self.bias).to(x.dtype)


class _Differentiable(torch.autograd.Function):
    """The product with the gradient of the layer it stands for: rounding counts as if it changed nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient.float() @ ctx.layer.values()).to(gradient.dtype), None


class _Unpacked(torch.Tensor):
    """The weight of a packed layer: type, shape and device are there at once, values when an operation needs them.

    Transformers are often written with `x.to(layer.weight.dtype)` before each layer.
    """

    layer: Int8Linear

    @staticmethod
    def __new__(cls, layer: Int8Linear) -> _Unpacked:
        shape = (layer.out_features, layer.in_features)
        made: _Unpacked = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda weight: weight.layer.values(), (args, kwargs or {}))
        return func(*args, **kwargs)


def to_int8(network: nn.Module, values: nn.Module, traced: bool = False) -> int:
    """Replace every plain Linear of `network` with `SMALLEST` or more inputs and outputs, in place; returns how many.

    `values` is built alike and has the weights to round. Subclasses of Linear stay: their owners reach into them.
    """
    # named_modules lists a shared layer once, so it is replaced at each of its places by the same stand-in
    made: dict[int, Int8Linear] = {}
    for name, parent in list(network.named_modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear and min(child.in_features, child.out_features) >= SMALLEST:
                if id(child) not in made:
                    source = values.get_submodule(f"{name}.{key}" if name else key)
                    assert isinstance(source, nn.Linear)
                    made[id(child)] = Int8Linear(source, traced)
                setattr(parent, key, made[id(child)])
    return len(made)


@cache
def _narrow() -> bool:
    """Whether inputs are rounded to 7 bits: x86 without VNNI overflows in between otherwise."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "flags\t" in flags and "vnni" not in flags
