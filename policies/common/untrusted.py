"""What a directory of Hugging Face's format may not say: whatever would make its reader run code or fetch something.

`transformers` imports Python that `auto_map` names, loads kernels that an attention implementation of the form
OWNER/NAME names, lets `adapter_config.json` send it to another model, and takes a pickle where there is no safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wire.errors import ConfigError, WeightsError
from wire.untrusted import MAX_JSON_BYTES, parse_json, read_file, read_safetensors_header, require_file

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CODE = ("_target_", "auto_map", "class", "custom_pipelines", "trust_remote_code", "quantization_config", "use_kernels")
"""keys by which some library finds code; none of them is in a configuration that is data alone"""
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_KNOWN_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_ADAPTERS = "adapter_config.json"


def refuse_code(value: Any, file: Path, remedy: str = "") -> None:
    """Raise `ConfigError` naming the key if the JSON `value` of `file` names code that its reader would run.

    `remedy` is one more sentence.
    """
    for where, key, said in _entries(value):
        # a number is the place of a word in a vocabulary
        if key in _CODE and said and not isinstance(said, float) and type(said) is not int:
            raise ConfigError(
                f"{file}: '{where}' names code, which is not run. Take the key out if what is left is whole without "
                f"it.{remedy and ' ' + remedy}"
            )
        if key in _ATTENTION and not isinstance(said, dict) and said not in _KNOWN_ATTENTION:
            raise ConfigError(
                f"{file}: '{where}' is {said!r}, which would be fetched and run. Write 'sdpa' or 'eager', or take it "
                f"out.{remedy and ' ' + remedy}"
            )


def require_model_directory(directory: Path) -> None:
    """Raise `ConfigError` or `WeightsError` unless a model's or tokenizer's `directory` can be read as data alone.

    Every JSON and safetensors file in it is looked at; of weights only the headers.
    """
    files = sorted(directory.iterdir())
    if (directory / _ADAPTERS).exists():
        raise ConfigError(
            f"{directory / _ADAPTERS}: adapters, which name another model to be read in place of this one. Merge them "
            "where you trust them (`merge_and_unload`) and write the model with `save_pretrained`."
        )
    for path in files:
        if path.suffix == ".json":
            said = parse_json(read_file(path, MAX_JSON_BYTES, directory), path, "Copy the directory again.")
            if path.name.endswith(".index.json"):
                _require_parts(said, path)  # its keys are names of tensors
            else:
                refuse_code(said, path)
        elif path.suffix == ".safetensors":
            require_tensors(path, directory)
        elif path.suffix in (".txt", ".model", ".jinja"):
            require_file(path, MAX_JSON_BYTES, directory)
    pickles = [path for path in files if path.suffix in PICKLES]
    if pickles and not any(path.suffix == ".safetensors" for path in files):
        raise ConfigError(
            f"{pickles[0]}: a pickle, which may run code when read; weights must be safetensors. Load it where you "
            "trust it and write it with `save_pretrained(DIRECTORY, safe_serialization=True)`."
        )


def require_tensors(path: Path, root: Path | None = None, remedy: str = "") -> None:
    """Raise `WeightsError` if a safetensors file is a pickle, leads out of `root` or does not keep its header.

    `remedy` is one more way out, a sentence.
    """
    end = remedy and " " + remedy
    size = require_file(path, root=root, wrong=WeightsError)
    with path.open("rb") as file:
        begin = file.read(9)
        # a pickle's first bytes may also begin the length of a good header, after which the header follows
        fits = begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= size - 8
        if not fits and (begin[:2] == b"PK" or begin[:1] == b"\x80"):
            raise WeightsError(
                f"{path}: a pickle or torch archive under a safetensors name, which may run code when read. Where you "
                f"trust it, load it with the program that wrote it and call `save_pretrained`.{end}"
            )
        file.seek(0)
        try:
            read_safetensors_header(file, size, path)
        except WeightsError as error:
            raise WeightsError(f"{error} Copy it again.{end}") from error


def _require_parts(said: Any, path: Path) -> None:
    """What an index of weights in parts names is a safetensors file beside it."""
    parts = said.get("weight_map", {}) if isinstance(said, dict) else None
    if not isinstance(parts, dict):
        raise ConfigError(f"{path}: no index of weights. Copy the directory again.")
    for name in set(map(str, parts.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{path}: weight_map names {name[:100]!r}; a part is a safetensors file of the same directory. Write "
                "the model with `save_pretrained`."
            )


def _entries(value: Any, where: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of every key of every object in a JSON value."""
    waiting = [(where, value)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, dict):
            for key, said in one.items():
                inside = f"{place}.{key}" if place else key
                yield inside, key, said
                waiting.append((inside, said))
        elif isinstance(one, list):
            waiting += [
                (f"{place}[{number}]", said) for number, said in enumerate(one) if isinstance(said, dict | list)
            ]
