"""The noise a chunk is made from: drawn anew for each chunk from a seed that the chunk names."""

from __future__ import annotations

import torch


def draw_seed(seeds: torch.Generator) -> int:
    """The next seed, never 0: that says that there is none."""
    return int(torch.randint(1, 2**31, (), generator=seeds))


def seeded(seed: int) -> torch.Generator:
    """What draws the noise of one chunk."""
    return torch.Generator().manual_seed(seed)
