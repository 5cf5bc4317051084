"""What a recipe says of its training, whatever the algorithm. Light: recipes are made without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from wire.errors import ConfigError
from wire.weights.delta import Precision


class LossPrecision(StrEnum):
    """In what losses are computed; weights stay float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    """where the processor has instructions for it"""


class RateSchedule(StrEnum):
    """Of the learning rate, after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    """down to a tenth at `decay_steps` (Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5 without restarts)"""


_LAST_RATE = 0.1
LONGEST_S = 1e10
"""of a setting in seconds, which is counted in nanoseconds: three centuries"""


def require_finite(config: Any, what: str) -> None:
    """Raise `ConfigError` that begins with `what` for a number in a field of that dataclass which is not finite."""
    for one in fields(config):
        value = getattr(config, one.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ConfigError(f"{what}: {one.name} is {value}; it must be finite.")


@dataclass(frozen=True)
class TrainingConfig:
    """How gradient steps are made, and when versions are."""

    batch: int = 64
    """b, images (or, without a camera, states) per batch"""
    ticks_per_frame: int = 1
    """k, control steps drawn behind each image"""
    offset_share: float = 1.0
    """share of the steps drawn that lie up to the policy's `max_offset` ticks later than their image; the rest are the
    steps that saw it. Fewer learn the task faster, more learn better to act late"""
    shift_px: int = 0
    """images are shifted by up to so many pixels each way"""
    base_share: float = 0.0
    """of each batch, from demonstrations of tasks that are not the recipe's, such as an imported dataset: what a policy
    was trained on is not forgotten while it learns few tasks. 0: none is drawn"""
    accumulate: int = 1
    """batches whose gradients make one step"""
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    """the learning rate grows linearly over the first steps"""
    schedule: RateSchedule = RateSchedule.constant
    decay_steps: int = 100_000
    """gradient steps over which the schedule falls"""
    weight_decay: float = 1e-4
    reference_pull: float = 0.0
    """after each step the policy's weights go back towards a reference by the learning rate times this, apart from the
    gradient as weight decay does: what it could before is not lost on the way to what is new (L2-SP, Li, Grandvalet and
    Davoine 2018, arXiv 1802.01483, equation 2). 0: there is none"""
    reference_decay: float = 1.0
    """1: the reference is what the training began with, as with --from; below: it is a running average of the weights,
    with this cap of its decay (1 + n) / (10 + n) after n steps"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of AdamW's first and second moments"""
    gradient_clip: float = 10.0
    """largest norm of the whole gradient"""
    ema_decay: float = 0.99
    """cap of the policy's average's decay (1 + n) / (10 + n) after n steps; the average is what robots run"""
    precision: LossPrecision = LossPrecision.float32
    compile: bool = False
    """what a loss calls of a network goes through torch.compile: the second and the third gradient step then take from
    seconds to minutes, the others less than before, where a network gains by it"""
    spike_factor: float = 10.0
    """a loss so many times as high as before, for twenty gradient steps, sends the run back to its newest checkpoint;
    0: none does. One around zero is measured by what it scatters"""
    pretrain_steps: int = 600
    """gradient steps on the demonstrations before the first version is published: a few seconds' worth, so that robots
    get to work early; learning goes on while they do"""
    publish_every_s: float = 5.0
    """time between two published versions"""

    def __post_init__(self) -> None:
        require_finite(self, "training")
        positive = ("batch", "ticks_per_frame", "accumulate", "learning_rate", "decay_steps", "gradient_clip")
        for name in (*positive, "publish_every_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"training: {name} is {getattr(self, name)}; it must be positive.")
        for name in ("warmup_steps", "weight_decay", "reference_pull", "shift_px", "pretrain_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"training: {name} is {getattr(self, name)}; it must not be negative.")
        if self.publish_every_s > LONGEST_S:
            raise ConfigError(
                f"training: publish_every_s is {self.publish_every_s}; it must be at most {LONGEST_S:g} seconds."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"training: betas are {self.betas}; both must be in [0, 1).")
        if self.spike_factor and self.spike_factor <= 1:
            raise ConfigError(f"training: spike_factor is {self.spike_factor}; it must be above 1, or 0 for none.")
        if not 0 <= self.offset_share <= 1:
            raise ConfigError(f"training: offset_share is {self.offset_share}; it must be in [0, 1].")
        if not 0 <= self.base_share < 1:
            raise ConfigError(f"training: base_share is {self.base_share}; it must be in [0, 1).")
        if not 0 <= self.reference_decay <= 1:
            raise ConfigError(f"training: reference_decay is {self.reference_decay}; it must be in [0, 1].")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"training: ema_decay is {self.ema_decay}; it must be in [0, 1).")

    def rate(self, step: int) -> float:
        """Learning rate of gradient step `step`, counted from 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.schedule == RateSchedule.constant:
            return self.learning_rate * warm
        done = min(1.0, max(0, step - self.warmup_steps) / self.decay_steps)
        fallen = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * warm * fallen

    def decay(self, steps: int) -> float:
        """Decay of the policy's average after `steps` gradient steps."""
        return min(self.ema_decay, (1 + steps) / (10 + steps))

    def decay_of_reference(self, steps: int) -> float:
        """Of what the policy's weights are drawn to; 1: it stays."""
        return 1.0 if self.reference_decay == 1 else min(self.reference_decay, (1 + steps) / (10 + steps))


def pixels_training() -> TrainingConfig:
    """Of four tasks from a small camera."""
    return TrainingConfig(
        batch=32,
        ticks_per_frame=8,
        # Held-out success after 2,500 steps, ages up to 8 ticks: 0.84 with a quarter of the steps late, 0.73 with all,
        # 0.89 with none (mean of two seeds, 40 episodes each; noise about 0.1).
        offset_share=0.5,
        learning_rate=2e-3,
        warmup_steps=50,
        betas=(0.9, 0.95),
        ema_decay=0.995,
        shift_px=1,
        precision=LossPrecision.bfloat16,
        pretrain_steps=150,
    )


@dataclass(frozen=True)
class PopulationConfig:
    """Of several trainings whose settings are tuned while they train (Jaderberg et al. 2017, "Population Based Training
    of Neural Networks", arXiv 1711.09846)."""

    members: int = 0
    """how many train; 0: one, whose settings stay"""
    tune: tuple[str, ...] = ()
    """what they differ by, PATH=LOW..HIGH or PATH=VALUE,VALUE,...: fields of `training` and `algorithm`"""
    every: int = 0
    """gradient steps after which each is measured, and the worst goes on as a copy of the best, with settings near its;
    0: a tenth of all"""

    def __post_init__(self) -> None:
        if self.members < 0 or self.members == 1:
            raise ConfigError(f"population: members is {self.members}; it must be 2 or more, or 0 for no population.")
        if self.every < 0:
            raise ConfigError(f"population: every is {self.every}; it must not be negative.")


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
    anchor_every: int = 400
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
    max_quantization_change: float = 0.05
    """of the actions by quantisation alone, in the same unit; a version that it changes more goes whole and exact"""
    quantization_every: int = 1
    """of so many deltas one has that measured, which has a version act twice; the others are not bounded by it"""

    def __post_init__(self) -> None:
        if self.observations < 0 or self.quantization_every < 1:
            raise ConfigError(
                f"action check: observations {self.observations} must not be negative, quantization_every "
                f"{self.quantization_every} must be at least 1."
            )
        if self.min_spread < 0:
            raise ConfigError(f"action check: min_spread is {self.min_spread}; it must not be negative.")
        for name in ("max_change", "max_saturation_rise", "max_quantization_change"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"action check: {name} is {getattr(self, name)}; it must be positive.")
