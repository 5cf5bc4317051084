"""Writes a policy back as a lerobot checkpoint, which lerobot's own `from_pretrained` and `lerobot-eval` read."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from policies.lerobot.checkpoint import LeRobotCheckpoint
from policies.lerobot.checkpoint_path import VLM
from policies.lerobot.policy import LeRobotPolicy
from policies.lerobot.statistics import ATTRIBUTE
from wire.errors import ConfigError, storage_error


def export(policy: LeRobotPolicy, directory: Path) -> Path:
    """Write config.json, model.safetensors (adapters merged) and both processors of `policy` into `directory`.

    The directory must be new or empty: nothing is overwritten. A vision-language model's own configuration and
    tokenizer go along, and what names them there is where they then are. Raises `ConfigError` for a directory that has
    something in it, `StorageError` for one that cannot be written.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"export: {directory} is not empty. Give a new directory, so that nothing is overwritten.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        own = policy.checkpoint.path / VLM
        if own.is_dir():
            shutil.copytree(own, directory / VLM)
        network = _merged(policy.module)
        network.config = _config(policy.checkpoint, directory)
        network.save_pretrained(directory)
        for processor in policy.processors:
            _with_tokenizer(processor, directory).save_pretrained(directory)
    except OSError as error:
        raise storage_error(error, "export", directory) from error
    return directory


def _merged(module: torch.nn.Module) -> Any:
    """A copy of lerobot's network as lerobot made it: without adapters, which are added to what they adapt."""
    network: Any = copy.deepcopy(module)
    delattr(network, ATTRIBUTE)
    for name, part in list(network.named_modules()):
        base = getattr(part, "base_layer", None)
        if base is not None and hasattr(part, "merge"):
            part.merge(safe_merge=True)
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, base)
    return network.to("cpu")


def _config(checkpoint: LeRobotCheckpoint, directory: Path) -> Any:
    config = copy.deepcopy(checkpoint.config)
    config.device, config.push_to_hub, config.use_peft = "cpu", False, False
    if (directory / VLM).is_dir() and hasattr(config, "vlm_model_name"):
        config.vlm_model_name = str((directory / VLM).resolve())
    return config


def _with_tokenizer(processor: Any, directory: Path) -> Any:
    """The processor, with a tokenizer that lies in the checkpoint named by its new place."""
    if not (directory / VLM).is_dir():
        return processor
    changed = copy.copy(processor)
    changed.steps = []
    for step in processor.steps:
        if isinstance(getattr(step, "tokenizer_name", None), str):
            step = copy.copy(step)
            step.tokenizer_name = str((directory / VLM).resolve())
        changed.steps.append(step)
    return changed
