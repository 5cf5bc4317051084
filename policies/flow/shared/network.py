"""A flow network whose statistics, embedding and last layer are tables, with a row for each shape of robot.

As GR00T N1 (arXiv 2503.14734, section 2.1) has encoders and decoders of each embodiment around one network. What it
reads and answers are columns: those that a robot lacks are 0 on the way in and no part of the loss. A batch is of one
robot.

Shapes: b images, k steps behind each image, K rows, S state columns, A action columns, H actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from policies.common.embodiments import EmbodimentTable
from policies.common.normalizer import Normalizer
from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning, FastMLP
from policies.flow.networks.network import FlowNetwork
from policies.flow.networks.slow import ConvSlowPath, mean_word
from policies.flow.shared.config import SharedConfig

_FIRST_EMBEDDING = 0.02


class SharedFlowNetwork(FlowNetwork):
    """`FlowNetwork` of columns; states come normalised by the statistics of their robot's row."""

    mean: torch.Tensor
    std: torch.Tensor
    """[K, S] each"""
    config: SharedConfig
    fast: SharedFastMLP

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self.embodiments: EmbodimentTable = config.empty_table()
        """whose rows and columns are whose; a copy of the network has it as well"""
        self.register_buffer("mean", torch.zeros(config.capacity, config.state_dim))
        self.register_buffer("std", torch.ones(config.capacity, config.state_dim))

    @torch.no_grad()
    def join(self, table: EmbodimentTable) -> None:
        """Take `table`, which has one row more. The robot begins as the one that has the most in common with it, and so
        does a column that only it has, where that one has a dimension of the same name in another unit."""
        like, row = self.embodiments.nearest(table.rows[-1].spec), len(table.rows) - 1
        self.embodiments = table
        if like is None:
            return
        embedding, last, state = self.fast.embodiment.weight, self.fast.last, self.fast.state.weight
        for tensor in (embedding, last.weight, last.bias):
            tensor[row] = tensor[like]
        by_column = self.config.horizon, self.config.action_dim
        parts = [one.unflatten(0, by_column) for one in (last.weight[row], last.bias[row], self.fast.noisy.weight.t())]
        for column, source in table.begins_as("action").items():
            for part in parts:
                part[:, column] = part[:, source]
        for column, source in table.begins_as("state").items():
            state[:, column] = state[:, source]

    def _make_normalizer(self, config: FlowConfig) -> Normalizer:
        return _StateBound()

    def _make_slow(self, config: FlowConfig, vlm: Path | None, random_vlm: bool) -> ConvSlowPath:
        return _SlotSlowPath(config)

    def _make_fast(self, config: FlowConfig) -> SharedFastMLP:
        assert isinstance(config, SharedConfig)
        return SharedFastMLP(config, self.latent_width)


class _StateBound(Normalizer):
    """Of `Normalizer` the bound alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.online = False
        self.register_buffer("mean", torch.zeros(()), persistent=False)
        self.register_buffer("std", torch.ones(()), persistent=False)


class _SlotSlowPath(ConvSlowPath):
    """A camera that the robot has not, a picture of no rows, sees nothing."""

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        words = mean_word(self.words(tokens), tokens)
        none = words.new_zeros(len(words), (self.width - words.shape[1]) // max(1, len(self.encoders)))
        seen = [
            encoder(image, words) if image.shape[1] else none
            for encoder, image in zip(self.encoders, images, strict=True)
        ]
        return torch.cat([*seen, words], 1)


class RowLinear(nn.Module):
    """A Linear for each row of a table."""

    def __init__(self, rows: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(rows, outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(rows, outputs).uniform_(-bound, bound))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """[..., inputs], int64[] -> [..., outputs]"""
        return F.linear(x, self.weight[row], self.bias[row])


class _Prepared(NamedTuple):
    known: torch.Tensor
    """[steps, b, width]"""
    row: torch.Tensor


class SharedFastMLP(FastMLP):
    """The small fast path with an embedding of the robot in its first layer and a last layer of each robot."""

    def __init__(self, config: SharedConfig, latent_width: int) -> None:
        super().__init__(config, latent_width)
        self.head = nn.Sequential(*list(self.head)[:-1])
        self.last = RowLinear(config.capacity, config.width, config.horizon * config.action_dim)
        self.embodiment = nn.Embedding(config.capacity, config.width)
        nn.init.normal_(self.embodiment.weight, std=_FIRST_EMBEDDING)

    def forward(self, given: Conditioning, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """See `FastPath`."""
        return self.last(super().forward(given, noisy, time), _row(given))

    def prepare(self, given: Conditioning, steps: int) -> _Prepared:  # type: ignore[override]  # its own `step` reads it
        """See `FastPath`."""
        return _Prepared(super().prepare(given, steps), _row(given))

    def step(self, prepared: _Prepared, step: int, noisy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """See `FastPath`."""
        return self.last(super().step(prepared.known, step, noisy), prepared.row)

    def _with_options(self, fixed: torch.Tensor, given: Conditioning) -> torch.Tensor:
        return super()._with_options(fixed, given) + self.embodiment(_row(given)).to(fixed.dtype)


def _row(given: Conditioning) -> torch.Tensor:
    assert given.embodiment is not None
    return given.embodiment
