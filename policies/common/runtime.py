"""Where and how a policy acts: device, number format, compiled or not, weights of 8 bits. What learns stays float32.

A policy keeps its network in float32 (`module`: that is trained, saved, averaged) and asks `acting` for the one it acts
with, which is the same object unless the runtime says otherwise. The pattern of a policy:

    self._acting = acting(self.module, runtime)                    # once; `load` then writes into `self.module`
    self._step = compiled(step, runtime)                           # once; step(network, tensors) -> tensors
    with torch.inference_mode(), runtime.autocast():               # in think and act
        actions = self._step(self._acting, ...).float()
    refresh(self._acting, self.module)                             # in load, when the module has its new values
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from wire.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Runtime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a policy acts. Every field but `device` is for acting alone; the measured effects are in
    docs/results/policies.md."""

    device: str = "cpu"
    """as torch names it: `cpu`, `cuda`, `cuda:1`; the trained network lies there as well"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the matrices; statistics, norms and sums stay float32"""
    compile: bool = False
    """torch.compile; on CUDA with CUDA graphs. The first call then takes from seconds to a minute"""
    int8: bool = False
    """weights of the larger Linear layers in 8 bits, one scale per output; on the CPU what they read as well"""

    def require(self) -> None:
        """Raise `ConfigError` if this machine cannot run so."""
        import torch

        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"runtime: unknown device '{self.device}'; use cpu, cuda or cuda:N.") from error
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if not count:
                raise ConfigError(
                    f"runtime: device '{self.device}', but torch {torch.__version__} sees no CUDA device here; use "
                    "device cpu, or install a torch with CUDA and the driver."
                )
            if (device.index or 0) >= count:
                raise ConfigError(f"runtime: device '{self.device}', but this machine has {count} CUDA device(s).")
        elif device.type != "cpu":
            raise ConfigError(f"runtime: device '{self.device}' is not supported; use cpu, cuda or cuda:N.")
        if self.compile:
            require_compiler(device.type, "runtime: compile")
        if self.int8 and device.type == "cpu" and torch.backends.quantized.engine == "none":
            raise ConfigError("runtime: int8 needs a torch with quantized CPU kernels; this build has none.")

    @property
    def plain(self) -> bool:
        """Whether what acts is what is trained."""
        return self.dtype == "float32" and not self.int8

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What `acting` networks run under: numbers that meet bfloat16 matrices are rounded, the others are not."""
        import torch

        if self.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


def acting(module: nn.Module, runtime: Runtime) -> nn.Module:
    """The network that acts: `module` itself when `runtime.plain`, otherwise a frozen copy of it in eval mode.

    `module` lies on the runtime's device already and is not changed. In the copy, parameters of two and more dimensions
    are in `runtime.dtype` and larger Linear layers in 8 bits; vectors (norms, biases) and buffers (statistics) stay as
    they are. Run it under `runtime.autocast()`, and bring it up to date with `policies.common.weights.refresh`.
    """
    if runtime.plain:
        return module
    import torch

    dtype = getattr(torch, runtime.dtype)
    # every tensor is copied once, in its new type, so that a large network never lies there twice in float32
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        matrix = parameter.is_floating_point() and parameter.ndim > 1
        value = parameter.detach().to(dtype if matrix else parameter.dtype, copy=True)
        copies[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    network: nn.Module = copy.deepcopy(module, copies)
    if runtime.int8:
        from policies.common.int8 import to_int8

        # from the float32 values: rounding twice would cost accuracy
        replaced = to_int8(network, module, traced=runtime.compile)
        if not replaced:
            log.warning("int8: %s has no Linear layer large enough to gain by it.", type(module).__name__)
    return network.eval()


def compiled(function: F, runtime: Runtime) -> F:
    """`function` through torch.compile if `runtime.compile`, otherwise `function` itself.

    Tensors in, tensors out, always of the same shapes: another shape is compiled anew. On CUDA its kernels are
    recorded as a graph and replayed in one launch; results are copied out of the graph's own memory, so they stay
    valid. One thread calls it, whichever. A function that cannot be compiled runs as it is from then on, and the log
    says why.
    """
    if not runtime.compile:
        return function
    import torch
    from torch._dynamo.exc import TorchDynamoException
    from torch.utils._pytree import tree_map_only

    graphs = torch.device(runtime.device).type == "cuda"
    fast = torch.compile(function, dynamic=False, mode="reduce-overhead" if graphs else None)
    chosen: list[Callable[..., Any]] = [fast]

    def call(*arguments: Any, **named: Any) -> Any:
        if chosen[0] is function:
            return function(*arguments, **named)
        if graphs:
            _own_graphs()
            torch.compiler.cudagraph_mark_step_begin()
        try:
            result = fast(*arguments, **named)
        except TorchDynamoException as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            log.warning("%s cannot be compiled and runs as it is: %s", name, str(error).strip().splitlines()[0])
            chosen[0] = function
            return function(*arguments, **named)
        return tree_map_only(torch.Tensor, torch.Tensor.clone, result) if graphs else result

    return call  # type: ignore[return-value]


def _own_graphs() -> None:
    """Give the calling thread its own CUDA graphs: torch prepares only the thread that imported it first for them."""
    from torch._inductor import cudagraph_trees

    if not hasattr(cudagraph_trees.local, "tree_manager_containers"):
        cudagraph_trees.local.tree_manager_containers = {}
        cudagraph_trees.local.tree_manager_locks = defaultdict(threading.Lock)


def require_compiler(device: str, setting: str) -> None:
    """Raise `ConfigError` where torch.compile, which `setting` asks for, has nothing to compile with on `device`."""
    if device == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(f"{setting} on CUDA needs the package triton; install it or set compile to false.")
        return
    named = os.environ.get("CXX", "")
    if not any(shutil.which(name) for name in (named, "g++", "c++", "clang++") if name):
        raise ConfigError(
            f"{setting} on the CPU needs a C++ compiler, and none is on the PATH; install g++ (Debian: "
            "apt-get install g++), name yours in CXX, or set compile to false."
        )
