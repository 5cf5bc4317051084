"""The outlook: how likely the policy succeeds from here by itself.

ThriftyDAgger (Hoque et al. 2021, arXiv 2109.08273) asks for help where a learned chance of success is low or where it
has seen nothing alike. Here several small networks, each learned from other halves of the data, say the first; where
they do not know they do not agree, and the lowest counts. They move nothing of the policy.
"""

from __future__ import annotations

import torch
from torch import nn

from policies.flow.config import FlowConfig
from policies.flow.networks.fast import Conditioning

MEMBERS = 4
"""networks that are asked"""


class Outlook(nn.Module):
    """Latent and state -> logits of the chance, by each member.

    Shapes: b images, k steps behind each image or none, z latent, ds state. All normalised.
    """

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        assert config.outlook is not None
        inputs, width = latent_width + config.state_dim, config.outlook
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
            for _ in range(MEMBERS)
        )

    def forward(self, given: Conditioning) -> torch.Tensor:
        """float32[MEMBERS, b, k] or [MEMBERS, b]"""
        latent, state = given.latent, given.state
        if state.dim() == 3:
            latent = latent[:, None].expand(-1, state.shape[1], -1)
        known = torch.cat([latent, state], -1)
        return torch.stack([member(known)[..., 0] for member in self.members]).float()
