"""A lerobot checkpoint: its configuration, its network and its own pre- and post-processors.

What is used of lerobot here is the same in 0.4.4 and 0.6: `PreTrainedConfig.get_choice_class`, `draccus.decode`,
`get_policy_class`, `make_pre_post_processors` with overrides, and a policy's constructor.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.lerobot.place import (
    CONFIG,
    POSTPROCESSOR,
    PREPROCESSOR,
    adapted,
    locate,
    read_config,
    read_json,
    resolve,
    weights_file,
)
from wire.errors import ConfigError, WeightsError, nearest

if TYPE_CHECKING:
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

_FORK = ("pi0", "pi05", "pi0_fast")
"""types that lerobot 0.4 builds only with its own branch of transformers"""
_NAMES = {"vlm_model_name": CONFIG, "tokenizer_name": PREPROCESSOR}
_OLD_NORMALISATION = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")


@dataclass(frozen=True)
class Checkpoint:
    """What `lerobot-train` or `save_pretrained` wrote."""

    path: Path
    """a local directory, downloaded if it was a hub name"""
    type: str
    """act, diffusion, smolvla, ..."""
    config: PreTrainedConfig
    stored: dict[str, Any]
    """config.json as it stands"""

    @classmethod
    def open(cls, place: str, override: dict[str, Any] | None = None) -> Checkpoint:
        """Reads the configuration, with the fields of `override` instead of its own; the weights wait for `policy`.

        `place`: see `policies.lerobot.place.locate`. Raises `ConfigError` that names the file and the way out.
        """
        path = locate(place)
        stored = read_config(path)
        return cls(path, stored["type"], _config(path, stored, override or {}), stored)

    def policy(self, device: str = "cpu", seed: int | None = None) -> PreTrainedPolicy:
        """The network with the checkpoint's weights, in eval mode.

        With a `seed`, one with random weights of that seed instead. No global random stream moves. Raises
        `WeightsError` for weights that are missing, pickled, torn or of another network, `ConfigError` for a network
        that cannot be built here.
        """
        import torch

        file = None if seed is not None else weights_file(self.path)
        self._require_transformers()
        config = _to_build(self.config, device, file is not None)
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed or 0)
            policy = self._built(config)
            if file is not None:
                _load(policy, file)
                if adapted(self.path) is not None:
                    policy = _with_adapters(policy, self.path)
        policy.to(device)
        policy.eval()
        return policy

    def processors(
        self, device: str = "cpu", statistics: dict[str, dict[str, Any]] | None = None
    ) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
        """The checkpoint's own pre- and post-processor; `device` is where the network expects its batch.

        With `statistics` ({feature: {mean, std, min, ...}}) they are used instead of the checkpoint's, and processors
        are made anew where it has none. Raises `ConfigError` naming the file that is missing or cannot be used.
        """
        from lerobot.policies.factory import make_pre_post_processors

        missing = [name for name in (PREPROCESSOR, POSTPROCESSOR) if not (self.path / name).is_file()]
        if missing and statistics is None:
            raise ConfigError(
                f"{self.path}: no {' and no '.join(missing)}: a checkpoint of a lerobot before 0.4, or copied in part. "
                "Migrate it with `python -m lerobot.processor.migrate_policy_normalization --pretrained-path "
                f"{self.path}`, copy the whole directory, or set `statistics` to 'spec' (the robot's limits) or "
                "'buffer' (recorded data)."
            )
        try:
            if missing:
                config = _to_build(self.config, device, True)
                return make_pre_post_processors(config, dataset_stats=_tensors(statistics or {}))
            before = self._overrides(PREPROCESSOR, statistics)
            if "device_processor" in self._steps(PREPROCESSOR):
                before["device_processor"] = {"device": device}
            return make_pre_post_processors(
                self.config,
                pretrained_path=str(self.path),
                preprocessor_overrides=before,
                postprocessor_overrides=self._overrides(POSTPROCESSOR, statistics),
            )
        except ConfigError:
            raise
        except Exception as error:  # a step may be of any package, and raise anything when it is made
            raise ConfigError(
                f"{self.path}: its processors ({PREPROCESSOR}, {POSTPROCESSOR}) cannot be made: {error}"
            ) from error

    # --- inside ------------------------------------------------------------------------------------------------

    def _steps(self, name: str) -> dict[str, dict[str, Any]]:
        """Entries of a processor file, by the name that lerobot's overrides use."""
        path = self.path / name
        found = {}
        for step in read_json(path).get("steps", []):
            key = step.get("registry_name") or str(step.get("class", "")).rpartition(".")[2]
            found[key] = step
            state = step.get("state_file")
            if state and not (self.path / state).is_file():
                raise ConfigError(
                    f"{self.path / state}: missing; {name} keeps the state of its step '{key}' in it. Copy the whole "
                    "checkpoint directory, or set `statistics` to 'spec' or 'buffer'."
                )
        return found

    def _overrides(self, name: str, statistics: dict[str, dict[str, Any]] | None) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        for key, step in self._steps(name).items():
            changes: dict[str, Any] = {}
            value = step.get("config", {}).get("tokenizer_name")
            if isinstance(value, str):
                changes["tokenizer_name"] = resolve(self.path, value, f"tokenizer_name of '{key}'", self.path / name)
            if statistics is not None and key in ("normalizer_processor", "unnormalizer_processor"):
                changes["stats"] = _tensors(statistics)
            if changes:
                overrides[key] = changes
        return overrides

    def _require_transformers(self) -> None:
        """Before a network of gigabytes is built in vain."""
        if self.type not in _FORK or tuple(int(n) for n in version("lerobot").split(".")[:2]) >= (0, 5):
            return
        try:
            from transformers.models.siglip import check  # type: ignore[attr-defined]

            fits = bool(check.check_whether_transformers_replace_is_installed_correctly())
        except ImportError:
            fits = False
        if not fits:
            raise ConfigError(
                f"{self.path}: a '{self.type}' policy cannot be built with lerobot {version('lerobot')} and "
                f"transformers {version('transformers')}. lerobot 0.4 needs its own branch of it, `pip install "
                '"transformers @ git+https://github.com/huggingface/transformers@fix/lerobot_openpi"`; lerobot 0.6 '
                "builds it with transformers 5.4 or 5.5 and needs Python 3.12."
            )

    def _built(self, config: PreTrainedConfig) -> PreTrainedPolicy:
        from lerobot.policies.factory import get_policy_class

        try:
            return get_policy_class(self.type)(config)
        except ImportError as error:
            raise ConfigError(
                f"{self.path / CONFIG}: a '{self.type}' policy needs a package that is not here: {error}. Try "
                f"`pip install 'lerobot[{self.type}]'`."
            ) from error
        except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
            raise ConfigError(
                f"{self.path / CONFIG}: lerobot {version('lerobot')} cannot build this '{self.type}' policy: {error}"
            ) from error


