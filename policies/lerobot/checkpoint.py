"""A lerobot checkpoint: its configuration, its network and its own pre- and post-processors.

What is used of lerobot here is the same in 0.4.4 and 0.6: `PreTrainedConfig.get_choice_class`, `draccus.decode`,
`get_policy_class`, `make_pre_post_processors` with overrides, and a policy's constructor.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.common.allocation import AllocationCap
from policies.common.untrusted import require_tensors
from policies.common.weights import list_names
from policies.lerobot.checkpoint_checks import (
    require_known_adapters,
    require_known_steps,
    require_known_type,
    require_sizes,
    state_path,
)
from policies.lerobot.checkpoint_path import (
    ADAPTER_WEIGHTS,
    CONFIG,
    POSTPROCESSOR,
    PREPROCESSOR,
    WEIGHTS,
    adapted,
    locate,
    missing_processors,
    one_line,
    read_config,
    read_json,
    reasons,
    require_processors,
    resolve,
    weights_file,
)
from wire.errors import ConfigError, FleetError, WeightsError, suggest

if TYPE_CHECKING:
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.processor import PolicyProcessorPipeline

_OLD_NORMALISATION = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
_FORK = ("pi0", "pi05", "pi0_fast")
"""types that lerobot 0.4 builds only with its own branch of transformers"""
_NAMES = {"vlm_model_name": CONFIG, "tokenizer_name": PREPROCESSOR}
_NORMALISERS = ("normalizer_processor", "unnormalizer_processor")


@dataclass(frozen=True)
class LeRobotCheckpoint:
    """What `lerobot-train` or `save_pretrained` wrote."""

    path: Path
    """a local directory, downloaded if it was a hub name"""
    type: str
    """act, diffusion, smolvla, ..."""
    config: PreTrainedConfig
    stored: dict[str, Any]
    """config.json as it stands"""

    @classmethod
    def open(cls, checkpoint_path: str, override: dict[str, Any] | None = None) -> LeRobotCheckpoint:
        """Reads the configuration, with the fields of `override` instead of its own; the weights wait for `policy`.

        `checkpoint_path`: see `locate`. Raises `ConfigError` that names the file and the way out.
        """
        path = locate(checkpoint_path)
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
            policy = self._built(config, file)
            if file is not None:
                load_weights(policy, file)
                if adapted(self.path) is not None:
                    require_known_adapters(self.path)
                    policy = with_adapters(policy, self.path)
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
        from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep

        if statistics is None:
            require_processors(self.path)
        try:
            if missing_processors(self.path):
                config = _to_build(self.config, device, True)
                return make_pre_post_processors(config, dataset_stats=statistics)
            with tempfile.TemporaryDirectory() as scratch:
                self._copy_processor(PREPROCESSOR, Path(scratch), statistics is None, device)
                self._copy_processor(POSTPROCESSOR, Path(scratch), statistics is None)
                before, after = make_pre_post_processors(self.config, pretrained_path=scratch)
        except FleetError:
            raise
        except Exception as error:  # a step may be of any package, and raise anything when it is made
            raise ConfigError(
                f"{self.path}: its processors ({PREPROCESSOR}, {POSTPROCESSOR}) cannot be made: {one_line(error)}. "
                "Copy them from the checkpoint again; `pip install 'vla-fleet[lerobot]'` brings what they need."
            ) from error
        for step in (*before.steps, *after.steps):
            if statistics is not None and isinstance(step, NormalizerProcessorStep | UnnormalizerProcessorStep):
                step.stats = statistics
                step.to()
        return before, after

    def statistics_file(self, name: str) -> Path:
        """The file of the statistics that processor `name` normalises with, or its own file if there is none."""
        steps = _steps(self.path / name, read_json(self.path / name)) if (self.path / name).is_file() else []
        states = [step["state_file"] for step in steps if _key(step) in _NORMALISERS and step.get("state_file")]
        return state_path(self.path, states[0], self.path / name) if states else self.path / name

    # --- inside ------------------------------------------------------------------------------------------------

    def _copy_processor(self, name: str, directory: Path, with_statistics: bool, device: str | None = None) -> None:
        """Write processor `name` into `directory`, with tokenizers where they lie on this machine; on `device`.

        `with_statistics`: with what its normalising steps keep. Raises `ConfigError` or `WeightsError` for a file that
        is none, and if one that a step keeps its state in is missing.
        """
        made = read_json(self.path / name)
        require_known_steps(steps := _steps(self.path / name, made), self.path / name)
        for step in steps:
            key, state, config = _key(step), step.get("state_file"), step.setdefault("config", {})
            if isinstance(value := config.get("tokenizer_name"), str):
                what = f"tokenizer_name of '{key}'"
                config["tokenizer_name"] = resolve(self.path, value, what, self.path / name)
            if key == "device_processor" and device is not None:
                config["device"] = device
            if not state:
                continue
            if key in _NORMALISERS and not with_statistics:
                del step["state_file"]
                continue
            other = " Or set `statistics` to 'spec' or 'buffer'." if key in _NORMALISERS else ""
            kept = state_path(self.path, state, self.path / name)
            if not kept.is_file():
                raise ConfigError(
                    f"{kept}: missing; {name} keeps the state of its step '{key}' in it. Copy the "
                    f"whole checkpoint directory.{other}"
                )
            require_tensors(kept, self.path, other.strip())
            step["state_file"] = str(kept.resolve())
        (directory / name).write_text(json.dumps(made), encoding="utf-8")

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

    def _built(self, config: PreTrainedConfig, file: Path | None) -> PreTrainedPolicy:
        from lerobot.policies.factory import get_policy_class

        try:
            with AllocationCap(file, self.path / CONFIG):
                return get_policy_class(self.type)(config)
        except FleetError:
            raise
        except ImportError as error:
            raise ConfigError(
                f"{self.path / CONFIG}: a '{self.type}' policy needs a package that is not here: {error}. "
                f"`pip install 'vla-fleet[lerobot]'` brings most, `pip install 'lerobot[{self.type}]'` the rest."
            ) from error
        except Exception as error:  # a network may be of any package, and tokenizers raise a plain Exception
            language = getattr(config, "vlm_model_name", None)
            also = f", with what is in {language}" if isinstance(language, str) and Path(language).is_dir() else ""
            raise ConfigError(
                f"{self.path / CONFIG}: lerobot {version('lerobot')} cannot build this '{self.type}' policy{also}: "
                f"{one_line(error)}. Copy the whole checkpoint again; sizes changed by `override` must go together."
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
            f"{file}: lerobot {version('lerobot')} has no policy type '{kind}'.{suggest(kind, known)} Known: "
            f"{', '.join(sorted(known))}. Install the lerobot that wrote it, or the plugin package (lerobot_policy_*)."
        )
    made = PreTrainedConfig.get_choice_class(kind)
    require_known_type(kind, made, file)
    require_sizes(stored, file)
    fields = {field.name for field in dataclasses.fields(made)}
    if unknown := sorted(set(override) - fields):
        raise ConfigError(
            f"lerobot policy: override '{unknown[0]}' is no field of a '{kind}' configuration."
            f"{suggest(unknown[0], fields)} See {file} for what there is."
        )
    values = {name: value for name, value in (stored | override).items() if name != "type"}
    if unknown := sorted(set(values) - fields):
        raise ConfigError(
            f"{file}: lerobot {version('lerobot')} does not know {', '.join(unknown)} of a '{kind}' policy; it was "
            "written by another version. Install that one, or take the fields out if their defaults will do."
        )
    values["device"], values["use_amp"] = "cpu", False
    if "pretrained_path" in values:
        values["pretrained_path"] = None  # where it once came from, which nobody is to go back to
    for name, value in values.items():
        if name in _NAMES and isinstance(value, str):
            values[name] = resolve(path, value, name, file)
    try:
        with draccus.config_type("json"):
            return draccus.decode(made, values)
    except Exception as error:  # draccus raises its own kinds, a configuration's own checks any
        changed = f" with override {override}" if override else ""
        raise ConfigError(f"{file}: not a configuration of a '{kind}' policy{changed}: {reasons(error)}") from error


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


def _steps(path: Path, processor: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of a processor's JSON. Raises `ConfigError` naming its file if there are none."""
    entries = processor.get("steps", [])
    if not isinstance(entries, list) or not all(
        isinstance(step, dict) and isinstance(step.get("config", {}), dict) for step in entries
    ):
        raise ConfigError(f"{path}: 'steps' are no list of processor steps. Copy the checkpoint again.")
    return entries


