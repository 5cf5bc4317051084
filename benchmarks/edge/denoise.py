"""SmolVLA's flow steps for one robot, without computing again what does not change from step to step.

The same arithmetic as lerobot's `VLAFlowMatching.denoise_step` in a loop (the tests compare them): masks, rotations and
the keys and values of cross attention are made once per chunk. On a small network that is most of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

Cache = dict[int, dict[str, torch.Tensor]]
"""by layer: `key_states` and `value_states`, float32[1, n, heads, d]"""
_LONGEST_WAVE = 10_000.0


class Denoiser:
    """For a batch of one, with lerobot's default attention: cross, and self in every so-manieth layer."""

    def __init__(self, model: VLAFlowMatching) -> None:
        """Follows the weights of `model`."""
        from lerobot.policies.smolvla.modeling_smolvla import create_sinusoidal_pos_embedding

        config = model.config
        self._model = model
        self._layers = list(model.vlm_with_expert.lm_expert.layers)
        self._norm = model.vlm_with_expert.lm_expert.norm
        self._every = config.self_attn_every_n_layers
        self._heads_d = self._layers[0].self_attn.head_dim
        self._steps = config.num_steps
        times = torch.tensor([1.0 - step / self._steps for step in range(self._steps)])
        width = model.vlm_with_expert.expert_hidden_size
        self._times = create_sinusoidal_pos_embedding(
            times, width, config.min_period, config.max_period, device=times.device
        ).float()
        n = config.chunk_size
        self._causal = torch.ones(n, n, dtype=torch.bool).tril()
        self._first = self._rotation(0)
        self._rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, cache: Cache, valid: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """float32[1, H, da] from `noise` of that shape; `valid`: bool[1, n], which tokens of the cache count."""
        model = self._model
        offset = int(valid.sum())
        if offset not in self._rotations:
            self._rotations = {offset: self._rotation(offset)}
        here = self._rotations[offset]
        seen = valid.expand(noise.shape[1], -1)
        self_mask = torch.cat([seen, self._causal], 1)[None, None]
        cross_mask = seen[None, None]
        known = [self._known(i, layer.self_attn, cache[i]) for i, layer in enumerate(self._layers)]
        actions = noise
        for time in self._times:
            x = model.action_in_proj(actions)
            x = torch.cat([x, time.expand_as(x)], 2)
            x = model.action_time_mlp_out(silu(model.action_time_mlp_in(x)))
            for i, layer in enumerate(self._layers):
                attention, keys, values = layer.self_attn, *known[i]
                y = _normed(layer.input_layernorm, x)
                query = self._split(attention.q_proj(y))
                if self._own(i):
                    key = _rotated(self._split(attention.k_proj(y)), here)
                    keys = torch.cat([keys, key], 2)
                    values = torch.cat([values, self._split(attention.v_proj(y))], 2)
                    query, mask = _rotated(query, here), self_mask
                else:
                    query, mask = _rotated(query, self._first), cross_mask
                found = scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
                x = x + attention.o_proj(found.transpose(1, 2).flatten(2))
                x = x + layer.mlp(_normed(layer.post_attention_layernorm, x))
            velocity = model.action_out_proj(_normed(self._norm, x))
            actions = actions - velocity / self._steps
        return actions

    def _own(self, layer: int) -> bool:
        return self._every > 0 and layer % self._every == 0

    def _known(self, i: int, attention: Any, cache: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefix, float32[1, heads, n, d], as the expert's layer `i` uses them."""
        keys, values = cache["key_states"], cache["value_states"]
        if self._own(i):
            return keys.transpose(1, 2), values.transpose(1, 2)
        return self._split(attention.k_proj(keys.flatten(2))), self._split(attention.v_proj(values.flatten(2)))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[1, n, heads * d] to [1, heads, n, d]"""
        return x.unflatten(2, (-1, self._heads_d)).transpose(1, 2)

    def _rotation(self, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, float32[H, d / 2], of positions from `offset` on."""
        half = self._heads_d // 2
        scale = _LONGEST_WAVE ** (torch.arange(half) / half)
        angle = torch.arange(offset, offset + len(self._causal))[:, None] / scale
        return angle.cos(), angle.sin()


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
