"""A vision-language model small enough for a test, as a directory like those that are published.

    directory = build(tmp_path / "vlm")

Random weights, a byte-level tokeniser trained on a few sentences, a processor; needs no network.
"""

from __future__ import annotations

from pathlib import Path

import torch

IMAGE, PATCH, SCALE = 32, 8, 2
"""16 patches of a picture, 4 tokens"""
_MARKS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}
_SENTENCES = ["open the drawer", "press the button", "go to the left side", "close it and wait"]


def build(out: Path, hidden: int = 32, layers: int = 2, weights: bool = True, seed: int = 0) -> Path:
    """Write a model of the SmolVLM family to `out` and return it."""
    from transformers import AutoModel, SmolVLMConfig, SmolVLMImageProcessor

    out.mkdir(parents=True, exist_ok=True)
    words = _tokenizer()
    words.save_pretrained(out)
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(words),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": hidden // 2,
            "max_position_embeddings": 512,
            "pad_token_id": words.pad_token_id,
        },
        scale_factor=SCALE,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=words.pad_token_id,
    )
    size = {"longest_edge": IMAGE}
    SmolVLMImageProcessor(size=size, max_image_size=size).save_pretrained(out)
    if not weights:
        config.save_pretrained(out)
        return out
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModel.from_config(config).save_pretrained(out)
    return out


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<bos>", "<eos>", *_MARKS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte is a token, so nothing is unknown
    )
    plain.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=_MARKS,
        model_max_length=512,
    )
