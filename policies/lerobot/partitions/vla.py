"""Vision-language-action policies, divided between what looks and reads and what acts.

SmolVLA is divided where its attention already is (Shukor et al. 2025, arXiv 2506.01844, section 3.1). In lerobot the
prefix of its vision-language model is images, then words, then one token of the robot's state. Images and words attend
to each other only; the state attends to them; the action expert attends to all. So `think` computes the keys and values
of images and words in every layer, `act` sends the state alone through the layers against these, and denoises the
actions. The chunk is the one that `predict_action_chunk` makes, only that its images may be older than its state.

PI0 (Black et al. 2024, arXiv 2410.24164, section IV): the prefix is images and words, the suffix the state and the
noisy actions. `think` computes the keys and values of the prefix, `act` denoises with the newest state.

PI05 (arXiv 2504.16054) has no state in its suffix: its preprocessor writes the state, in 256 steps a dimension, into
the words, and images attend to words. So its state is as old as the thought, and a latent that has waited makes the
chunk of then; it has to think as often as it acts, or be asked for chunks through the delay, guided by what is decided.

lerobot 0.4.4 builds neither PI0 nor PI05 with the transformers of this project (see `LeRobotCheckpoint.policy` for what
it needs instead). The methods used here, `embed_prefix`, `denoise_step` and the network's `forward`, are those of
lerobot's own `sample_actions` and the same in 0.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from policies.lerobot.partitions.fused import FusedSmolVLA
from policies.lerobot.partitions.partition import (
    ACTION,
    PAD,
    STATE,
    DenoisingPartition,
    Guide,
    Latents,
    Network,
    Tensors,
    Velocity,
    flow_times,
    unread,
    words,
)
from wire.errors import PolicyError


class SmolVLAPartition(DenoisingPartition):
    """See the head of this file. The latent: keys and values [layers, b, tokens, heads, width], and [b, tokens] 0/1."""

    _steps = "num_steps"
    # what lerobot itself adapts: the expert's queries and values, and everything between robot and network
    lora_targets = (
        "*lm_expert.*.q_proj",
        "*lm_expert.*.v_proj",
        "*state_proj",
        "*action_in_proj",
        "*action_out_proj",
        "*action_time_mlp_in",
        "*action_time_mlp_out",
    )

    def __init__(self) -> None:
        self._fused: FusedSmolVLA | None = None

    def think(self, policy: Network, batch: Tensors) -> Latents:
        """Keys and values of images and words. Raises `PolicyError` for a checkpoint that keeps none (`use_cache`)."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        if not policy.config.use_cache:
            raise PolicyError(
                'a SmolVLA with "use_cache": false cannot make chunks, in lerobot neither; set it to true in the '
                "checkpoint's config.json."
            )
        model = policy.model
        images, seen = policy.prepare_images(batch)
        tokens, said = words(policy, batch)
        nothing = torch.zeros(len(tokens), policy.config.max_state_dim, device=tokens.device)
        embedded, valid, later = model.embed_prefix(
            images, seen, tokens, said, state=nothing.to(model.state_proj.weight.dtype)
        )
        # The only token that others do not attend to is the state. It comes last; what follows is padding.
        count = int(later[0].long().argmax())
        embedded, valid = embedded[:, :count], valid[:, :count]
        _, cache = model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(valid, later[:, :count]),
            position_ids=valid.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
            fill_kv_cache=True,
        )
        layers = range(len(cache))
        return [
            torch.stack([cache[layer]["key_states"] for layer in layers]),
            torch.stack([cache[layer]["value_states"] for layer in layers]),
            valid.float(),
        ]

    def act(
        self, policy: Network, latent: Latents, batch: Tensors, noise: Tensor | None, guide: Guide | None
    ) -> Tensor:
        """See `DenoisingPartition`; for an Aloha in the units of its joints."""
        actions = super().act(policy, latent, batch, noise, guide)
        return policy._pi_aloha_encode_actions(actions) if policy.config.adapt_to_pi_aloha else actions

    def arrange(self, policy: Network, batch: Tensors) -> Tensors:
        """lerobot 0.4.4 masks padded actions by a misspelt name, and changes an Aloha's tensors in place."""
        arranged = dict(batch)
        if PAD in batch:
            arranged["actions_id_pad"] = batch[PAD].bool()
        if policy.config.adapt_to_pi_aloha:
            arranged |= {name: batch[name].clone() for name in (STATE, ACTION)}
        return arranged

    def loss(self, policy: Network, batch: Tensors) -> Tensor:
        """Flow matching (arXiv 2506.01844, eq. 1), a mean over the actions that are not padded.

        lerobot's own is a mean over all, to which the padded ones bring 0. As there, the dimensions that all robots'
        actions are padded to are learned as well: denoising runs in them too.
        """
        loss: Tensor = policy(batch)[0]
        if (padded := batch.get("actions_id_pad")) is None:
            return loss
        return loss * padded.numel() / (~padded).sum().clamp(min=1)

    def unreached(self, policy: Network) -> frozenset[str]:
        """Parameters that no loss reaches: what only made the vision-language model's own next token.

        lerobot means to freeze them, but its names are those of another version of transformers.
        """
        network = policy.model.vlm_with_expert
        layers = network.get_model_layers([network.get_vlm_model().text_model, network.lm_expert])
        # the actions read keys and values of each layer that has an expert beside it, and nothing after
        last = max(index for index, expert in enumerate(layers[1]) if expert is not None)
        stem = "model.vlm_with_expert.vlm."
        names = [name for name, _ in policy.named_parameters()]
        heads = {name for name in names if name.startswith((f"{stem}lm_head.", f"{stem}model.text_model.norm."))}
        return frozenset(heads | unread(names, f"{stem}model.text_model.layers.", last))

    def _velocity(self, policy: Network, latent: Latents, batch: Tensors) -> Velocity:
        """In few operations where that is possible, otherwise as lerobot computes it."""
        model = policy.model
        # Where the robot is an Aloha, lerobot changes its state in place.
        state = policy.prepare_state(policy._prepare_batch({STATE: batch[STATE].clone()}))
        special = torch.compiler.is_compiling() or torch.is_autocast_enabled(state.device.type)
        if len(state) == 1 and not special:
            if self._fused is None or not self._fused.copies(model):
                self._fused = FusedSmolVLA(model) if FusedSmolVLA.is_compatible(model) else None
            if self._fused is not None:
                return self._fused.velocity(latent, state)
        cache, valid = _with_state(policy, latent, state)

        def velocity(x: Tensor, time: float) -> Tensor:
            moved: Tensor = model.denoise_step(valid, cache, x, flow_times(x, time))
            return moved

        return velocity


