"""HG-DAgger: imitate what people (or scripted experts) did when they took the robot over.

Kelly, Sidrane, Driggs-Campbell, Kochenderfer 2019, "HG-DAgger: Interactive Imitation Learning with Human Experts",
arXiv 1810.02890, algorithm 1: the person decides when to intervene; the demonstrations and the corrections, and only
they, are aggregated and imitated. What the policy itself did is never a target: the batch's `mask` leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.interface.policy import Batch, TrainablePolicy
from wire.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HGDagger:
    """What the learner and the trainer need to know."""

    batch: int = 64
    """b, images (or, without a camera, states) per gradient step"""
    ticks_per_frame: int = 1
    """k, control steps drawn behind each image"""
    offset_share: float = 1.0
    """share of the steps drawn that lie up to the policy's `max_offset` ticks later than their image; the rest are the
    steps that saw it. Fewer learn the task faster, more learn better to act late"""
    draws: int = 1
    """(noise, flow time) pairs per step: more signal for one image encoding"""
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    """the learning rate grows linearly over the first steps"""
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of AdamW's first and second moments"""
    gradient_clip: float = 10.0
    """largest norm of the whole gradient"""
    ema_decay: float = 0.99
    """cap of the weight average's decay (1 + n) / (10 + n) after n steps; the average is what robots run"""
    shift_px: int = 0
    """images are shifted by up to so many pixels each way"""
    bfloat16: bool = False
    """compute the loss in bfloat16 where the processor has instructions for it; the weights stay float32"""
    recent_share: float = 0.0
    """share of each batch drawn from a task's newest steps: corrections of the policy that runs now"""
    recent_steps: int = 1200
    """how many imitable steps of a task count as newest"""
    adaptive_share: bool = False
    """more of what is learned less: each task's share of online data follows the losses (SOP, arXiv 2601.03044), for
    policies that say `image_losses`; otherwise every imitable step of a task counts the same"""
    pretrain_steps: int = 600
    """gradient steps on the demonstrations before the first version is published: a few seconds' worth, so that robots
    get to work early; learning goes on while they do"""
    publish_every_s: float = 5.0
    """time between two published versions"""

    def __post_init__(self) -> None:
        positive = ("batch", "ticks_per_frame", "draws", "learning_rate", "gradient_clip", "recent_steps")
        for name in (*positive, "publish_every_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"HGDagger: {name} is {getattr(self, name)}; it must be positive.")
        for name in ("warmup_steps", "weight_decay", "shift_px", "pretrain_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"HGDagger: {name} is {getattr(self, name)}; it must not be negative.")
        if not 0 <= self.offset_share <= 1:
            raise ConfigError(f"HGDagger: offset_share is {self.offset_share}; it must be in [0, 1].")
        for name in ("ema_decay", "recent_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"HGDagger: {name} is {getattr(self, name)}; it must be in [0, 1).")

    def rate(self, step: int) -> float:
        """Learning rate of gradient step `step`, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))

    def decay(self, steps: int) -> float:
        """Decay of the weight average after `steps` gradient steps."""
        return min(self.ema_decay, (1 + steps) / (10 + steps))


def pixels() -> HGDagger:
    """Four tasks from a small camera."""
    return HGDagger(
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
        bfloat16=True,
        recent_share=0.25,
        pretrain_steps=150,
    )


def state() -> HGDagger:
    """Two tasks from the whole state."""
    return HGDagger(batch=128, ema_decay=0.995, pretrain_steps=800)


def loss(policy: TrainablePolicy, batch: Batch, config: HGDagger, rng: np.random.Generator) -> torch.Tensor:
    """The policy's imitation loss of `batch`, augmented: a scalar. Equation and paper stand at the policy's `loss`."""
    return policy.loss(augment(batch, config, rng))


_OF_A_STEP = ("state", "actions", "mask", "ahead", "frame_age", "later_index", "later_state", "past_state")
"""what a loss may read of a batch and each step has for itself"""


def augment(batch: Batch, config: HGDagger, rng: np.random.Generator) -> Batch:
    """`batch` with shifted images and every step repeated `draws` times, in the grouped layout when it repeats."""
    batch = dict(batch)
    if config.shift_px:
        past = batch.get("past_images", {})
        shifted = {
            camera: random_shift(_with_past(images, past.get(camera)), config.shift_px, rng)
            for camera, images in batch.get("images", {}).items()
        }
        batch["images"] = {camera: images[:, -1] for camera, images in shifted.items()}
        if past:
            batch["past_images"] = {camera: images[:, :-1] for camera, images in shifted.items() if camera in past}
    if config.draws > 1:
        grouped = batch["state"].ndim == 3
        for name in _OF_A_STEP:
            # what has no second axis in a grouped batch is the same for all steps behind an image
            if name in batch and (not grouped or batch[name].ndim > 1):
                array = batch[name] if grouped else batch[name][:, None]
                batch[name] = np.repeat(array, config.draws, axis=1)
    return batch


def _with_past(images: np.ndarray, past: np.ndarray | None) -> np.ndarray:
    """uint8[b, n + 1, h, w, 3]: what was seen, oldest first; a shift belongs to the camera, so all share it."""
    newest = images[:, None]
    return newest if past is None else np.concatenate([past, newest], 1)


def random_shift(images: np.ndarray, pixels: int, rng: np.random.Generator) -> np.ndarray:
    """uint8[b, ..., h, w, 3], what belongs to each of b moved by its own -pixels..pixels in x and y.

    The border is repeated.

    Yarats, Kostrikov, Fergus 2021, "Image Augmentation Is All You Need", section 3.1 (DrQ).
    """
    b, *between, h, w, _ = images.shape
    moved = (pixels, pixels)
    padded = np.pad(images, ((0, 0), *((0, 0) for _ in between), moved, moved, (0, 0)), mode="edge")
    shifted = np.empty_like(images)
    for i, (y, x) in enumerate(rng.integers(0, 2 * pixels + 1, (b, 2))):
        shifted[i] = padded[i, ..., y : y + h, x : x + w, :]
    return shifted
