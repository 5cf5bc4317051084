"""Tensors as one numpy array that crosses processes and comes back exactly: uint8[n], which describes itself."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from wire.errors import PolicyError

_ALIGNED = 64
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64)
}


class _Layout(msgspec.Struct, frozen=True):
    """What the bytes are."""

    maker: str
    """who alone can read them"""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """type and shape"""


def pack(tensors: list[torch.Tensor], maker: str) -> np.ndarray:
    """uint8[n]: the length of a description, the description in JSON, then each tensor at a multiple of 64 bytes."""
    layout = _Layout(maker, tuple((str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors))
    head = msgspec.json.encode(layout)
    begin = _up(8 + len(head))
    sizes = [t.numel() * t.element_size() for t in tensors]
    data = np.zeros(begin + sum(_up(size) for size in sizes), np.uint8)
    data[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    data[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    for tensor, size in zip(tensors, sizes, strict=True):
        if size:
            data[begin : begin + size] = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        begin += _up(size)
    return data


def unpack(data: np.ndarray, maker: str) -> list[torch.Tensor]:
    """What `pack` was given, on the CPU. Raises `PolicyError` for anything else, and for the latent of another."""
    if data.dtype != np.uint8 or data.ndim != 1 or len(data) < 8:
        raise PolicyError(
            f"a latent of {data.dtype}{list(data.shape)}; {maker} makes uint8[n]. Call its think() again."
        )
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        layout = msgspec.json.decode(data[8 : 8 + min(length, len(data))].tobytes(), type=_Layout)
    except msgspec.DecodeError as error:
        raise PolicyError(f"a latent that {maker} did not make: {error}. Call its think() again.") from error
    if layout.maker != maker:
        raise PolicyError(f"a latent of {layout.maker}; this is {maker}. Call its think() again.")
    begin, tensors = _up(8 + length), []
    for name, shape in layout.tensors:
        dtype = _TYPES.get(name)
        size = int(np.prod(shape)) * (dtype.itemsize if dtype is not None else 0)
        if dtype is None or min(shape, default=0) < 0 or begin + size > len(data):
            raise PolicyError(f"a latent of {maker} that is torn: {len(data)} bytes. Call its think() again.")
        raw = torch.from_numpy(data[begin : begin + size].copy())
        tensors.append(raw.view(dtype).reshape(shape))
        begin += _up(size)
    return tensors


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
