"""Where a checkpoint lies: its directory and config.json, without torch and without lerobot.

`lerobot-train` writes RUN/checkpoints/NNNNNN/pretrained_model and a link RUN/checkpoints/last; `save_pretrained` writes
the files of a pretrained_model directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.common.untrusted import PICKLES, refuse_code, require_model_directory, require_tensors
from wire.errors import ConfigError, WeightsError
from wire.untrusted import MAX_CONFIG_BYTES, parse_json, read_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTERS = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREPROCESSOR = "policy_preprocessor.json"
POSTPROCESSOR = "policy_postprocessor.json"
VLM = "vlm"
"""directory of a checkpoint that has its own copy of the vision-language model's configuration and tokenizer"""

_INSIDE = ("", "pretrained_model", "last/pretrained_model", "checkpoints/last/pretrained_model")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", f"{VLM}/*"]


def locate(checkpoint_path: str, fetch: bool = True) -> Path:
    """The directory that has the checkpoint's config.json.

    `checkpoint_path` is such a directory, a run of `lerobot-train`, its `checkpoints` or one of these, or the name of a
    repository of the Hugging Face hub (`OWNER/NAME`, `OWNER/NAME@REVISION`), which is downloaded unless it is in the
    cache, or taken from there alone (`fetch`). Raises `ConfigError` that says what is missing and where.
    """
    if not checkpoint_path:
        raise ConfigError("lerobot policy: no checkpoint. Say lerobot:DIRECTORY or lerobot:OWNER/NAME of the hub.")
    path = Path(checkpoint_path).expanduser()
    if path.is_file():
        raise ConfigError(f"lerobot checkpoint: {path} is a file. Give the directory that has it and {CONFIG}.")
    if path.is_dir():
        return _inside(path)
    if (
        path.is_absolute()
        or checkpoint_path.startswith((".", "~"))
        or checkpoint_path.count("/") > 1
        or checkpoint_path.endswith("/")
    ):
        raise ConfigError(
            f"lerobot checkpoint: there is no directory {path}. Give what `lerobot-train` or `save_pretrained` wrote, "
            "or OWNER/NAME of a repository of the Hugging Face hub."
        )
    return _inside(_download(checkpoint_path, local_files_only=not fetch))


def read_config(directory: Path) -> dict[str, Any]:
    """The object in config.json. Raises `ConfigError` if there is none, if it names code or no policy type."""
    config = read_json(directory / CONFIG)
    refuse_code(config, directory / CONFIG)
    if not isinstance(config.get("type"), str):
        raise ConfigError(
            f"{directory / CONFIG}: it has no 'type', so it is not a lerobot policy's. Give a directory that "
            "`lerobot-train` or `save_pretrained` of a lerobot policy wrote."
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises `ConfigError` naming it."""
    found = parse_json(read_file(path, MAX_CONFIG_BYTES, path.parent), path, "Copy the checkpoint again.")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a {type(found).__name__} where an object is expected. Copy the checkpoint again.")
    return found


def adapted(directory: Path) -> Path | None:
    """The checkpoint that this one's adapters (`lerobot-train --peft`) are for, None if it has all weights itself.

    Raises `ConfigError` or `WeightsError` naming the file if that one or the adapters are not there.
    """
    file = directory / ADAPTERS
    if (directory / WEIGHTS).is_file() or not file.is_file():
        return None
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise WeightsError(
            f"{directory}: {ADAPTERS} without {ADAPTER_WEIGHTS}. Copy the whole pretrained_model directory."
        )
    base = read_json(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{file}: it does not say which checkpoint its adapters are for (base_model_name_or_path).")
    try:
        return locate(base, fetch=False)
    except ConfigError as error:
        raise ConfigError(f"{file}: base_model_name_or_path is '{base}'. {error}") from error


def weights_file(directory: Path) -> Path:
    """Its model.safetensors, or that of the checkpoint its adapters are for.

    Raises `WeightsError` if there is none or it is not what its name says.
    """
    directory = adapted(directory) or directory
    path = directory / WEIGHTS
    if not path.is_file():
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise WeightsError(
                f"{directory}: no {WEIGHTS}, only {', '.join(pickles)}: a pickle, which may run code when read and is "
                "not opened. Where you trust it, load it with the lerobot that wrote it and call `save_pretrained`, "
                "which writes safetensors."
            )
        parts = sorted(p.name for p in directory.glob("model-*-of-*.safetensors"))
        hint = f" It is in parts ({parts[0]}, ...); save it with `save_pretrained`, which writes one." if parts else ""
        raise WeightsError(
            f"{directory}: no {WEIGHTS} beside {CONFIG}.{hint} Copy the whole pretrained_model directory, or set "
            "`fresh` to begin with random weights."
        )
    require_tensors(path, directory)
    return path


def missing_processors(directory: Path) -> list[str]:
    """Files of lerobot's pre- and post-processor that are not there."""
    return [name for name in (PREPROCESSOR, POSTPROCESSOR) if not (directory / name).is_file()]


def require_processors(directory: Path) -> None:
    """Raise `ConfigError` that says what to do if one is missing."""
    if missing := missing_processors(directory):
        raise ConfigError(
            f"{directory}: no {' and no '.join(missing)}: a checkpoint of a lerobot before 0.4, or copied in part. "
            "Migrate it with `python -m lerobot.processor.migrate_policy_normalization --pretrained-path "
            f"{directory}`, copy the whole directory, or set `statistics` to 'spec' (the robot's limits) or 'buffer' "
            "(recorded data)."
        )


def resolve(directory: Path, value: str, key: str, file: Path) -> str:
    """Where a tokenizer or vision-language model named `value` in a checkpoint's `file` is.

    The checkpoint's own `vlm/` comes first: another machine has no directory that the name could mean. Then a path from
    the checkpoint or from here; what looks like OWNER/NAME is a name of the hub, of which a copy in the cache is taken:
    a person may have something fetched, a file may not. Raises `ConfigError` for what is not on this machine, for a
    file in it that is torn, and for one that names code.
    """
    path = Path(value).expanduser()
    for candidate in (directory / VLM, directory / path, directory / path.name, path):
        if candidate.is_dir() and candidate != directory:
            require_model_directory(candidate)
            return str(candidate.resolve())
    if path.is_absolute() or value.startswith((".", "~")) or value.count("/") != 1:
        raise ConfigError(
            f"{file}: {key} is '{value}', which is not on this machine. Copy that directory to {directory / VLM}, or "
            f"write its path or a hub name into {file.name}."
        )
    try:
        cached = _download(value, local_files_only=True)
    except ConfigError as error:
        raise ConfigError(
            f"{file}: {key} is '{value}', which is not on this machine, and nothing is fetched because a file names "
            f"it. Get it with `hf download {value}`, or copy it to {directory / VLM}."
        ) from error
    require_model_directory(cached)
    return str(cached)


def one_line(error: BaseException) -> str:
    """What an exception says, which torch spreads over many lines."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def reasons(error: BaseException) -> str:
    """What an exception and those it came from say."""
    said = [one_line(error)]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        if one_line(error) not in said[-1]:
            said.append(one_line(error))
    return ". ".join(said)


def _inside(path: Path) -> Path:
    for name in _INSIDE:
        if (path / name / CONFIG).is_file():
            return path / name if name else path
    runs = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    numbered = [p for p in runs.iterdir() if p.name.isdigit() and (p / "pretrained_model" / CONFIG).is_file()]
    if numbered:
        return max(numbered, key=lambda p: int(p.name)) / "pretrained_model"
    held = sorted(p.name for p in path.iterdir())
    raise ConfigError(
        f"lerobot checkpoint: {path / CONFIG} is missing, and there is no checkpoint of `lerobot-train` below it; the "
        f"directory has {', '.join(held[:8]) or 'nothing'}. Give the pretrained_model directory."
    )


def _download(name: str, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    what = f"lerobot checkpoint '{name}': no such directory here, and as a repository of the Hugging Face hub"
    remedy = "Give a local directory, or download it where there is a network: `hf download " + repository + "`."
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    # the narrower kinds first
    reasons: dict[type[Exception], str] = {
        HFValidationError: "it is no valid name ({error}). Give a local directory or OWNER/NAME.",
        GatedRepoError: f"it is gated: ask for access on its page, then {log_in}.",
        RevisionNotFoundError: f"it has no revision '{revision}'. Give OWNER/NAME without it, or another.",
        RepositoryNotFoundError: f"it is not found. Check the name; for a private one {log_in}.",
        LocalEntryNotFoundError: f"it is not in the cache and the hub cannot be reached. {remedy}",
        OfflineModeIsEnabled: f"it is not in the cache and the hub cannot be reached. {remedy}",
        HfHubHTTPError: f"the hub cannot be reached: {{error}}. {remedy}",
        OSError: f"the hub cannot be reached: {{error}}. {remedy}",
    }
    try:
        options: dict[str, Any] = {"local_files_only": True} if local_files_only else {"allow_patterns": _FILES}
        return Path(snapshot_download(repository, revision=revision or None, **options))
    except tuple(reasons) as error:
        reason = next(said for kind, said in reasons.items() if isinstance(error, kind))
        raise ConfigError(f"{what} {reason.replace('{error}', str(error))}") from error