def _config(path: Path, stored: dict[str, Any], override: dict[str, Any]) -> PreTrainedConfig:
    import draccus
    import lerobot.policies.factory  # noqa: F401  registers the policy types
    from lerobot.configs.policies import PreTrainedConfig

    kind, file = stored["type"], path / CONFIG
    if kind not in PreTrainedConfig.get_known_choices():
        from lerobot.utils.import_utils import register_third_party_plugins

        register_third_party_plugins()
    known = PreTrainedConfig.get_known_choices()
    if kind not in known:
        raise ConfigError(
            f"{file}: lerobot {version('lerobot')} has no policy type '{kind}'.{nearest(kind, known)} Known: "
            f"{', '.join(sorted(known))}. Install the lerobot that wrote it, or the plugin package (lerobot_policy_*)."
        )
    made = PreTrainedConfig.get_choice_class(kind)
    fields = {field.name for field in dataclasses.fields(made)}
    if unknown := sorted(set(override) - fields):
        raise ConfigError(
            f"lerobot policy: override '{unknown[0]}' is no field of a '{kind}' configuration."
            f"{nearest(unknown[0], fields)} See {file} for what there is."
        )
    values = {name: value for name, value in (stored | override).items() if name != "type"}
    if unknown := sorted(set(values) - fields):
        raise ConfigError(
            f"{file}: lerobot {version('lerobot')} does not know {', '.join(unknown)} of a '{kind}' policy; it was "
            "written by another version. Install that one, or take the fields out if their defaults will do."
        )
    values["device"], values["use_amp"] = "cpu", False
    for name, value in values.items():
        if name in _NAMES and isinstance(value, str):
            values[name] = resolve(path, value, name, file)
    try:
        with draccus.config_type("json"):
            return draccus.decode(made, values)
    except Exception as error:  # draccus raises its own kinds, a configuration's own checks any
        raise ConfigError(f"{file}: not a configuration of a '{kind}' policy: {_reasons(error)}") from error


