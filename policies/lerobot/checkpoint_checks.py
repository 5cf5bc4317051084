"""What lerobot may be handed of a checkpoint: it imports and calls whatever its JSON names, so the JSON is read first.

Only what is known to be data passes: policy types, processor steps and kinds of adapters by name, or those that a
package installed on this machine has registered.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from policies.common.untrusted import refuse_code, require_tensors
from policies.lerobot.checkpoint_path import ADAPTER_WEIGHTS, ADAPTERS, read_json
from wire.errors import ConfigError, suggest

POLICIES = frozenset(("act", "diffusion", "pi0", "pi05", "smolvla", "tdmpc", "vqbet", "xvla"))
"""types of lerobot's own that read their checkpoint as data; the others load Python of a tokenizer or backbone"""
STEPS = frozenset(
    (
        "device_processor",
        "image_crop_resize_processor",
        "normalizer_processor",
        "numpy2torch_action_processor",
        "observation_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "pi0_new_line_processor",
        "policy_action_to_robot_action_processor",
        "rename_observations_processor",
        "robot_action_to_policy_action_processor",
        "smolvla_new_line_processor",
        "to_batch_processor",
        "to_batch_processor_action",
        "to_batch_processor_complementary_data",
        "to_batch_processor_observation",
        "tokenizer_processor",
        "torch2numpy_action_processor",
        "unnormalizer_processor",
        "xvla_add_domain_id",
        "xvla_image_scale",
        "xvla_image_to_float",
        "xvla_imagenet_normalize",
        "xvla_rotation_6d_to_axis_angle",
    )
)
"""lerobot's own steps that only compute; others fetch a classifier, ask an environment or run a tokenizer's Python"""
ADAPTER_KINDS = ("LORA", "MISS")
_ADAPTER_CODE = ("megatron_config", "runtime_config", "corda_config", "eva_config", "loftq_config", "lora_ga_config")
"""fields of an adapter's configuration by which PEFT imports a module or unpickles a file"""
_LARGEST = 1 << 20
"""of a size: the largest there is, a vocabulary, has 257,152 words"""
_COUNTED = ("optimizer_", "scheduler_")
"""fields that say how often, not how large"""


def require_known_type(kind: str, made: type, file: Path) -> None:
    """Raise `ConfigError` unless the policy type, whose configuration is a `made`, is one that is read as data."""
    if kind not in POLICIES and _of_lerobot(made):
        raise ConfigError(
            f"{file}: lerobot may run Python that a checkpoint of a '{kind}' policy names, so it is not read. Known: "
            f"{', '.join(sorted(POLICIES))}, and types of installed packages (lerobot_policy_*)."
        )


def require_sizes(values: dict[str, Any], file: Path) -> None:
    """Raise `ConfigError` for a whole number in a configuration that no network has as a size."""
    waiting: list[tuple[str, Any]] = [(name, said) for name, said in values.items() if not name.startswith(_COUNTED)]
    while waiting:
        name, said = waiting.pop()
        if isinstance(said, dict):
            waiting += [(f"{name}.{key}", one) for key, one in said.items()]
        elif isinstance(said, list):
            waiting += [(f"{name}[{number}]", one) for number, one in enumerate(said)]
        if isinstance(said, int | list) and (len(said) if isinstance(said, list) else abs(said)) > _LARGEST:
            raise ConfigError(f"{file}: '{name}' is above {_LARGEST}, which no network has. Copy the checkpoint again.")


def require_known_steps(steps: list[dict[str, Any]], file: Path) -> None:
    """Raise `ConfigError` naming the first step of a processor that lerobot must not be asked for."""
    for number, step in enumerate(steps):
        where = f"{file}: steps[{number}]"
        refuse_code({"steps": [step.get("config", {})]}, file)
        if unknown := sorted(set(step) - {"registry_name", "class", "config", "state_file"}):
            raise ConfigError(f"{where} has '{unknown[0][:100]}', which lerobot does not write. Copy it again.")
        if "registry_name" in step:
            name, known = str(step["registry_name"]), _is_registered(str(step["registry_name"]))
        else:
            name, known = str(step.get("class")), _is_step(str(step.get("class")))
        if not known:
            raise ConfigError(
                f"{where} is '{name[:200]}', no processor step that is known to only compute, so it is neither "
                f"imported nor called.{suggest(name, STEPS)} Known: {', '.join(sorted(STEPS))}, and steps that an "
                "installed package registers with lerobot (lerobot_policy_*)."
            )


def require_known_adapters(directory: Path) -> None:
    """Raise `ConfigError` or `WeightsError` unless the checkpoint's adapters are numbers that are added to weights."""
    file = directory / ADAPTERS
    config = read_json(file)
    refuse_code(config, file)
    if (kind := config.get("peft_type")) not in ADAPTER_KINDS:
        raise ConfigError(
            f"{file}: adapters of the kind {kind!r}; read are {' and '.join(ADAPTER_KINDS)}. Merge them where you "
            "trust them (`merge_and_unload`) and write the policy with `save_pretrained`."
        )
    for name in _ADAPTER_CODE:
        if config.get(name):
            raise ConfigError(f"{file}: '{name}' would import a module or read a pickle. Take it out, or merge them.")
    require_sizes(config, file)
    require_tensors(directory / ADAPTER_WEIGHTS, directory)


def state_path(directory: Path, name: Any, file: Path) -> Path:
    """Where a processor step keeps its state: a file beside the processor's. Raises `ConfigError` for another place."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ConfigError(f"{file}: state_file {str(name)[:200]!r} is no safetensors file beside it. Copy it again.")
    return directory / name


def _is_registered(name: str) -> bool:
    """Among the known ones, or registered by a package that is not lerobot."""
    from lerobot.processor import ProcessorStepRegistry

    if name in STEPS:
        return True
    try:
        return not _of_lerobot(ProcessorStepRegistry.get(name))
    except KeyError:
        return False


def _is_step(path: str) -> bool:
    """Whether a class path is that of a known step: only lerobot's own modules of processors are looked into."""
    from lerobot.processor import ProcessorStep, ProcessorStepRegistry

    module, _, name = path.rpartition(".")
    family, _, last = module.rpartition(".")
    if family != "lerobot.processor" and not (family.startswith("lerobot.policies.") and last.startswith("processor_")):
        return False
    try:
        made = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    if not isinstance(made, type) or not issubclass(made, ProcessorStep):
        return False
    registered = {known for known in ProcessorStepRegistry.list() if ProcessorStepRegistry.get(known) is made}
    return bool(registered & STEPS)


def _of_lerobot(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "lerobot"
