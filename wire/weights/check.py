"""What is looked at in a weights file before anybody is offered it; without torch, a slice at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wire.errors import WeightsError, storage_errors
from wire.weights.delta import WeightsLayout
from wire.weights.manifest import TensorEntry

_SLICE_BYTES = 4 * 1024 * 1024
_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def require_finite(path: Path, what: str) -> None:
    """Raise `WeightsError` naming the tensor for a file that is no weights or has a value that is not finite."""
    with storage_errors("weights file", path):
        # an empty file cannot be mapped
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if name := find_not_finite(data, what):
        raise WeightsError(f"{what}: '{name}' is not finite: training diverged. Go on from an earlier checkpoint.")


def find_not_finite(data: np.ndarray, what: str) -> str:
    """The first tensor of a weights file, uint8[size], with a value that is not finite; '' for none.

    Raises `WeightsError` for bytes that are no weights.
    """
    layout = WeightsLayout.of(data, what)
    for name, tensor in layout.header.tensors.items():
        begin, end = (layout.data_offset + at for at in tensor.data_offsets)
        for first in range(begin, end, _SLICE_BYTES):
            if not _finite(tensor.dtype, data[first : min(first + _SLICE_BYTES, end)]):
                return name
    return ""


def require_same_tensors(mine: tuple[TensorEntry, ...], parents: tuple[TensorEntry, ...], what: str) -> None:
    """Raise `WeightsError` with the first difference if a version has other tensors than its parent."""
    own, theirs = ({one.name: one for one in some} for some in (mine, parents))
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            here, there = (
                f"{one.dtype}{list(one.shape)}" if (one := some.get(name)) else "nothing" for some in (own, theirs)
            )
            raise WeightsError(
                f"{what}: '{name}' is {here}, in its parent {there}. A policy with other tensors is another fleet's: "
                "start it in a fresh --data directory."
            )


def _finite(dtype: str, data: np.ndarray) -> bool:
    if dtype == "BF16":
        return not bool(((data.view("<u2") & 0x7F80) == 0x7F80).any())
    kind = _FLOATS.get(dtype)
    return kind is None or bool(np.isfinite(data.view(kind)).all())
