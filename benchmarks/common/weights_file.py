"""A weights file of any size, for those who measure what carries it and not what is in it."""

from __future__ import annotations

import numpy as np
import safetensors.numpy


def random_weights(size: int, seed: int | None = None) -> bytearray:
    """About `size` bytes that cannot be compressed; the last ones are of the tensor. `seed` None: others each time."""
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return bytearray(safetensors.numpy.save({"bytes": data}))