def _to_build(config: PreTrainedConfig, device: str, has_weights: bool) -> PreTrainedConfig:
    """A copy to build a network from: on `device`, not compiled, and nothing downloaded that is overwritten anyway."""
    chosen = copy.deepcopy(config)
    changes: dict[str, Any] = {"device": device, "compile_model": False, "use_peft": False}
    if has_weights:
        changes |= {"pretrained_backbone_weights": None, "load_vlm_weights": False}
    for name, value in changes.items():
        if hasattr(chosen, name):
            setattr(chosen, name, value)
    return chosen


def _load(policy: PreTrainedPolicy, file: Path) -> None:
    """Copy the weights of `file` into `policy`; every tensor must find its place."""
    from lerobot.policies.pretrained import PreTrainedPolicy as Plain
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    kind = type(policy)
    try:
        if kind.from_pretrained.__func__ is not Plain.from_pretrained.__func__:
            # It renames tensors of older files; it also tells of failures by a print alone.
            loaded = kind.from_pretrained(str(file.parent), config=policy.config)
            _require_loaded(loaded, file)
            policy.load_state_dict(loaded.state_dict())
            return
        missing, unexpected = load_model(policy, file, strict=False)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise WeightsError(f"{file}: not the weights of this '{policy.name}' policy: {error}") from error
    unexpected = [name for name in unexpected if not name.startswith(_OLD_NORMALISATION)]
    if missing or unexpected:
        both = [f"{what} {_some(list(names))}" for what, names in (("lacks", missing), ("has", unexpected)) if names]
        raise WeightsError(
            f"{file}: not the weights of the '{policy.name}' policy in {CONFIG} beside it: it {' and '.join(both)}. "
            "Copy both files from one checkpoint."
        )


def _with_adapters(policy: PreTrainedPolicy, path: Path) -> PreTrainedPolicy:
    """`policy` with the adapters of a checkpoint added to what they adapt."""
    from peft import PeftModel

    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    try:
        merged: PreTrainedPolicy = PeftModel.from_pretrained(policy, str(path)).merge_and_unload()
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise WeightsError(f"{path}: its adapters do not fit the checkpoint that they name: {error}") from error
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(name in trained)  # adapters had frozen what they adapt
    return merged


def _require_loaded(policy: PreTrainedPolicy, file: Path) -> None:
    from safetensors import safe_open

    own = policy.state_dict()
    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
        pairs = [(n, n) for n in names if n in own] or [(f"model.{n}", n) for n in names if f"model.{n}" in own]
        alike = [own[a].cpu().float().equal(stored.get_tensor(b).float()) for a, b in sorted(pairs)[:8]]
    if not any(alike):
        raise WeightsError(
            f"{file}: lerobot did not load these weights into a '{policy.name}' policy; see what it printed. Copy the "
            "weights and their config.json from one checkpoint."
        )


def _tensors(statistics: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    import torch

    return {
        key: {name: torch.as_tensor(value, dtype=torch.float32) for name, value in values.items()}
        for key, values in statistics.items()
    }


def _reasons(error: BaseException) -> str:
    """What an exception and those it came from say."""
    said = [str(error).strip()]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        if str(error).strip() not in said[-1]:
            said.append(str(error).strip())
    return " ".join(said)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in sorted(names)[:5]) + more
