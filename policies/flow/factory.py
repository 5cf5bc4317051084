"""`flow:SIZE` for `policies.interface.registry`. Nothing here imports torch before a policy is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policies.common.runtime import Runtime
from policies.flow.config import FlowConfig
from policies.flow.presets import SIZES, network
from policies.interface.options import read_options
from policies.interface.registry import PolicyDefaults
from policies.interface.trainable import FinetuneConfig
from wire.errors import ConfigError, suggest
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


class FlowChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--policy-config` can say of a flow policy. What is left out is the size's own."""

    horizon: int | None = None
    """H, actions per chunk; None: 16"""
    max_offset: int = 0
    """ticks: the largest delay that training simulates"""
    prefix: bool = False
    """train with actions that are already committed"""
    residual: bool = False
    """train the corrector of single actions"""
    advantage: bool = False
    """tell the fast path whether what it imitates was good"""
    guidance: float = 1.0
    """how far it is then pushed towards good; 1: not beyond it"""
    online_statistics: bool = False
    """the state's statistics go on learning"""
    predict: Literal["velocity", "action"] | None = None
    """what the fast path answers"""
    euler_steps: int | None = None
    cameras: tuple[str, ...] | None = None
    """None: all of the robot's"""
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
    runtime: Runtime = Runtime()
    training: FinetuneConfig = FinetuneConfig()


def make(place: str, config: dict[str, Any], spec: RobotSpec, seed: int) -> FlowPolicy:
    """The policy of size `place`. Raises `ConfigError` for what it cannot be."""
    from policies.flow.policy import FlowPolicy

    choice = _choice(config)
    vlm = choice.vlm or None
    return FlowPolicy(
        spec, _network(place, choice, spec), seed, choice.runtime, choice.training, vlm, choice.vlm_random
    )


def defaults(place: str, config: dict[str, Any], spec: RobotSpec) -> PolicyDefaults:
    """What the size is trained with. Raises `ConfigError` as `make` does, as far as files and sizes tell."""
    choice = _choice(config)
    found = _network(place, choice, spec)
    if found.vlm is not None:
        from pathlib import Path

        from policies.flow.networks.backbone import require_backbone

        require_backbone(Path(choice.vlm), found.vlm, choice.vlm_random)
    return msgspec.structs.replace(_DEFAULTS[place], horizon=found.horizon)


def absolute(place: str) -> str:
    """A size means the same everywhere, whatever lies in the working directory."""
    return place


def _choice(config: dict[str, Any]) -> FlowChoice:
    return read_options(config, FlowChoice, "flow policy: its configuration does not fit")


def _network(place: str, choice: FlowChoice, spec: RobotSpec) -> FlowConfig:
    if place not in SIZES:
        raise ConfigError(
            f"flow policy: no size '{place}'.{suggest(place, SIZES)} Say flow:SIZE, with one of {', '.join(SIZES)}."
        )
    vlm = None
    if choice.vlm:
        from policies.flow.networks.backbone import describe

        vlm = describe(choice.vlm, choice.vlm_layers, choice.vlm_words, choice.vlm_train)
    options = choice.max_offset, choice.prefix, choice.residual, choice.cameras, vlm
    found = network(place, spec, 16 if choice.horizon is None else choice.horizon, *options)
    told: dict[str, Any] = {"advantage": choice.advantage, "guidance": choice.guidance}
    told["online_statistics"] = choice.online_statistics
    if choice.predict is not None:
        told["predict"] = choice.predict
    if choice.euler_steps is not None:
        told["euler_steps"] = choice.euler_steps
    found = msgspec.structs.replace(found, **told)
    found.require()
    return found
