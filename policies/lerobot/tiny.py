"""Small checkpoints with random weights, built without a network connection: a SmolVLA and an ACT.

    build_tiny("smolvla", Path("tiny"), spec, ["open the drawer"])

The directory is what lerobot's `save_pretrained` and `lerobot-train` write: config.json, model.safetensors, both
processors and their statistics. A SmolVLA also has `vlm/`: the configuration of its vision-language model, a tokenizer
trained on the given instructions and an image processor, which a real checkpoint takes from the hub.

Such a policy knows nothing. It is there to be trained, and to try everything a large one goes through in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.interface.policy import NormalizationData
from policies.lerobot.options import require_lerobot
from wire.errors import ConfigError
from wire.types import RobotSpec

if TYPE_CHECKING:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy

_LARGEST_SIDE = 96
_HEADS, _KEY_HEADS = 4, 2
_VOCABULARY = 512
_WORDS = 24
_SPECIAL = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}
"""what transformers' SmolVLM processor asks a tokenizer for"""


@dataclass(frozen=True, slots=True)
class TinySize:
    """Of a SmolVLA, when its default of 1.3 M parameters is too much."""

    hidden: int = 128
    """width of the vision-language model, twice that of the action expert; a multiple of 8"""
    layers: int = 4
    vision_hidden: int = 96
    vision_layers: int = 2
    patch_px: int = 8
    scale: int = 2
    """so many patches in a row and in a column become one token"""


def build_tiny(
    kind: str,
    directory: Path,
    spec: RobotSpec,
    instructions: Sequence[str] = (),
    *,
    chunk: int = 16,
    seed: int = 0,
    examples: NormalizationData | None = None,
    size: TinySize = TinySize(),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint of lerobot's `kind` ("smolvla": 1.5 M parameters, "act": 11 M) for the robot `spec`.

    `instructions` are what the tokenizer is trained on; it can read any other text too, in more tokens. Statistics are
    those of `examples`, or without them bring the limits of `spec` to [-1, 1]. `changes` replaces fields of lerobot's
    own configuration. The same seed gives the same weights, and no global random stream moves. Returns `directory`.

    Raises `ConfigError` for another kind, a robot without camera or state, and a directory that is not empty.
    """
    require_lerobot()
    if kind not in ("act", "smolvla"):
        raise ConfigError(f"no tiny '{kind}' can be built; there are act, smolvla.")
    for what, count in (("camera", len(spec.cameras)), ("state dimension", spec.state_dim)):
        if not count:
            raise ConfigError(f"a tiny {kind} for robot '{spec.embodiment}': it has no {what}; lerobot wants one.")
    if chunk < 1:
        raise ConfigError(f"a tiny {kind} needs a chunk of at least 1 action, not {chunk}.")
    directory = Path(directory).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"'{directory}' exists and is no empty directory; name a new one for the checkpoint.")
    directory.mkdir(parents=True, exist_ok=True)
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if kind == "act":
            policy = _act(spec, chunk, dict(changes or {}))
        else:
            policy = _smolvla(directory, spec, instructions, chunk, size, dict(changes or {}))
    _save(policy, directory, spec, examples)
    return directory


def _smolvla(
    directory: Path, spec: RobotSpec, instructions: Sequence[str], chunk: int, size: TinySize, changes: dict[str, Any]
) -> PreTrainedPolicy:
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    step = size.patch_px * size.scale
    side = max(max(camera.height, camera.width) for camera in spec.cameras)
    side = step * -(-min(side, _LARGEST_SIDE) // step)
    _language_model(directory / "vlm", instructions, side, size)
    fields: dict[str, Any] = {
        **_features(spec, chunk),
        "vlm_model_name": str(directory / "vlm"),
        "load_vlm_weights": False,
        # lerobot freezes the vision-language model, which would leave random weights random
        "train_expert_only": False,
        "freeze_vision_encoder": False,
        "num_vlm_layers": 0,
        "expert_width_multiplier": 0.5,
        "max_state_dim": max(8, spec.state_dim),
        "max_action_dim": max(8, spec.action_dim),
        "resize_imgs_with_padding": (side, side),
        "tokenizer_max_length": _WORDS,
        "num_steps": 5,
        "optimizer_lr": 1e-3,
    }
    policy = SmolVLAPolicy(SmolVLAConfig(**fields | changes))
    _spread(policy.model.vlm_with_expert)
    return policy


def _act(spec: RobotSpec, chunk: int, changes: dict[str, Any]) -> PreTrainedPolicy:
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    fields: dict[str, Any] = {
        **_features(spec, chunk),
        "pretrained_backbone_weights": None,
        "dim_model": 64,
        "n_heads": 4,
        "dim_feedforward": 128,
        "n_encoder_layers": 2,
        "n_vae_encoder_layers": 1,
        "latent_dim": 8,
        "dropout": 0.0,
        "optimizer_lr": 3e-4,
        "optimizer_lr_backbone": 3e-4,
    }
    policy = ACTPolicy(ACTConfig(**fields | changes))
    _standardise(policy, max(camera.height for camera in spec.cameras), max(camera.width for camera in spec.cameras))
    return policy


def _features(spec: RobotSpec, chunk: int) -> dict[str, Any]:
    """What every lerobot configuration says of the robot."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {
        f"observation.images.{camera.name}": PolicyFeature(FeatureType.VISUAL, (3, camera.height, camera.width))
        for camera in spec.cameras
    }
    return {
        "input_features": inputs | {"observation.state": PolicyFeature(FeatureType.STATE, (spec.state_dim,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (spec.action_dim,))},
        "chunk_size": chunk,
        "n_action_steps": chunk,
        "device": "cpu",
        "push_to_hub": False,
    }


def _language_model(directory: Path, instructions: Sequence[str], side: int, size: TinySize) -> None:
    """Write what lerobot reads of a SmolVLM directory: configuration, tokenizer and image processor, no weights."""
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    words = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(instructions),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=_SPECIAL,
        model_max_length=2048,
    )
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    SmolVLMConfig(
        vision_config={
            "hidden_size": size.vision_hidden,
            "intermediate_size": 2 * size.vision_hidden,
            "num_hidden_layers": size.vision_layers,
            "num_attention_heads": 4,
            "image_size": side,
            "patch_size": size.patch_px,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": max(_VOCABULARY, len(words)),
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KEY_HEADS,
            "head_dim": size.hidden // _HEADS,
            "max_position_embeddings": 2048,
            **ids,
        },
        scale_factor=size.scale,
        image_token_id=words.convert_tokens_to_ids(_SPECIAL["image_token"]),
        pad_token_id=words.pad_token_id,
    ).save_pretrained(directory)
    edge = {"longest_edge": side}
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=edge, max_image_size=edge),
        words,
        SmolVLMVideoProcessor(size=edge, max_image_size=edge),
        image_seq_len=(side // size.patch_px // size.scale) ** 2,
    ).save_pretrained(directory)


