"""A cap on what a network takes while it is built: sizes in a configuration from elsewhere are only a claim."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from wire.errors import ConfigError
from wire.untrusted import read_safetensors_header

_MAKERS = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye, torch.arange, torch.linspace)
)
_TIMES = 4
"""A network may take so many times its file: other number types, layers that are built and left out."""
_MORE_BYTES, _MORE_TENSORS = 1 << 30, 100_000


class AllocationCap(TorchFunctionMode):
    """Within it, each tensor that a layer makes is counted before it is made.

    Raises `ConfigError` once they are more, or have more bytes, than the weights of `file` account for; without a file,
    than this machine has memory for.
    """

    def __init__(self, file: Path | None, what: object) -> None:
        super().__init__()
        self._what, self._bytes, self._tensors = what, 0, 0
        if file is None:
            self._of = "this machine has memory for"
            self._most_bytes, self._most_tensors = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 10**6
            return
        size = file.stat().st_size
        with file.open("rb") as opened:
            held = len(read_safetensors_header(opened, size, file).tensors)
        self._of = f"{file.name} has weights for"
        self._most_bytes, self._most_tensors = _TIMES * size + _MORE_BYTES, _TIMES * held + _MORE_TENSORS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in _MAKERS and "out" not in named:
            self._bytes += func(*args, **(named | {"device": "meta", "pin_memory": False})).nbytes
            self._tensors += 1
            if self._bytes > self._most_bytes or self._tensors > self._most_tensors:
                raise ConfigError(
                    f"{self._what}: its sizes make a network of more than {self._bytes >> 20} MiB in {self._tensors} "
                    f"tensors, more than {self._of}. Copy the whole checkpoint again."
                )
        return func(*args, **named)
