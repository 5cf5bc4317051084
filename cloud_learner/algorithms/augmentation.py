"""What is changed of a batch before it is learned from, whatever learns."""

from __future__ import annotations

import numpy as np

from policies.interface.policy import Batch


def shift_images(batch: Batch, pixels: int, rng: np.random.Generator, rank: int = 0, world: int = 1) -> Batch:
    """`batch` with its images moved; what is in front of an image in time moves with it.

    Of `world` ranks that share the batch `rank` has these images: they move as they would were all of them here.
    """
    batch, past = dict(batch), batch.get("past_images", {})
    shifted = {
        camera: random_shift(_with_past(images, past.get(camera)), pixels, rng, rank, world)
        for camera, images in batch.get("images", {}).items()
    }
    batch["images"] = {camera: images[:, -1] for camera, images in shifted.items()}
    if past:
        batch["past_images"] = {camera: images[:, :-1] for camera, images in shifted.items() if camera in past}
    return batch


def _with_past(images: np.ndarray, past: np.ndarray | None) -> np.ndarray:
    """uint8[b, n + 1, h, w, 3]: what was seen, oldest first; a shift belongs to the camera, so all share it."""
    newest = images[:, None]
    return newest if past is None else np.concatenate([past, newest], 1)


def random_shift(
    images: np.ndarray, pixels: int, rng: np.random.Generator, rank: int = 0, world: int = 1
) -> np.ndarray:
    """uint8[b, ..., h, w, 3], what belongs to each of b moved by its own -pixels..pixels in x and y.

    The border is repeated.

    Yarats, Kostrikov, Fergus 2021, "Image Augmentation Is All You Need", section 3.1 (DrQ).
    """
    b, *between, h, w, _ = images.shape
    moved = (pixels, pixels)
    padded = np.pad(images, ((0, 0), *((0, 0) for _ in between), moved, moved, (0, 0)), mode="edge")
    shifted = np.empty_like(images)
    moves = rng.integers(0, 2 * pixels + 1, (world, b, 2))[rank]
    for i, (y, x) in enumerate(moves):
        shifted[i] = padded[i, ..., y : y + h, x : x + w, :]
    return shifted
