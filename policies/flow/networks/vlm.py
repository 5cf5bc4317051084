"""The slow path as a pretrained vision-language model: its hidden states, pooled into latent tokens.

Shapes: b images, z latent, L words, S pixels of the square it sees, t tokens of one picture, hidden width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from policies.flow.config import FlowConfig, Vlm
from policies.flow.networks.attention_pooler import AttentionPooler
from policies.flow.networks.backbone import preprocessing, require_backbone
from wire.errors import ConfigError

NO_WORD = -1
"""padding of instructions; any id of the vocabulary may be a word"""
LORA_TARGETS = ("slow.backbone.text.*.q_proj", "slow.backbone.text.*.v_proj")
"""where adapters go when nothing else is said"""
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Backbone(nn.Module):
    """Vision tower, connector and the first layers of the text model.

    Each picture stands between the tokens that the family was trained with for a single one; the instruction follows,
    so that its hidden states have seen the pictures. Padding comes last, where no causal attention looks back from.
    """

    mean: torch.Tensor
    std: torch.Tensor
    around: torch.Tensor

    def __init__(self, directory: Path | None, vlm: Vlm, random: bool = False) -> None:
        """`random`: random weights, the same on every machine, instead of those in `directory`.

        Raises `ConfigError` for a directory that is not the one `vlm` describes, or that cannot be read.
        """
        super().__init__()
        directory = require_backbone(directory, vlm, random)
        model = _model(directory, random)
        self.hidden: int = model.config.text_config.hidden_size
        self.size: int = model.config.vision_config.image_size
        """S"""
        self.vision, self.connector, self.text = model.vision_model, model.connector, model.text_model
        self.text.layers = self.text.layers[: vlm.layers]
        self.text.config.num_hidden_layers = vlm.layers
        mean, std = preprocessing(directory)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)
        known = tokenizer(directory)
        ids = [known.convert_tokens_to_ids(token) for token in (_AROUND, _GLOBAL)]
        if None in ids or known.unk_token_id in ids:
            raise ConfigError(
                f"{directory / 'tokenizer.json'}: no tokens {_AROUND} and {_GLOBAL}; use the tokenizer of this model."
            )
        self.register_buffer("around", torch.tensor(ids), persistent=False)
        if not vlm.train:
            self.requires_grad_(False)

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """one uint8[b, h, w, 3] per camera, int64[b, L] -> hidden [b, t', hidden], bool[b, t'] False at padding"""
        frozen = not any(parameter.requires_grad for parameter in self.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return self._forward(images, tokens)

    def _forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embed, b = self.text.get_input_embeddings(), len(tokens)
        squares = torch.stack([self.square(image) for image in images], 1).flatten(0, 1)
        seen = self.connector(self.vision(pixel_values=squares).last_hidden_state).unflatten(0, (b, len(images)))
        around = embed(self.around)
        before, after = around.expand(b, -1, -1), around[:1].expand(b, -1, -1)
        parts = []
        for camera in range(len(images)):
            parts += [before, seen[:, camera].to(before.dtype), after]
        pictures = torch.cat(parts, 1)
        states = torch.cat([pictures, embed(tokens.clamp_min(0))], 1)
        hidden = self.text(inputs_embeds=states, use_cache=False).last_hidden_state
        real = torch.cat([tokens.new_ones(pictures.shape[:2], dtype=torch.bool), tokens != NO_WORD], 1)
        return hidden, real

    def square(self, images: torch.Tensor) -> torch.Tensor:
        """uint8[b, h, w, 3] -> [b, 3, S, S]: its longer side brought to S, black to the right or below."""
        size, pixels = self.size, images.permute(0, 3, 1, 2).float() / 255
        height, width = pixels.shape[2:]
        scale = size / max(height, width)
        shape = max(1, round(height * scale)), max(1, round(width * scale))
        if shape != (height, width):
            pixels = F.interpolate(pixels, shape, mode="bilinear", align_corners=False, antialias=True)
        pixels = F.pad(pixels, (0, size - shape[1], 0, size - shape[0]))
        weight = self.vision.embeddings.patch_embedding.weight
        return ((pixels - self.mean.float()) / self.std.float()).to(weight.dtype)


class VlmSlowPath(nn.Module):
    """Images and words -> latent tokens: learned queries over a backbone's hidden states."""

    def __init__(self, config: FlowConfig, backbone: Backbone) -> None:
        super().__init__()
        assert config.pooler is not None
        self.backbone = backbone
        self.token = nn.Linear(backbone.hidden, config.pooler.inner)
        self.norm = nn.LayerNorm(backbone.hidden)
        self.pooler = AttentionPooler(config.pooler)
        self.width = self.pooler.width

    def forward(self, images: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """one uint8[b, h, w, 3] per camera, int64[b, L] -> float[b, z]"""
        hidden, real = self.backbone(images, tokens)
        return self.pooler(self.token(self.norm(hidden)), real)


def instruction_tokenizer(directory: Path, length: int) -> Callable[[str], np.ndarray]:
    """An instruction -> int64[length] ids of the backbone's vocabulary, `NO_WORD` behind the last."""
    known = tokenizer(directory)

    @functools.lru_cache(maxsize=4096)
    def read(instruction: str) -> np.ndarray:
        ids = known(f"{instruction.strip()}\n", add_special_tokens=False)["input_ids"][:length]
        return np.array([*ids, *[NO_WORD] * (length - len(ids))], np.int64)

    return read


def tokenizer(directory: Path) -> Any:
    """The tokenizer in `directory`. Raises `ConfigError` if it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers do
        raise ConfigError(f"{directory / 'tokenizer.json'}: cannot be read: {error}.") from error


def _model(directory: Path, random: bool) -> Any:
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if random:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(0)
                return AutoModel.from_config(config)
        model, told = AutoModel.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # the library raises whatever its parsers do
        raise ConfigError(f"{directory}: the vision-language model cannot be read: {error}.") from error
    if told["missing_keys"] or told["mismatched_keys"]:
        raise ConfigError(
            f"{directory}: its weights do not fit its config.json: missing {sorted(told['missing_keys'])[:5]}, of "
            f"another shape {sorted(told['mismatched_keys'])[:5]}. Copy both from the same model."
        )
    return model