def _with_state(policy: Network, latent: Latents, state: Tensor) -> tuple[dict[int, dict[str, Tensor]], Tensor]:
    """The whole prefix as `denoise_step` wants it: keys and values of every layer, and bool[b, tokens + 1].

    One token through the layers of the vision-language model, as its `forward` does with all of them; that has no way
    of adding to what it remembers.
    """
    from lerobot.policies.smolvla.smolvlm_with_expert import apply_rope

    model = policy.model
    network = model.vlm_with_expert
    keys, values, known = latent
    valid = torch.nn.functional.pad(known > 0.5, (0, 1), value=True)
    position = valid.sum(1, keepdim=True) - 1
    attend = network.get_attention_interface()
    hidden = model.state_proj(state.to(model.state_proj.weight.dtype))[:, None]
    layers, cache = network.get_vlm_model().text_model.layers, {}
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        normed = layer.input_layernorm(hidden).to(layer.input_layernorm.weight.dtype)
        key = apply_rope(attention.k_proj(normed).view(shape), position)
        value = attention.v_proj(normed).view(shape)
        key = torch.cat([keys[index].to(key.dtype), key], dim=1)
        value = torch.cat([values[index].to(value.dtype), value], dim=1)
        cache[index] = {"key_states": key, "value_states": value}
        if index + 1 == len(layers):
            break  # what else it computes is for the next layer
        query = apply_rope(attention.q_proj(normed).view(shape), position)
        out = attend(valid[:, None], len(state), attention.head_dim, query, key, value)
        out = attention.o_proj(out)
        out += hidden  # in place, as lerobot does: the sum keeps the layer's own type
        hidden = layer.mlp(layer.post_attention_layernorm(out))
        hidden += out
    return cache, valid


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
        each = model(
            *policy._preprocess_images(batch),
            *words(policy, batch),
            *self._fresh(policy, batch).values(),
            policy.prepare_action(batch),
        )[:, :, : policy.config.output_features[ACTION].shape[0]]
        if PAD not in batch:
            return each.mean()
        kept = (~batch[PAD].bool()).to(each)[:, :, None]
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
