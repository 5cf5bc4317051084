"""Weights are taken whole: into the network that learns and the one that acts, and then both are looked at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from policies.common.int8 import Int8Linear
from policies.common.weights import Header, carried_parts, load_published, refresh, trainable_state_dict
from wire.errors import HalfLoadedError, WeightsError


def load_whole(
    module: nn.Module, acting: nn.Module, header: Header, tensors: Mapping[str, torch.Tensor], what: str = "weights"
) -> None:
    """`load_published` into `module`, and `refresh` of the network that acts, with a look at what lies there then.

    Raises what `load_published` does, when nothing was changed, and `HalfLoadedError` when the networks are neither
    the old nor the new ones.
    """
    try:
        load_published(module, header, tensors, what)
        refresh(acting, module)
        difference = find_difference(module, acting, tensors)
    except WeightsError:
        raise
    except Exception as error:
        raise HalfLoadedError(f"{what}: only a part of them was loaded: {error!r}. {_WAY_OUT}") from error
    if difference:
        raise HalfLoadedError(f"{what}: '{difference}' is not what the file says once it was loaded. {_WAY_OUT}")


_WAY_OUT = "Load them again; if it stays so, test this computer's memory."


@torch.no_grad()
def find_difference(module: nn.Module, acting: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """The first tensor of `module` that is not that of `tensors`, to the last bit, or of `acting` that is not what
    `policies.common.runtime.acting` makes of it; '' for none. What is frozen is not looked at."""
    for name, tensor in trainable_state_dict(module).items():
        if not _same(tensor, tensors[name].to(tensor.device)):
            return name
    for name, target, source in carried_parts(acting, module):
        if isinstance(target, Int8Linear):
            if not target.stands_for(source):
                return name
        elif not _same(target, source.to(target.dtype)):
            return name
    return ""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A buffer that does not travel may hold what is no number."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
