"""The editor of chunks: a small network that changes what the flow gives, as a critic taught it to.

RL Token (2026, arXiv 2604.23073) has a small actor that is given the chunk of a large policy and answers with another
one near it; residual reinforcement learning (arXiv 1812.03201) adds to it. This one says two numbers for each number of
an action, by which all actions of a chunk are stretched and moved, within bounds, and at first neither:

    a' = (1 + gain) a + shift

so a chunk can be done faster or slower and a little to the side. To change each of its actions by itself would be many
more numbers than a critic of a few thousand chunks can be right about, and what is wrong in them is found and used.
On the robot, while it explores, it adds noise to what it says, so that there is something to learn from. It learns from
a critic alone (`cloud_learner.algorithms.chunk_edit`) and moves nothing of the policy.
"""

from __future__ import annotations

import torch
from torch import nn

from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning

LARGEST_GAIN, LARGEST_SHIFT = 0.8, 0.2
"""the shift of an action normalised to [-1, 1]"""


class ChunkEditor(nn.Module):
    """Latent, state and chunk -> the chunk as it is executed.

    Shapes: b images, k steps behind each image or none, z latent, ds state, H actions of da numbers. All normalised.
    """

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        assert config.editor is not None
        self._numbers = config.action_dim
        width, flat = config.editor, config.horizon * config.action_dim
        last = nn.Linear(width, 2 * config.action_dim)
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.zero_()
        inputs = latent_width + config.state_dim + flat
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), last)

    def forward(
        self,
        given: Conditioning,
        actions: torch.Tensor,
        decided: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float[b, k, H * da] or [b, H * da] of such actions, within [-1, 1].

        `decided`: float[b, H * da], how much of each is settled already, 1: it stays. `noise`: float[b, 2 * da], added
        to what is said before it is bounded.
        """
        latent = given.latent if actions.dim() == 2 else given.latent[:, None].expand(-1, actions.shape[1], -1)
        said = self.layers(torch.cat([latent, given.state, actions], -1))
        bounded = (said if noise is None else said + noise).tanh()[..., None, :]
        gain, shift = LARGEST_GAIN * bounded[..., : self._numbers], LARGEST_SHIFT * bounded[..., self._numbers :]
        change = (gain * actions.unflatten(-1, (-1, self._numbers)) + shift).flatten(-2)
        if decided is not None:
            change = change * (1 - decided)
        return (actions + change).clamp(-1, 1)
