"""`flow:SIZE` for `policies.interface.registry`. Nothing here imports torch before a policy is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policies.flow.config import FlowConfig, NetworkOptions
from policies.flow.networks.backbone import describe, require_backbone
from policies.flow.presets import network
from policies.interface.options import read_options
from policies.interface.registry import PolicyDefaults
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.flow.policy import FlowPolicy

_DEFAULTS = {
    # what the two recipes were measured with stands in the recipes
    "pixels": PolicyDefaults(),
    "state": PolicyDefaults(),
    "small": PolicyDefaults(learning_rate=1e-3, weight_decay=1e-4, gradient_clip=1.0),
    "medium": PolicyDefaults(learning_rate=2e-4, weight_decay=1e-2, gradient_clip=1.0, publish_every_s=30.0),
    "large": PolicyDefaults(
        learning_rate=1e-4, weight_decay=1e-2, gradient_clip=1.0, publish_every_s=120.0, think_every_s=0.5
    ),
}
PATHS = ("vlm",)
"""configured values that are paths; `policies.interface.registry` makes those that are there absolute"""


class FlowOptions(NetworkOptions, frozen=True):
    """What `--policy-config` can say of a flow policy. What is left out is the size's own."""

    prefix: bool = False
    """train with actions that are already committed"""
    residual: bool = False
    """train the corrector of single actions"""
    advantage: bool = False
    """tell the fast path whether what it imitates was good"""
    guidance: float = 1.0
    """how far it is then pushed towards good; 1: not beyond it"""
    predict: Literal["velocity", "action"] | None = None
    """what the fast path answers"""
    euler_steps: int | None = None
    vlm: str = ""
    """directory of a vision-language model of the SmolVLM family on this machine; empty: convolutions"""
    vlm_layers: int = 0
    """of its text model; 0: all"""
    vlm_words: int = 48
    """tokens of an instruction"""
    vlm_train: bool = False
    """whether its weights learn, and then travel, too"""
    vlm_random: bool = False
    """random weights instead of those in the directory, to measure or to test"""


def make(size: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> FlowPolicy:
    """The policy of this size. Raises `ConfigError` for what it cannot be."""
    from policies.flow.policy import FlowPolicy

    options = _options(config)
    vlm = options.vlm or None
    return FlowPolicy(
        spec, _network(size, options, spec), seed, options.runtime, options.training, vlm, options.vlm_random
    )


def defaults(size: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What the size is trained with. Raises `ConfigError` as `make` does, as far as files and sizes tell."""
    options = _options(config)
    found = _network(size, options, spec)
    if found.vlm is not None:
        require_backbone(Path(options.vlm), found.vlm, options.vlm_random)
    return msgspec.structs.replace(_DEFAULTS[size], horizon=found.horizon)


def absolute(size: str) -> str:
    """A size means the same everywhere, whatever lies in the working directory."""
    return size


def _options(config: dict[str, Any]) -> FlowOptions:
    return read_options(config, FlowOptions, "flow policy: its configuration does not fit")


def _network(size: str, options: FlowOptions, spec: RobotSpec) -> FlowConfig:
    vlm = describe(options.vlm, options.vlm_layers, options.vlm_words, options.vlm_train) if options.vlm else None
    fields = set(FlowOptions.__struct_fields__) & set(FlowConfig.__struct_fields__) - {"cameras", "vlm"}
    said = {name: value for name in fields if (value := getattr(options, name)) is not None}
    found = network(size, spec, options.cameras, vlm, **said)
    found.require()
    return found
