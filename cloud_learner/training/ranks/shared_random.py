"""Random numbers of a batch that several ranks share: each draws those of all rows, and keeps its own's.

So noise, flow times and dropout of a row are the same however many ranks there are, without a word about ranks in a
policy. What a loss draws by other functions than those here is the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_OF_A_SIZE = (torch.rand, torch.randn)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like)
_FILLS = (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.random_)


class SharedRandom(TorchFunctionMode):
    """Of what has as many rows as this rank has of the batch, or a multiple: of each sample, of each of its tokens."""

    def __init__(self, rank: int, world: int, rows: int) -> None:
        """rows: that each rank has"""
        super().__init__()
        self._rank, self._world, self._rows = rank, world, rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("generator") is not None:
            # not of the update's own random numbers
            return func(*args, **given)
        if func in _OF_A_SIZE or func in (torch.randint, torch.normal):
            return self._of_a_size(func, args, given)
        if func in _LIKE and self._has_rows(args[0].shape):
            return self._own(func(self._whole(args[0]), *args[1:], **given))
        if func in _FILLS and self._has_rows(args[0].shape):
            return args[0].copy_(self._own(func(self._whole(args[0]), *args[1:], **given)))
        if func is functional.dropout and self._has_rows(args[0].shape):
            return self._dropout(args[0], *args[1:], **given)
        return func(*args, **given)

    def _of_a_size(self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Any:
        if "size" in given:
            before, size, args = args, given.pop("size"), ()
        elif func in _OF_A_SIZE:
            before, size = (), args if args and isinstance(args[0], int) else args[0]
        else:
            before, size = args[:-1], args[-1]
        if not isinstance(size, Sequence) or not self._has_rows(size):
            return func(*before, size, **given)
        return self._own(func(*before, (size[0] * self._world, *size[1:]), **given))

    def _dropout(self, values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or not p:
            return functional.dropout(values, p, training, inplace)
        kept = self._own(functional.dropout(torch.ones_like(self._whole(values)), p))
        return values.mul_(kept) if inplace else values * kept

    def _has_rows(self, size: Sequence[int]) -> bool:
        return len(size) > 0 and size[0] > 0 and size[0] % self._rows == 0

    def _whole(self, mine: torch.Tensor) -> torch.Tensor:
        """Memory for all ranks' rows; what is in it means nothing."""
        return mine.new_empty((mine.shape[0] * self._world, *mine.shape[1:]))

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        count = whole.shape[0] // self._world
        return whole[self._rank * count : (self._rank + 1) * count]