def _tokenizer(instructions: Sequence[str]) -> Any:
    """Byte-level byte-pair tokens: every byte has one, so there is no unknown word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", "<bos>", "<eos>", *_SPECIAL.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words.train_from_iterator([f"{text.strip()}\n" for text in instructions], trainer)
    return words


def _spread(network: Any) -> None:
    """Random weights that learn: activations keep their size, and each patch knows where it is.

    transformers draws all with a deviation of 0.02, meant for widths of thousands: in a narrow network every token then
    looks at all others alike. Positions begin as sines and cosines of row and column (He et al. 2021, arXiv 2111.06377,
    appendix A.1).
    """
    import torch
    from torch import nn

    embeddings = network.get_vlm_model().vision_model.embeddings
    with torch.no_grad():
        for part in network.modules():
            if isinstance(part, (nn.Linear, nn.Conv2d)):
                part.weight.normal_(0.0, part.weight[0].numel() ** -0.5)
        positions = embeddings.position_embedding.weight
        side, quarter = math.isqrt(positions.shape[0]), positions.shape[1] // 4
        angles = torch.arange(side)[:, None] * 100.0 ** -(torch.arange(quarter) / quarter)
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
        positions[:, : 4 * quarter] = torch.cat([rows, columns], 2).flatten(0, 1)


def _standardise(policy: PreTrainedPolicy, height: int, width: int) -> None:
    """Give the frozen batch statistics of a random ResNet the values that smooth random images cause.

    lerobot's ACT never updates them; made for trained weights, they let random ones grow from layer to layer.
    """
    import torch
    from torchvision.ops.misc import FrozenBatchNorm2d

    def measure(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        layer.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        layer.running_var.copy_(inputs[0].var((0, 2, 3)) + 1e-3)

    backbone = policy.model.backbone
    hooks = [
        part.register_forward_pre_hook(measure) for part in backbone.modules() if isinstance(part, FrozenBatchNorm2d)
    ]
    coarse = torch.randn(32, 3, max(2, height // 8), max(2, width // 8))
    with torch.no_grad():
        backbone(torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear"))
    for hook in hooks:
        hook.remove()


def _save(policy: PreTrainedPolicy, directory: Path, spec: RobotSpec, examples: NormalizationData | None) -> None:
    from lerobot.policies.factory import make_pre_post_processors

    from policies.lerobot.statistics import of_examples, of_limits

    config: PreTrainedConfig = policy.config
    features = {**config.input_features, **config.output_features}
    found = of_limits(spec, features) if examples is None else of_examples(spec, features, examples)
    before, after = make_pre_post_processors(config, dataset_stats=found)
    policy.save_pretrained(directory)
    before.save_pretrained(directory)
    after.save_pretrained(directory)
