"""`flow:SIZE` for `policies.interface.registry`: the two sizes of the recipes, and three with a transformer.

Nothing here imports torch before a policy is made, so that a process which only starts others can read a size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policies.flow.config import (
    AttentionPoolerConfig,
    Conv,
    FlowConfig,
    NetworkOptions,
    Transformer,
    Vlm,
    camera_encoders,
)
from policies.flow.networks.backbone import describe, require_backbone
from policies.interface.registry import PolicyDefaults, read_options
from wire.errors import ConfigError, suggest
from wire.types import RobotSpec

if TYPE_CHECKING:
    from policies.flow.policy import FlowPolicy

_TRANSFORMERS: dict[str, tuple[Transformer, AttentionPoolerConfig, tuple[Conv, ...]]] = {
    # about 0.7 M parameters, for a CPU
    "small": (
        Transformer(width=96, layers=3, heads=4),
        AttentionPoolerConfig(queries=8, width=64, inner=64, heads=4),
        (Conv(48, 8, 4), Conv(48, 3, 1)),
    ),
    # about 50 M, for a graphics card; a vision transformer over patches as the slow path
    "medium": (
        Transformer(width=512, layers=8, heads=8),
        AttentionPoolerConfig(queries=16, width=256, inner=512, heads=8, layers=4),
        (Conv(128, 4, 4), Conv(256, 2, 2)),
    ),
    # a fast path of about 300 M, for a vision-language backbone as the slow one
    "large": (
        Transformer(width=1024, layers=19, heads=16),
        AttentionPoolerConfig(queries=32, width=512, inner=1024, heads=16),
        (Conv(128, 4, 4), Conv(256, 2, 2), Conv(256, 2, 2)),
    ),
}
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
SIZES = tuple(_DEFAULTS)
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
    editor: int | None = None
    """hidden units of a network that edits each chunk as a critic taught it"""
    editor_noise: float | None = None
    """how far it strays from that on robots, to find what is better"""
    outlook: int | None = None
    """hidden units of networks that foretell whether the policy will succeed"""
    explore: Literal["sde", "noise"] | None = None
    """act by a flow with random steps, which says how probable each chunk was"""
    explore_noise: float = 0.5
    """how random that of `sde` is"""
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

    options, found = _read(size, config, spec)
    return FlowPolicy(spec, found, seed, options.runtime, options.training, options.vlm or None, options.vlm_random)


def defaults(size: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What the size is trained with. Raises `ConfigError` as `make` does, as far as files and sizes tell."""
    options, found = _read(size, config, spec)
    if found.vlm is not None:
        require_backbone(Path(options.vlm), found.vlm, options.vlm_random)
    return msgspec.structs.replace(_DEFAULTS[size], horizon=found.horizon)


def absolute(size: str) -> str:
    """A size means the same everywhere, whatever lies in the working directory."""
    return size


def _read(size: str, config: dict[str, Any], spec: RobotSpec) -> tuple[FlowOptions, FlowConfig]:
    """What is configured, and the network that it makes of the size."""
    options = read_options(config, FlowOptions, "flow policy: its configuration does not fit")
    vlm = describe(options.vlm, options.vlm_layers, options.vlm_words, options.vlm_train) if options.vlm else None
    fields = set(FlowOptions.__struct_fields__) & set(FlowConfig.__struct_fields__) - {"cameras", "vlm"}
    said = {name: value for name in fields if (value := getattr(options, name)) is not None}
    found = network(size, spec, options.cameras, vlm, **said)
    found.require()
    return options, found


def network(
    size: str, spec: RobotSpec, cameras: tuple[str, ...] | None = None, vlm: Vlm | None = None, **options: Any
) -> FlowConfig:
    """The network of one size, through the named cameras (None: all) and with a backbone as the slow path if given.

    `options`: other fields of `FlowConfig`. Raises `ConfigError` for a size or a camera that is not there.
    """
    if size not in SIZES:
        raise ConfigError(
            f"flow policy: no size '{size}'.{suggest(size, SIZES)} Say flow:SIZE, with one of {', '.join(SIZES)}."
        )
    seen = camera_encoders(spec, cameras, "flow policy")
    if size == "pixels" or (size != "state" and seen):
        config = pixels_network(spec, cameras=seen, **options)
    else:
        config = state_network(spec, **options)
    if size in _TRANSFORMERS:
        transformer, pooler, stem = _TRANSFORMERS[size]
        changed = {"euler_steps": 4, "ego_motion": False} | options
        config = msgspec.structs.replace(config, transformer=transformer, pooler=pooler, stem=stem, **changed)
    if vlm is None:
        return config
    if config.pooler is None:
        raise ConfigError(
            f"flow policy: size '{size}' has no latent tokens for a backbone; use small, medium or large."
        )
    # its own layers have mixed words and pictures already
    return msgspec.structs.replace(config, vlm=vlm, stem=(), pooler=msgspec.structs.replace(config.pooler, layers=0))


def pixels_network(spec: RobotSpec, **options: Any) -> FlowConfig:
    """Small cameras, an instruction and proprioception; `options`: other fields of `FlowConfig`.

    Raises `ConfigError` for a robot without a camera.
    """
    defaults: dict[str, Any] = {
        "cameras": camera_encoders(spec, None, "flow policy"),
        # patches of 4 pixels, then a quarter of their places: 19 ms a gradient step of 64 pictures on one thread in
        # float32, where Conv(48, 8, 4), Conv(48, 3, 1) takes 51, and as good
        "stem": (Conv(32, 4, 4), Conv(64, 3, 2)),
        # closed loop after equal training, one seed: 0.89 success against 0.75 with "velocity"; from the whole state
        # it is the other way round, 0.53 against 0.92
        "predict": "action",
        # offline on the same corrections, after 3,000 steps: 0.97 success with it, 0.35 to 0.48 without
        "ahead": (16, 32, 48),
        "euler_steps": 4,
        "ego_motion": options.get("max_offset", 0) > 0,
    }
    config = FlowConfig(state_dim=spec.state_dim, action_dim=spec.action_dim, **defaults | options)
    if not config.cameras:
        raise ConfigError(
            f"robot '{spec.embodiment}' has no camera; use the `state` recipe or a robot with a camera for `pixels`."
        )
    return config


def state_network(spec: RobotSpec, **options: Any) -> FlowConfig:
    """The whole state as numbers and an instruction; cameras, if there are any, are not looked at."""
    return FlowConfig(state_dim=spec.state_dim, action_dim=spec.action_dim, **options)
