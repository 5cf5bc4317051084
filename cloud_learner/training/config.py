"""What a recipe says of its trainer, beside the algorithm's own config. Light: recipes are made without torch."""

from __future__ import annotations

from dataclasses import dataclass

from wire.errors import ConfigError
from wire.weights.delta import Precision


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Pace of the trainer process."""

    demonstrations: int = 12
    """finished demonstration episodes to wait for before pretraining"""
    by_people: bool = False
    """what people drive on robots before there is a version demonstrates, too"""
    checkpoint_every_s: float = 30.0
    max_steps: int = 0
    """stop training after so many gradient steps, 0 never: for comparisons at equal compute"""
    pretrained: bool = False
    """the first weights are published as they are; neither `set_normalization` nor `pretrain_steps` is for them"""
    min_corrected_steps: int = 0
    """what is pretrained takes its first gradient step once so many steps can be imitated"""
    max_samples_per_insert: float = 0.0
    """online, draws for each step that can be imitated; beyond, the trainer waits for more of them. 0: no bound"""


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """How versions travel."""

    precision: Precision = Precision.int8
    anchor_every: int = 100
    """of so many versions one travels whole, with the exact weights; 1: every one, 0: only those that must"""

    def __post_init__(self) -> None:
        if self.anchor_every < 0:
            raise ConfigError(f"publisher: anchor_every is {self.anchor_every}; it must not be negative.")


@dataclass(frozen=True, slots=True)
class ActionCheckConfig:
    """When a version is not let out for what it does."""

    observations: int = 16
    """recorded ones for which a version acts before it is published; 0: no version is looked at"""
    max_change: float = 0.25
    """root mean square of the difference to its parent's actions, in ranges of the action's dimensions; what is farther
    may go if it is no farther from what people did than its parent is"""
    max_saturation_rise: float = 0.5
    """share of actions at the limits of their range, above its parent's; the same holds of what has more"""
    min_spread: float = 0.02
    """of what actions differ by between observations, as a share of its parent's"""
    quantization_every: int = 10
    """of so many deltas one has measured what quantisation alone changes of the actions"""

    def __post_init__(self) -> None:
        if self.observations < 0 or self.quantization_every < 1:
            raise ConfigError(
                f"action check: observations {self.observations} must not be negative, quantization_every "
                f"{self.quantization_every} must be at least 1."
            )
        for name in ("max_change", "max_saturation_rise"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"action check: {name} is {getattr(self, name)}; it must be positive.")
