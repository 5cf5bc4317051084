"""Tensors as one numpy array that crosses processes and comes back exactly: the uint8[n] of a safetensors file."""

from __future__ import annotations

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from wire.errors import PolicyError

_MAKER = "maker"
"""in the metadata: who alone can read the tensors"""


def pack(tensors: list[torch.Tensor], maker: str) -> np.ndarray:
    """uint8[n]: a safetensors file with the tensors by their number."""
    named = {str(number): tensor.detach().cpu().contiguous() for number, tensor in enumerate(tensors)}
    return np.frombuffer(safetensors.torch.save(named, {_MAKER: maker}), np.uint8)


def unpack(data: np.ndarray, maker: str) -> list[torch.Tensor]:
    """What `pack` was given, on the CPU. Raises `PolicyError` for anything else, and for the latent of another."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise PolicyError(
            f"a latent of {data.dtype}{list(data.shape)}; {maker} makes uint8[n]. Call its think() again."
        )
    file = data.tobytes()
    try:
        found = msgspec.json.decode(file[8 : 8 + int.from_bytes(file[:8], "little")])["__metadata__"][_MAKER]
        tensors = safetensors.torch.load(file) if found == maker else {}
    except (SafetensorError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"a latent that {maker} did not make, or torn: {error}. Call its think() again.") from error
    if found != maker:
        raise PolicyError(f"a latent of {found}; this is {maker}. Call its think() again.")
    return [tensors[str(number)] for number in range(len(tensors))]
