"""Networks of real and of tiny sizes with random weights, written as the directories that policies are made from.

Nothing is downloaded: configurations and a tokenizer trained on the spot stand where a hub would be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wire.types import CameraSpec, CommandType, Dimension, RobotSpec

if TYPE_CHECKING:
    from lerobot.policies.pretrained import PreTrainedPolicy

TASK = "put the red cube into the box"
CHUNK = 16
_SPECIAL = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}


@dataclass(frozen=True, slots=True)
class Dims:
    """A vision-language model of the SmolVLM family."""

    vision_hidden: int
    vision_inner: int
    vision_layers: int
    vision_heads: int
    image_px: int
    patch_px: int
    scale: int
    """so many patches in a row and in a column become one token"""
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int


TINY = Dims(32, 64, 1, 2, 32, 8, 2, 64, 128, 2, 4, 2, 512)
SMOLVLM_500M = Dims(768, 3072, 12, 12, 512, 16, 4, 960, 2560, 32, 15, 5, 49280)
"""SmolVLM2-500M-Video-Instruct, of which SmolVLA takes the first 16 layers"""
THREE_B = Dims(1152, 4304, 27, 16, 384, 14, 3, 3072, 8192, 24, 24, 8, 49280)
"""the vision tower of SmolVLM2-2.2B before a text model as wide as Llama 3.2 3B"""


def arm(pixels: int = 96) -> RobotSpec:
    """Seven joints, 50 Hz, two cameras at 25 Hz."""
    joints = tuple(Dimension(f"joint_{i}", "rad", -3.0, 3.0) for i in range(7))
    moves = tuple(Dimension(f"joint_{i}", "rad", -3.0, 3.0, CommandType.absolute) for i in range(7))
    cameras = tuple(CameraSpec(name, pixels, pixels, 25.0) for name in ("front", "wrist"))
    return RobotSpec(f"arm-{pixels}", joints, moves, cameras, 50.0)


def blind() -> RobotSpec:
    """39 state numbers and no camera, as the `state` recipe has."""
    state = tuple(Dimension(f"x_{i}", "m", -1.0, 1.0) for i in range(39))
    action = tuple(Dimension(f"u_{i}", "1", -1.0, 1.0, CommandType.delta) for i in range(4))
    return RobotSpec("blind", state, action, (), 80.0)


def write_vlm(directory: Path, dims: Dims) -> Path:
    """Configuration, tokenizer and processor; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<bos>", "<eos>", *_SPECIAL.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words.train_from_iterator([f"{TASK}\n"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=_SPECIAL,
        model_max_length=2048,
    )
    ids = {f"{name}_token_id": getattr(fast, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    SmolVLMConfig(
        vision_config={
            "hidden_size": dims.vision_hidden,
            "intermediate_size": dims.vision_inner,
            "num_hidden_layers": dims.vision_layers,
            "num_attention_heads": dims.vision_heads,
            "image_size": dims.image_px,
            "patch_size": dims.patch_px,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": max(dims.vocabulary, len(fast)),
            "hidden_size": dims.hidden,
            "intermediate_size": dims.inner,
            "num_hidden_layers": dims.layers,
            "num_attention_heads": dims.heads,
            "num_key_value_heads": dims.key_heads,
            "head_dim": dims.hidden // dims.heads,
            "max_position_embeddings": 2048,
            **ids,
        },
        scale_factor=dims.scale,
        image_token_id=fast.convert_tokens_to_ids(_SPECIAL["image_token"]),
        pad_token_id=fast.pad_token_id,
    ).save_pretrained(directory)
    edge = {"longest_edge": dims.image_px}
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=edge, max_image_size=edge),
        fast,
        SmolVLMVideoProcessor(size=edge, max_image_size=edge),
        image_seq_len=(dims.image_px // dims.patch_px // dims.scale) ** 2,
    ).save_pretrained(directory)
    return directory


def write_checkpoint(kind: str, directory: Path, spec: RobotSpec) -> Path:
    """A checkpoint of lerobot's for `spec`, as `save_pretrained` writes it. `kind` is one of `KINDS`."""
    import torch
    from lerobot.policies.factory import make_pre_post_processors

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = KINDS[kind](directory, spec)
    before, after = make_pre_post_processors(policy.config, dataset_stats=_statistics(spec))
    for part in (policy, before, after):
        part.save_pretrained(directory)
    return directory


def _tiny_smolvla(directory: Path, spec: RobotSpec) -> PreTrainedPolicy:
    return _smolvla(directory, spec, TINY, TINY.layers, flow_steps=5)


def _smolvla_450m(directory: Path, spec: RobotSpec) -> PreTrainedPolicy:
    return _smolvla(directory, spec, SMOLVLM_500M, 16, flow_steps=10)


def _smolvla(directory: Path, spec: RobotSpec, dims: Dims, layers: int, flow_steps: int) -> PreTrainedPolicy:
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    fields: dict[str, Any] = {
        **_features(spec),
        "chunk_size": 50,
        "n_action_steps": 50,
        "vlm_model_name": str(write_vlm(directory / "vlm", dims)),
        "load_vlm_weights": False,
        "num_vlm_layers": layers,
        "resize_imgs_with_padding": (dims.image_px, dims.image_px),
        "num_steps": flow_steps,
    }
    return SmolVLAPolicy(SmolVLAConfig(**fields))


def _act(directory: Path, spec: RobotSpec) -> PreTrainedPolicy:
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    return ACTPolicy(ACTConfig(**_features(spec), pretrained_backbone_weights=None))


def _small_act(directory: Path, spec: RobotSpec) -> PreTrainedPolicy:
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    sizes: dict[str, Any] = {"dim_model": 64, "n_heads": 4, "dim_feedforward": 128, "latent_dim": 8}
    layers: dict[str, Any] = {"n_encoder_layers": 2, "n_vae_encoder_layers": 1, "chunk_size": CHUNK}
    fields = {**_features(spec), **sizes, **layers, "n_action_steps": CHUNK, "pretrained_backbone_weights": None}
    return ACTPolicy(ACTConfig(**fields))


def _diffusion(directory: Path, spec: RobotSpec) -> PreTrainedPolicy:
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    config = DiffusionConfig(**_features(spec), down_dims=(64, 128, 256), crop_shape=None, num_inference_steps=10)
    return DiffusionPolicy(config)


KINDS: dict[str, Callable[[Path, RobotSpec], PreTrainedPolicy]] = {
    "smolvla-tiny": _tiny_smolvla,
    "smolvla-450m": _smolvla_450m,
    "act": _act,
    "act-small": _small_act,
    "diffusion-small": _diffusion,
}


def _features(spec: RobotSpec) -> dict[str, Any]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    cameras = {
        f"observation.images.{camera.name}": PolicyFeature(FeatureType.VISUAL, (3, camera.height, camera.width))
        for camera in spec.cameras
    }
    return {
        "input_features": cameras | {"observation.state": PolicyFeature(FeatureType.STATE, (spec.state_dim,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (spec.action_dim,))},
        "device": "cpu",
        "push_to_hub": False,
    }


def _statistics(spec: RobotSpec) -> dict[str, dict[str, Any]]:
    import torch

    limits = {"action": (spec.action_low(), spec.action_high())}
    low, high = (np.array([getattr(one, side) for one in spec.state], np.float32) for side in ("low", "high"))
    limits["observation.state"] = low, high
    found = {}
    for name, (low, high) in limits.items():
        values = {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 2}
        found[name] = {key: torch.from_numpy(value) for key, value in values.items()}
    pixels = {"min": 0.0, "max": 1.0, "mean": 0.5, "std": 0.25}
    for camera in spec.cameras:
        found[f"observation.images.{camera.name}"] = {k: torch.full((3, 1, 1), v) for k, v in pixels.items()}
    return found
