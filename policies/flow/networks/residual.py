"""The corrector of single actions, as it is trained; `policies.common.residual_policy` runs it on the robot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from policies.common.batches import count_kept
from policies.common.normalizer import Normalizer
from policies.common.residual_policy import TICKS_SCALE, input_width
from policies.flow.config import FlowConfig
from wire.types import ResidualPolicy

_FIRST_CORRECTION = 0.05
"""the last layer starts so small that an untrained corrector changes little"""


class Residual(nn.Module):
    """Newest state, latent, action, its index and the age -> what to add to the action.

    Shapes: b images, k steps behind each image, z latent, ds state, H actions of da numbers. All normalised.
    """

    def __init__(self, config: FlowConfig, latent_width: int) -> None:
        super().__init__()
        inputs = input_width(config.state_dim, latent_width, config.action_dim)
        width = config.residual_width
        last = nn.Linear(width, config.action_dim)
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.mul_(_FIRST_CORRECTION)
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), last)

    def forward(
        self, state: torch.Tensor, latent: torch.Tensor, action: torch.Tensor, index: torch.Tensor, age: torch.Tensor
    ) -> torch.Tensor:
        """[..., ds], [..., z], [..., da], [..., 1] and [..., 1] ticks -> [..., da]"""
        ticks = torch.cat([index, age], -1) * TICKS_SCALE
        return self.layers(torch.cat([state, latent, action, ticks], -1))

    def loss(
        self,
        latent: torch.Tensor,
        later: torch.Tensor,
        index: torch.Tensor,
        base: torch.Tensor,
        wanted: torch.Tensor,
        mask: torch.Tensor,
        age: torch.Tensor | None,
    ) -> torch.Tensor:
        """|r(s_i, z, a_i, i, age + i) - (a*_i - a_i)|^2, the mean over the steps whose action i the mask keeps.

        A2C2 (arXiv 2509.23224): a is what the policy chose from the older observation and a* what was
        right; both, and the latent, are given: only the corrector learns from this.

        latent: [b, z]; later: [b, k, ds], the state `index` int64[b, k] ticks into the window; base and wanted:
        [b, k, H, da]; mask: bool[b, k, H]; age: [b, k, 1] ticks at the window's first action, 0 when left out.
        """
        at = index[..., None]
        kept = mask.gather(2, at)
        pick = at[..., None].expand(-1, -1, -1, wanted.shape[-1])
        action, right = base.gather(2, pick)[:, :, 0].detach(), wanted.gather(2, pick)[:, :, 0]
        ticks = at.float()
        seen = latent.detach()[:, None].expand(-1, index.shape[1], -1)
        told = self(later, seen, action, ticks, ticks if age is None else ticks + age).float()
        errors = (told - (right - action)).square().where(kept, 0.0)
        return errors.sum() / count_kept(kept.sum() * action.shape[-1]).clamp_min(1)

    def export(self, normalizer: Normalizer, version: int) -> ResidualPolicy:
        """A copy that needs no torch."""
        linears = [_plain(layer) for layer in self.layers if not isinstance(layer, nn.SiLU)]

        def copied(tensor: torch.Tensor):
            return tensor.detach().float().cpu().numpy().copy()

        return ResidualPolicy(
            weights=tuple(copied(weight) for weight, _ in linears),
            biases=tuple(copied(bias) for _, bias in linears),
            mean=copied(normalizer.mean),
            std=copied(normalizer.std),
            version=version,
        )


def _plain(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, with what adapters beside the layer add to them."""
    if isinstance(layer, nn.Linear):
        return layer.weight, layer.bias
    added = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
    return layer.base_layer.weight + added, layer.base_layer.bias
