"""PI0 and PI05, divided between their vision-language prefix and their action expert.

PI0 (Black et al. 2024, arXiv 2410.24164, section IV): the prefix is images and words, the suffix the state and the
noisy actions. `think` computes the keys and values of the prefix, `act` denoises with the newest state.

PI05 (arXiv 2504.16054) has no state in its suffix: its preprocessor writes the state, in 256 steps a dimension, into
the words, and images attend to words. So its state is as old as the thought, and a latent that has waited makes the
chunk of then; it has to think as often as it acts, or be asked for chunks through the delay, guided by what is decided.

lerobot 0.4.4 builds neither with the transformers of this project (see `Checkpoint.policy` for what it needs instead).
The methods used here, `embed_prefix`, `denoise_step` and the network's `forward`, are those of lerobot's own
`sample_actions` and the same in 0.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from policies.lerobot.partitions.partition import (
    DenoisingPartition,
    Latents,
    Network,
    Tensors,
    Velocity,
    flow_times,
    unread,
    words,
)

_STATE = "observation.state"


class _PIPartition(DenoisingPartition):
    """What both have in common. The latent: keys and values [layers, b, heads, tokens, width], and [b, tokens] 0/1."""

    _steps = "num_inference_steps"
    lora_targets: tuple[str, ...] = (
        "*gemma_expert.*.self_attn.q_proj",
        "*gemma_expert.*.self_attn.v_proj",
        "*action_in_proj",
        "*action_out_proj",
    )

    def think(self, policy: Network, batch: Tensors) -> Latents:
        """Keys and values of images and words."""
        model = policy.model
        network = model.paligemma_with_expert
        embedded, valid, _ = model.embed_prefix(*policy._preprocess_images(batch), *words(policy, batch))
        # every token of the prefix attends to all that are valid
        together = valid[:, None, :] & valid[:, :, None]
        # lerobot gives masks of its own, which other kinds of attention would not take
        network.paligemma.language_model.config._attn_implementation = "eager"
        _, cache = network.forward(
            attention_mask=model._prepare_attention_masks_4d(together),
            position_ids=valid.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        keys, values = zip(*_layers(cache), strict=True)
        return [torch.stack(keys), torch.stack(values), valid.float()]

    def _velocity(self, policy: Network, latent: Latents, batch: Tensors) -> Velocity:
        from transformers import DynamicCache

        keys, values, known = latent
        cache, valid = DynamicCache(), known > 0.5
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            cache.update(key, value, layer)
        fresh = self._fresh(policy, batch)

        def velocity(x: Tensor, time: float) -> Tensor:
            times = flow_times(x, time)
            moved: Tensor = policy.model.denoise_step(
                **fresh, prefix_pad_masks=valid, past_key_values=cache, x_t=x, timestep=times
            )
            return moved

        return velocity

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """Flow matching (arXiv 2410.24164, section IV), a mean over the actions that are not padded.

        The same as lerobot's `forward`, which would learn the padded ones too.
        """
        model = policy.model
        each = model.forward(
            *policy._preprocess_images(batch),
            *words(policy, batch),
            *self._fresh(policy, batch).values(),
            policy.prepare_action(batch),
        )[:, :, : policy.config.output_features["action"].shape[0]]
        if "action_is_pad" not in batch:
            return each.mean()
        kept = (~batch["action_is_pad"].bool()).to(each)[:, :, None]
        total: Tensor = (each * kept).sum()
        return total / (kept.sum() * each.shape[2]).clamp(min=1)

    def unreached(self, policy: Network) -> frozenset[str]:
        """Parameters that no loss reaches: those that only made the vision-language model's own next token."""
        names = [name for name, _ in policy.named_parameters()]
        heads = {name for name in names if ".lm_head." in name or ".language_model.norm." in name}
        below = ".language_model.layers."
        prefixes = {name.partition(below)[0] + below for name in names if below in name}
        last = len(policy.model.paligemma_with_expert.paligemma.language_model.layers) - 1
        return frozenset(heads.union(*(unread(names, prefix, last) for prefix in prefixes)))

    def _fresh(self, policy: Network, batch: Tensors) -> dict[str, Tensor]:
        """What `denoise_step` wants of the newest observation."""
        return {}


class PI0Partition(_PIPartition):
    """PI0: the newest state, with images and words of the latent."""

    lora_targets = (*_PIPartition.lora_targets, "*state_proj", "*action_time_mlp_in", "*action_time_mlp_out")

    def _fresh(self, policy: Network, batch: Tensors) -> dict[str, Tensor]:
        return {"state": policy.prepare_state(batch)}


class PI05Partition(_PIPartition):
    """PI05: images, words and the state of the latent."""

    think_reads_state = True
    lora_targets = (*_PIPartition.lora_targets, "*.time_mlp_in", "*.time_mlp_out")


def _layers(cache: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Keys and values [b, heads, tokens, width] of each layer, from the caches of transformers 4.53 to 5."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))
