"""The tiny SmolVLA as this project's fast/slow `Policy`, for `benchmarks.edge_latency`.

SmolVLA's image and word tokens do not attend to the state token, so their keys and values can be computed once per
frame: that is `think`. `act` adds the newest state and denoises the actions. Together they give the same actions as
lerobot's `predict_action_chunk`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.edge.arm import ACTION, LIT, arm_spec
from benchmarks.edge.denoise import Cache, Denoiser
from benchmarks.edge.vla import HEAD, light_sign, load, mark, touch_sign
from wire.errors import PolicyError, WeightsError
from wire.types import ActionChunk, Corrector, Latent, Observation, Prefix, Trained

if TYPE_CHECKING:
    from collections.abc import Mapping


class EdgeVla:
    """Keeps the `Policy` protocol."""

    def __init__(self, place: Path) -> None:
        """`place`: where `vla.build` wrote."""
        self.spec = arm_spec()
        self._policy, self._before, self._after = load(place)
        self._denoise = Denoiser(self._policy.model)
        self.horizon = self._policy.config.chunk_size
        self.version = 0

    def another(self) -> EdgeVla:
        """A copy with weights of its own."""
        twin = copy.copy(self)
        twin._policy = copy.deepcopy(self._policy)
        twin._denoise = Denoiser(twin._policy.model)
        return twin

    @property
    def trained(self) -> Trained:
        return Trained()

    @property
    def corrector(self) -> Corrector | None:
        return None

    def load(self, weights: bytes, version: int) -> None:
        """Raises `WeightsError` if `weights` is not a safetensors file with exactly this network's tensors."""
        import safetensors.torch
        from safetensors import SafetensorError

        try:
            tensors = safetensors.torch.load(weights)
        except SafetensorError as error:
            raise WeightsError(f"version {version} is no safetensors file: {error}") from error
        own = self._policy.state_dict()
        wrong = sorted(n for n in own.keys() | tensors.keys() if n not in own or _shape(tensors, n) != own[n].shape)
        # safetensors keeps one of several names of a shared tensor
        wrong = [name for name in wrong if name not in self._shared()]
        if wrong:
            raise WeightsError(f"version {version} is of another network: '{wrong[0]}' differs.")
        self._policy.load_state_dict(tensors, strict=False)
        self.version = version

    @torch.inference_mode()
    def think(self, observation: Observation) -> Latent:
        """Keys and values of both images and the instruction, float32[layers * 2 * n * kv + n + 1], flat."""
        batch = self._batch(observation)
        model = self._policy.model
        images, masks = self._policy.prepare_images(batch)
        state = self._policy.prepare_state(batch)
        words, word_mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        tokens, valid, attends = model.embed_prefix(images, masks, words, word_mask, state=state)
        n = tokens.shape[1] - 1
        tokens, valid = tokens[:, :n], valid[:, :n]
        assert not bool(attends[:, :n].any())
        _, cache = model.vlm_with_expert.forward(
            attention_mask=valid[:, None, :] & valid[:, :, None],
            position_ids=torch.cumsum(valid, 1) - 1,
            inputs_embeds=[tokens, None],
            use_cache=True,
            fill_kv_cache=True,
        )
        parts = [cache[i][what].flatten() for i in sorted(cache) for what in ("key_states", "value_states")]
        light = torch.tensor([light_sign(batch[HEAD + LIT])])
        data = torch.cat([*parts, valid[0].float(), light]).numpy()
        seen_ns = max(frame.time_ns for frame in observation.images.values())
        return Latent(data, seen_ns, self.version)

    @torch.inference_mode()
    def act(self, observation: Observation, latent: Latent, tick: int, prefix: Prefix | None = None) -> ActionChunk:
        """float32[H, 8] on the state of now and the newest latent."""
        if latent.version != self.version:
            raise PolicyError(f"the latent is of version {latent.version}, the policy of version {self.version}.")
        if prefix is not None:
            raise PolicyError("this checkpoint was not trained with prefixes; choose the strategy `aligned`.")
        cache, valid, light = self._unpack(torch.tensor(latent.data))
        state = torch.tensor(observation.state)[None]
        padded = self._policy.prepare_state({"observation.state": state})
        cache, valid = self._read_state(cache, valid, padded)
        actions = self._denoise(cache, valid, self._noise())[..., : len(ACTION)]
        actions = self._after(mark(actions, touch_sign(state), light))
        return ActionChunk(
            actions[0].numpy(), tick, self.spec.period_ns, self.version, observation.time_ns, latent.observed_ns
        )

    def _noise(self) -> torch.Tensor:
        return torch.randn(1, self.horizon, self._policy.config.max_action_dim)

    def _batch(self, observation: Observation) -> Mapping[str, torch.Tensor]:
        raw = {
            HEAD + name: torch.tensor(frame.image).permute(2, 0, 1).float() / 255
            for name, frame in observation.images.items()
        }
        return self._before({**raw, "observation.state": torch.tensor(observation.state), "task": observation.task})

    def _read_state(self, cache: Cache, valid: torch.Tensor, state: torch.Tensor) -> tuple[Cache, torch.Tensor]:
        """The cache with the state's token at its end, and the mask of valid tokens with it."""
        from lerobot.policies.smolvla.smolvlm_with_expert import apply_rope

        model = self._policy.model.vlm_with_expert
        text = model.get_vlm_model().text_model
        hidden = self._policy.model.state_proj(state)[:, None, :]
        position = valid.sum(1, keepdim=True)
        valid = torch.cat([valid, torch.ones(1, 1, dtype=torch.bool)], 1)
        longer: Cache = {}
        for i, layer in enumerate(text.layers):
            attention, width = layer.self_attn, layer.self_attn.head_dim
            x = layer.input_layernorm(hidden)
            query, key, value = (
                part(x).view(1, 1, -1, width) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys = torch.cat([cache[i]["key_states"], apply_rope(key, position)], 1)
            values = torch.cat([cache[i]["value_states"], value], 1)
            longer[i] = {"key_states": keys, "value_states": values}
            seen = model.eager_attention_forward(valid[:, None, :], 1, width, apply_rope(query, position), keys, values)
            hidden = hidden + attention.o_proj(seen)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return longer, valid

    def _unpack(self, data: torch.Tensor) -> tuple[Cache, torch.Tensor, float]:
        text = self._policy.model.vlm_with_expert.config.text_config
        layers = len(self._policy.model.vlm_with_expert.get_vlm_model().text_model.layers)
        each = text.num_key_value_heads * text.head_dim
        n = (len(data) - 1) // (layers * 2 * each + 1)
        parts = data[: layers * 2 * n * each].view(layers, 2, 1, n, text.num_key_value_heads, text.head_dim)
        cache = {i: {"key_states": parts[i, 0], "value_states": parts[i, 1]} for i in range(layers)}
        return cache, data[-n - 1 : -1][None] > 0.5, float(data[-1])

    def _shared(self) -> set[str]:
        """Names of tensors that are the same as one with another name."""
        own: dict[int, str] = {}
        return {
            name
            for name, tensor in self._policy.state_dict().items()
            if own.setdefault(tensor.data_ptr(), name) != name
        }


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
