"""The tiny SmolVLA that all edges of `benchmarks.edge_latency` run: lerobot's own class, random weights, no downloads.

A local directory holds what lerobot would fetch: a SmolVLM configuration, a tokenizer trained on the spot, and the
processor's files. lerobot is imported inside the functions, since it is an optional extra.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.edge_latency.arm import ACTION, CAMERAS, LAMP_PX, LIT, PX, STATE, TASK, arm_spec

if TYPE_CHECKING:
    import torch
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

CHUNK = 50
"""SmolVLA's own default"""
FLOW_STEPS = 5
_PATCH, _SCALE = 16, 2
_SPECIAL = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}
HEAD = "observation.images."


def offline() -> None:
    """One thread, and no look at the network. Before anything of lerobot is imported."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import torch

    torch.set_num_threads(1)


def build(place: Path, chunk: int = CHUNK) -> int:
    """Write the model directory `place/vlm`, the checkpoint `place/policy` and its weights as a learner publishes them,
    `place/version.safetensors`; returns the number of parameters."""
    offline()
    import torch
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    from policies.lerobot.factory import make

    torch.manual_seed(0)
    _write_vlm(place / "vlm")
    config = _config(place / "vlm", chunk)
    policy = SmolVLAPolicy(config)
    stats = {
        key: {"mean": torch.zeros(dims), "std": torch.ones(dims)}
        for key, dims in (("observation.state", len(STATE)), ("action", len(ACTION)))
    }
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    for part in (policy, before, after):
        part.save_pretrained(place / "policy")
    made = make(str(place / "policy"), {}, arm_spec(), 0)
    (place / "version.safetensors").write_bytes(made.save())
    return sum(parameter.numel() for parameter in policy.parameters())


def _config(vlm: Path, chunk: int) -> Any:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    cameras = {f"{HEAD}{name}": PolicyFeature(FeatureType.VISUAL, (3, PX, PX)) for name in CAMERAS}
    return SmolVLAConfig(
        input_features={**cameras, "observation.state": PolicyFeature(FeatureType.STATE, (len(STATE),))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (len(ACTION),))},
        vlm_model_name=str(vlm),
        load_vlm_weights=False,
        train_expert_only=False,
        freeze_vision_encoder=False,
        num_vlm_layers=4,
        num_expert_layers=-1,
        self_attn_every_n_layers=2,
        expert_width_multiplier=0.5,
        max_state_dim=8,
        max_action_dim=8,
        resize_imgs_with_padding=(PX, PX),
        tokenizer_max_length=24,
        chunk_size=chunk,
        n_action_steps=chunk,
        num_steps=FLOW_STEPS,
        device="cpu",
        push_to_hub=False,
    )


def _write_vlm(place: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    words = [TASK, *(f"{verb} the {what} {where}\n" for verb, what, where in _sentences())]
    named = ["<pad>", "<bos>", "<eos>", *_SPECIAL.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=512, special_tokens=named, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=_SPECIAL,
        model_max_length=2048,
    )
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": PX,
        "patch_size": _PATCH,
    }
    text = {
        "model_type": "llama",
        "vocab_size": max(512, len(fast)),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "pad_token_id": fast.pad_token_id,
        "bos_token_id": fast.bos_token_id,
        "eos_token_id": fast.eos_token_id,
    }
    image = fast.convert_tokens_to_ids("<image>")
    SmolVLMConfig(
        vision_config=vision,
        text_config=text,
        scale_factor=_SCALE,
        image_token_id=image,
        pad_token_id=fast.pad_token_id,
    ).save_pretrained(place)
    size = {"longest_edge": PX}
    SmolVLMProcessor(
        SmolVLMImageProcessor(size=size, max_image_size=size),
        fast,
        SmolVLMVideoProcessor(size=size, max_image_size=size),
        image_seq_len=(PX // _PATCH) ** 2 // _SCALE**2,
    ).save_pretrained(place)


def _sentences() -> list[tuple[str, str, str]]:
    return [
        (verb, f"{colour} {thing}", where)
        for verb in ("push", "pick up", "place", "move", "insert")
        for colour in ("red", "blue", "green", "gray")
        for thing in ("cube", "block", "peg")
        for where in ("to the target", "into the box", "to the left")
    ]


def marked() -> type[SmolVLAPolicy]:
    """lerobot's SmolVLA whose chunks say in their last two action dimensions what its observation showed.

    Random weights react to nothing one could recognise, so the answer is written over what they made, by the same code
    in every edge. Nothing else of the policy is changed.
    """
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    class Marked(SmolVLAPolicy):
        def _get_action_chunk(
            self, batch: dict[str, torch.Tensor], noise: torch.Tensor | None = None, **options: Any
        ) -> torch.Tensor:
            actions = super()._get_action_chunk(batch, noise, **options)
            return mark(actions, touch_sign(batch["observation.state"]), light_sign(batch[HEAD + LIT]))

    Marked.__name__ = SmolVLAPolicy.__name__
    return Marked


def touch_sign(state: torch.Tensor) -> float:
    """±1: what the touch sensor says in `state`, float32[1, ds]."""
    return 1.0 if float(state[0, -1]) > 0 else -1.0


def light_sign(image: torch.Tensor) -> float:
    """±1: whether the lamp is on in `image`, float32[1, 3, h, w] from 0 to 1."""
    return 1.0 if float(image[0, :, :LAMP_PX, :LAMP_PX].mean()) > 0.5 else -1.0


def mark(actions: torch.Tensor, touch: float, light: float) -> torch.Tensor:
    """`actions`, float32[1, H, da], with the answer in its last two dimensions."""
    actions[..., -2], actions[..., -1] = touch, light
    return actions


def load(place: Path) -> tuple[SmolVLAPolicy, Any, Any]:
    """(policy, its preprocessor, its postprocessor) of the checkpoint that `build` wrote."""
    offline()
    from lerobot.policies.factory import make_pre_post_processors

    policy = marked().from_pretrained(place / "policy")
    policy.eval()
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(place / "policy"))
    return policy, before, after