def _key(step: dict[str, Any]) -> str:
    """The name that a step's kind is registered under, or that of its class."""
    return str(step.get("registry_name") or str(step.get("class", "")).rpartition(".")[2])


def load_weights(policy: PreTrainedPolicy, file: Path) -> None:
    """Copy the weights of `file` into `policy`; every tensor must find its place and have no NaN.

    Raises `WeightsError` that names the file and what it lacks or has too much.
    """
    from lerobot.policies.pretrained import PreTrainedPolicy as Plain
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_model

    try:
        if type(policy).from_pretrained.__func__ is not Plain.from_pretrained.__func__:
            missing, unexpected = _by_its_own_loader(policy, file)
        else:
            missing, named = load_model(policy, file, strict=False)
            with safe_open(file, "pt") as stored:
                there = set(stored.keys())
            # not the second name of what two modules share, which `load_model` calls unexpected as well
            unexpected = [name for name in named if name in there]
    except (SafetensorError, RuntimeError, OSError) as error:
        raise WeightsError(
            f"{file}: not the weights of this '{policy.name}' policy: {one_line(error)}. Copy it and {CONFIG} from one "
            "checkpoint, and change no size by `override`."
        ) from error
    unexpected = [name for name in unexpected if not name.startswith(_OLD_NORMALISATION)]
    if missing or unexpected:
        both = [
            f"{what} {list_names(sorted(names))}" for what, names in (("lacks", missing), ("has", unexpected)) if names
        ]
        raise WeightsError(
            f"{file}: not the weights of the '{policy.name}' policy in {CONFIG} beside it: it {' and '.join(both)}. "
            "Copy both files from one checkpoint."
        )
    _require_finite(policy, file)


