"""What policies read of a training batch, checked.

Shapes: b images, k steps behind each image, ds state, H actions of da numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch

from policies.interface.policy import Batch
from wire.errors import InvalidDataError
from wire.types import RobotSpec

_mean_of_parts: ContextVar[Callable[[torch.Tensor], torch.Tensor] | None] = ContextVar("mean_of_parts", default=None)
_OF_IMAGE = ("seen_state",)
"""said once for all steps behind an image"""
_OFTEN_OF_IMAGE = ("frame_age", "advantage")
"""may be said once for all steps behind an image"""


def count_kept(count: torch.Tensor) -> torch.Tensor:
    """What a loss divides a sum over what is kept by: `count`, a scalar, of this batch.

    Where several processes have a part of the batch each, it is the mean of theirs: the mean of their losses is then
    the one over all that is kept, whoever has how much of it.
    """
    mean = _mean_of_parts.get()
    return count if mean is None else mean(count)


@contextmanager
def part_of_batch(mean: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, batches are parts; `mean` is that of a scalar over all of them, which all call equally often."""
    token = _mean_of_parts.set(mean)
    try:
        yield
    finally:
        _mean_of_parts.reset(token)


class StepBatch(NamedTuple):
    """A training batch as tensors."""

    arrays: dict[str, torch.Tensor]
    """[b, k, ...], those of images alone [b, ...]; `mask` is bool, `frame_age` float32[b, k, 1] ticks"""
    images: dict[str, torch.Tensor]
    """uint8[b, h, w, 3] of each camera"""
    instructions: list[str]
    """b"""


def read_steps(
    batch: Batch,
    spec: RobotSpec,
    shapes: Mapping[str, tuple[int, ...]],
    cameras: Iterable[str],
    device: torch.device,
) -> StepBatch:
    """The arrays that `shapes` names, [b, k, *shape], `seen_state` [b, *shape]; they may come without k.

    `state` and `mask` must be among them. Raises `InvalidDataError` that names what is not there, does not fit,
    or is another robot's.
    """
    if (given := batch.get("spec_hash")) is not None:
        hashes = {given} if isinstance(given, str) else {str(one) for one in given}
        if others := sorted(hashes - {spec.hash}):
            raise InvalidDataError(
                f"training batch: spec_hash {', '.join(others[:3])}, but this policy is for robot '{spec.embodiment}' "
                f"with {spec.hash}; train it on what was recorded with that robot."
            )
    if missing := [name for name in shapes if name not in batch]:
        raise InvalidDataError(f"training batch: it lacks {missing}; it has {sorted(batch)}.")
    b, *rest = batch["state"].shape
    flat = len(rest) < 2
    k = 1 if flat else rest[0]
    arrays = {}
    for name, shape in shapes.items():
        found = to_tensor(batch[name], device)
        if name in _OF_IMAGE:
            arrays[name] = require_shape(found, name, (b, *shape))
            continue
        if flat:
            found = found[:, None]
        elif name in _OFTEN_OF_IMAGE and tuple(found.shape) == (b,):
            found = found[:, None].expand(b, k)
        arrays[name] = require_shape(found, name, (b, k, *shape))
    arrays["mask"] = arrays["mask"].bool()
    if "frame_age" in arrays:
        arrays["frame_age"] = arrays["frame_age"].float()[..., None]
    if not arrays["mask"].any():
        raise InvalidDataError("training batch: its mask keeps no action, so there is nothing to imitate.")
    seen, images = batch.get("images", {}), {}
    sizes = {camera.name: (camera.height, camera.width) for camera in spec.cameras}
    for camera in cameras:
        if camera not in seen:
            raise InvalidDataError(f"training batch: no images of camera '{camera}'; it has {sorted(seen)}.")
        image = to_tensor(seen[camera], device)
        images[camera] = require_shape(image, f"image of '{camera}'", (b, *sizes[camera], 3))
    words = batch.get("instructions", [])
    if len(words) != b:
        raise InvalidDataError(f"training batch: {len(words)} instructions for {b} images.")
    return StepBatch(arrays, images, words)


def require_shape(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """`tensor`. Raises `InvalidDataError` that names it if it has another shape."""
    if tuple(tensor.shape) != shape:
        raise InvalidDataError(f"training batch: {name} has shape {list(tensor.shape)}, expected {list(shape)}.")
    return tensor


def to_tensor(array: Any, device: torch.device) -> torch.Tensor:
    """The numbers of an array on `device`."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()  # torch warns about memory it must not write, such as a received message
    return torch.as_tensor(array, device=device)


def hold_masked(actions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[..., H, da] `actions` with the last one that bool[..., H] `mask` kept in place of each that it did not.

    In front of the first that is kept, that one; a chunk of which none is kept becomes 0.
    """
    order = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    before = torch.where(mask, order, -1).cummax(-1).values
    chosen = torch.where(before >= 0, before, mask.int().argmax(-1, keepdim=True))[..., None].expand_as(actions)
    return torch.where(mask.any(-1)[..., None, None], actions.gather(-2, chosen), 0)
