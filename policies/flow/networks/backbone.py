"""What a directory of a vision-language model says of itself. Reads files alone: neither torch nor transformers.

The directory is one of Hugging Face's SmolVLM family, as `save_pretrained` of model and processor writes it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from policies.common.untrusted import require_model_directory
from policies.flow.config import Vlm
from wire.errors import ConfigError
from wire.untrusted import MAX_JSON_BYTES, parse_json, read_file

FAMILY = ("smolvlm", "idefics3")
"""`model_type` of the directories that can be read"""
DESCRIBING = ("config.json", "tokenizer.json", "preprocessor_config.json")
"""what must be there beside the weights, and is in the fingerprint"""
_WRITE = "Write it with `save_pretrained(DIRECTORY)` of the model and of its processor."


def describe(directory: Path | str, layers: int = 0, words: int = 48, train: bool = False) -> Vlm:
    """The configuration of the backbone in `directory`, with the first `layers` of its text model (0: all).

    Raises `ConfigError` that names the file for anything missing or of another family.
    """
    directory = Path(directory)
    config = _read(directory, "config.json")
    if config.get("model_type") not in FAMILY:
        raise ConfigError(
            f"{directory / 'config.json'}: model_type '{config.get('model_type')}'; a slow path can be one of the "
            f"SmolVLM family: {', '.join(FAMILY)}."
        )
    try:
        # what is left out has the default of the configuration's class
        there = int((config.get("text_config") or {}).get("num_hidden_layers", 32))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{directory / 'config.json'}: its sizes cannot be read: {error}. {_WRITE}") from error
    if layers < 0 or layers > there:
        raise ConfigError(f"flow policy: {layers} layers of the text model in {directory}, which has {there}; 0: all.")
    return Vlm(fingerprint(directory), layers or there, words, train)


def fingerprint(directory: Path) -> str:
    """sha256 over the files of `DESCRIBING`. Raises `ConfigError` naming one that is missing."""
    digest = hashlib.sha256()
    for name in DESCRIBING:
        digest.update(f"{name}\n".encode())
        digest.update(_bytes(directory, name))
    return digest.hexdigest()


def require_backbone(directory: Path | None, vlm: Vlm, random: bool = False) -> Path:
    """`directory`, if it is the one that `vlm` was described from. Raises `ConfigError` that says what else it is, and
    as `require_model_directory` does.

    `random`: its weights are not wanted, so they may be missing.
    """
    if directory is None:
        raise ConfigError(
            "flow policy: this network has a vision-language backbone; say where it lies on this machine (`vlm`)."
        )
    directory = Path(directory)
    found = fingerprint(directory)
    if found != vlm.fingerprint:
        raise ConfigError(
            f"flow policy: the backbone in {directory} has fingerprint {found[:12]}, this network was made for "
            f"{vlm.fingerprint[:12]}. Copy {', '.join(DESCRIBING)} and the weights from the machine that trained it."
        )
    require_model_directory(directory)
    if not random and not list(directory.glob("*.safetensors")):
        raise ConfigError(f"{directory}: no weights (*.safetensors). {_WRITE}")
    return directory


def preprocessing(directory: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation of the three colours, in [0, 1]."""
    settings = _read(directory, "preprocessor_config.json")
    mean, std = settings.get("image_mean", [0.5] * 3), settings.get("image_std", [0.5] * 3)
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ConfigError(
            f"{directory / 'preprocessor_config.json'}: image_mean {mean} and image_std {std} must be three numbers "
            "each, those of image_std positive."
        )
    return [float(x) for x in mean], [float(x) for x in std]


def _read(directory: Path, name: str) -> dict[str, Any]:
    found = parse_json(_bytes(directory, name), directory / name, _WRITE)
    if not isinstance(found, dict):
        raise ConfigError(f"{directory / name}: not a JSON object. {_WRITE}")
    return found


def _bytes(directory: Path, name: str) -> bytes:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; `vlm` is a local directory of a vision-language model.")
    try:
        return read_file(directory / name, MAX_JSON_BYTES, directory)
    except ConfigError as error:
        raise ConfigError(f"{error} {_WRITE}") from error
