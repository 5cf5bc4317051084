"""`training.compile`: what a loss calls of a network goes through torch.compile (Ansel et al. 2024, "PyTorch 2").

A network's first loss runs as it is and shows what is called; from the second on that is compiled, in place: names of
parameters stay, and copies of the network, such as its average, are not compiled. A batch of another size is compiled
once more, then for any size. What cannot be traced in between, such as code on arrays, runs as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from policies.common.runtime import require_compiler
from wire.errors import ConfigError

SETTING = "training.compile"


class CompiledLoss:
    """Of one network: losses and gradients by compiled code."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """`name`: as the algorithm calls it. Raises `ConfigError` on a machine that cannot compile."""
        require_compiler(next(module.parameters()).device.type, SETTING)
        self._name, self._module = name, module
        self._parts: list[nn.Module] = []

    def compute(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`loss`, a scalar. Raises `ConfigError` for a network that cannot be compiled."""
        if self._parts:
            with self._explained():
                return loss()
        with _outermost_called(self._module) as called:
            value = loss()
        # a layer alone gains nothing by it
        self._parts = [one for one in called if one is self._module or any(True for _ in one.children())]
        if not self._parts:
            raise ConfigError(
                f"{SETTING}: the loss of {self._named} calls no module of it that could be compiled, but works on its "
                f"tensors or by `forward`. Leave {SETTING} out, or call the module itself."
            )
        for part in self._parts:
            # as `part.compile` does, which compiles no module of torch's own, such as a Sequential
            part._compiled_call_impl = torch.compile(_call_of(part), backend=_compile_graph)
        return value

    def backward(self, value: torch.Tensor) -> None:
        """Gradients of what `compute` gave, compiled too. Raises as it does."""
        with self._explained():
            value.backward()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:
            raise ConfigError(
                f"{SETTING}: {self._named} ({type(self._module).__name__}) cannot be compiled: {_told(error)} Leave "
                f"{SETTING} out."
            ) from error

    @property
    def _named(self) -> str:
        return f"network '{self._name}'"


def _call_of(part: nn.Module) -> Callable[..., Any]:
    """What a call of it does, as a function whose code is no other's: what is compiled hangs on the code, and there is
    a bound to how much, so that what changes at each step is not compiled for ever."""

    def call(*given: Any, **named: Any) -> Any:
        return part._call_impl(*given, **named)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    from torch._inductor import compile as compile_graph

    # random numbers are those of the same run without it
    found: Callable[..., Any] = compile_graph(graph, inputs, options={"fallback_random": True})
    return found


@contextlib.contextmanager
def _outermost_called(module: nn.Module) -> Iterator[list[nn.Module]]:
    """What is called inside of `module`, itself included, but by no other part of it; complete in the end."""
    inside = {id(one) for one in module.modules()}
    called: list[nn.Module] = []
    calls: list[nn.Module] = []

    def begin(part: nn.Module, _: Any) -> None:
        if id(part) in inside:
            if not calls and part not in called:
                called.append(part)
            calls.append(part)

    def end(part: nn.Module, *_: Any) -> None:
        if id(part) in inside:
            calls.pop()

    with contextlib.ExitStack() as held:
        held.callback(register_module_forward_pre_hook(begin).remove)
        held.callback(register_module_forward_hook(end, always_call=True).remove)
        yield called


def _told(error: Exception) -> str:
    """What it says, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # the first line of a compiler's failure says only that there is one
    text = " ".join(lines[: 1 + lines[0].endswith(":")])
    return text if text.endswith((".", "!", "?")) else f"{text}."
