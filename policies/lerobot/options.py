"""What can be configured of a lerobot policy. Imports no torch."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, Literal

import msgspec

from policies.common.runtime import Runtime
from policies.interface.trainable import FinetuneConfig
from wire.errors import ConfigError

_FIXED = ("type", "input_features", "output_features", "normalization_mapping", "device", "use_amp", "use_peft")


class LeRobotOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options beside a checkpoint."""

    cameras: dict[str, str] = {}
    """{feature of the policy (observation.images.NAME or NAME): camera of the robot}, where names differ"""
    statistics: Literal["checkpoint", "spec", "buffer"] = "checkpoint"
    """what states and actions are normalised with: the checkpoint's own, the spec's limits, or recorded data"""
    fresh: bool = False
    """begin with random weights instead of the checkpoint's"""
    override: dict[str, Any] = {}
    """fields of the checkpoint's config.json with other values, such as n_action_steps or num_steps"""
    max_offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    """D: trained on states and actions up to so many ticks later than the image (VLASH, arXiv 2512.01031)"""
    training: FinetuneConfig = FinetuneConfig()
    runtime: Runtime = Runtime()

    def __post_init__(self) -> None:
        if fixed := sorted(set(self.override) & set(_FIXED)):
            raise ConfigError(f"lerobot policy: override cannot change '{fixed[0]}'; it belongs to the checkpoint.")


def require_lerobot() -> None:
    """Raise `ConfigError` if lerobot is not installed."""
    if importlib.util.find_spec("lerobot") is None:
        raise ConfigError(
            "lerobot policy: the package lerobot is not installed here; `pip install 'vla-fleet[lerobot]'` brings it."
        )