def with_adapters(policy: PreTrainedPolicy, path: Path) -> PreTrainedPolicy:
    """`policy` with the adapters of the checkpoint at `path` added to what they adapt."""
    from peft import PeftModel

    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    try:
        merged: PreTrainedPolicy = PeftModel.from_pretrained(policy, str(path)).merge_and_unload()
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        raise WeightsError(
            f"{path}: its adapters do not fit the checkpoint that they name: {one_line(error)}"
        ) from error
    for name, parameter in merged.named_parameters():
        parameter.requires_grad_(name in trained)  # adapters had frozen what they adapt
    _require_finite(merged, path / ADAPTER_WEIGHTS)
    return merged


def _by_its_own_loader(policy: PreTrainedPolicy, file: Path) -> tuple[list[str], list[str]]:
    """What the type's own `from_pretrained` leaves out of `policy`, and what of `file` it has no place for.

    Such a loader renames tensors of older files, and tells of failures by a print alone. It wants to build a network;
    it is handed the one that is there, which listens to what it is given.
    """
    kind: Any = type(policy)
    loads: list[tuple[list[str], list[str]]] = []
    failures: list[Exception] = []

    def record_load(state: dict[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        try:
            found = kind.load_state_dict(policy, state, strict=False, assign=assign)
        except Exception as error:
            failures.append(error)
            raise
        loads.append((list(found.missing_keys), list(found.unexpected_keys)))
        return found

    listener: Any = policy
    handed = type(kind.__name__, (kind,), {"__new__": lambda cls, *given, **named: policy})
    listener.load_state_dict = record_load
    try:
        loaded = kind.from_pretrained.__func__(handed, str(file.parent), config=policy.config)
    finally:
        del listener.load_state_dict
    if failures:
        raise RuntimeError(one_line(failures[0]))
    if loaded is not policy or not loads:
        raise RuntimeError(f"lerobot's own loader of '{policy.name}' did not take {WEIGHTS}; see what it printed")
    missing, unexpected = loads[-1]
    own = policy.state_dict()
    given = {own[name].data_ptr() for name in own.keys() - set(missing)}
    # a tensor under two names is stored under one of them
    return [name for name in missing if own[name].data_ptr() not in given], unexpected


def _require_finite(policy: PreTrainedPolicy, file: Path) -> None:
    parameters = {name for name, _ in policy.named_parameters()}
    for name, tensor in policy.state_dict().items():
        # a buffer may be a mask, which has infinities
        bad = ~tensor.isfinite() if name in parameters else tensor.isnan()
        if count := int(bad.sum()):
            raise WeightsError(
                f"{file}: {count} of {tensor.numel()} numbers of '{name}' are not finite. The training it came from "
                "broke down: use an earlier checkpoint."
            )
